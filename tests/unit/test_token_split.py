"""The engine's own split of text that is to come, for jump-forward, against tokenizers: whatever follows the text."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from charonia import _engine
from charonia.text.token_split import PATTERNS, build_token_split
from charonia.text.token_table import build_token_table
from charonia.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("CHARONIA_TEST_SPLITS", "1000"))
TRAINING = [(ROOT / "docs" / name).read_text() for name in ("structured_output.md", "apis.md", "contracts.md")]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN, LLAMA = (pattern for pattern in PATTERNS if pattern.startswith("(?i"))
# What patterns treat differently; added tokens and beginnings of them.
PIECES = [*"abzAZ09 \n\t'\"{}:,.-_<|>\r", "'re", "'ll", "'RE", "name", "  ", "\n ", "true"]
PIECES += ['": "', '", "', "<|end|>", "<|en"]
# What may follow besides: letters that a contraction knows, spaces and marks beyond ASCII.
FOLLOWING = [*PIECES, "é", "ſ", "\u212a", "\uff1a", "\u00a0", "中", "\u2028", "\u0301", "\u0338"]  # noqa: RUF001


def trained(*stages: str, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in stages]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|end|>"],
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_tokens(["<|plugin|>", "zz"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name == "demo":
        return load_tokenizer(ROOT / "models" / "demo" / "model")
    if name == "llama":
        return trained(LLAMA, ignore_merges=True)
    return trained(*{"gpt2": [GPT2], "qwen": [QWEN], "digits": [r"\p{N}", GPT2]}[name])


def engine_split(tokenizer: PreTrainedTokenizerFast, folder: Path) -> _engine.TokenSplit:
    build_token_table(tokenizer, len(tokenizer)).save(folder / "token_table.safetensors")
    build_token_split(tokenizer).save(folder / "token_split.safetensors")
    return _engine.TokenSplit(folder)


def some_text(rng: random.Random) -> str:
    if rng.random() < 0.4:
        document = rng.choice(TRAINING)
        begin = rng.randrange(len(document) - 60)
        return "".join(c for c in document[begin : begin + rng.randrange(1, 60)] if c.isascii())
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 14)))


@pytest.mark.parametrize("name", ["demo", "gpt2", "qwen", "llama", "digits"])
def test_tokens_are_those_of_the_tokenizer_whatever_follows(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    split = engine_split(tokenizer, tmp_path)
    rng = random.Random(name)

    def encode(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    certain = 0
    for _ in range(CASES):
        text = some_text(rng)
        found = split.forced([], text)
        certain += len(found)
        for _ in range(3):
            following = "".join(rng.choice(FOLLOWING) for _ in range(rng.randrange(5)))
            assert encode(text + following)[: len(found)] == found, (text, following)
        # Behind tokens of the text, some of which are further back than is looked at.
        whole = encode(some_text(rng) + text)
        cut = rng.randrange(len(whole))
        behind = tokenizer.backend_tokenizer.decode(whole[cut:], skip_special_tokens=False)
        if behind.isascii() and tokenizer.backend_tokenizer.decode(whole, skip_special_tokens=False).isascii():
            found = split.forced(whole[max(0, cut - 17) : cut], behind)
            certain += len(found)
            assert whole[cut : cut + len(found)] == found, (whole, cut)
    assert certain > 2 * CASES


def test_nothing_is_certain_behind_a_split_that_is_not_the_tokenizer_s(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gpt2")
    split = engine_split(tokenizer, tmp_path)
    letters = [tokenizer.backend_tokenizer.token_to_id(letter) for letter in "the"]
    assert len(tokenizer.encode("the")) < 3
    assert split.forced(tokenizer.encode("the"), " output of") == tokenizer.encode(" output")
    assert split.forced(letters, " output of") == []
    assert split.forced([], "") == []
    assert split.forced([], "é") == []


def test_what_is_not_known_says_so(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    no_steps = Tokenizer(models.BPE())
    no_steps.pre_tokenizer = pre_tokenizers.Sequence([])
    spaced = Tokenizer(models.BPE())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for tokenizer, says in (
        (unigram, "one of SentencePiece (Unigram)"),
        (Tokenizer(models.BPE(byte_fallback=True)), "one of SentencePiece (BPE)"),
        (Tokenizer(models.WordLevel()), "WordLevel, and not byte-level BPE"),
        (no_steps, "ByteLevel"),
        (Tokenizer(models.BPE()), "ByteLevel"),
        (spaced, "without a space in front"),
        (trained(r"\w+").backend_tokenizer, json.dumps(r"\w+")),
    ):
        found = build_token_split(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert says in found.unsupported
        assert not found.merges
    build_token_table(trained(GPT2), 1503).save(tmp_path / "token_table.safetensors")
    with pytest.raises(Exception, match="convert the model again"):
        _engine.TokenSplit(tmp_path)
    found.save(tmp_path / "token_split.safetensors")
    with pytest.raises(Exception, match="is not known"):
        _engine.TokenSplit(tmp_path)
