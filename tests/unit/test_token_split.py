"""The engine's own split of future text, for jump-forward, compared with tokenizers for any following text."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizer_kinds import LLAMA, PREPEND, QWEN, byte_fallback, byte_level, split
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from charonia import _engine
from charonia.text.token_split import build_token_split
from charonia.text.token_table import build_token_table
from charonia.text.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("CHARONIA_TEST_SPLITS", "1000"))
TRAINING = [(ROOT / "docs" / name).read_text() for name in ("structured_output.md", "apis.md", "contracts.md")]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Texts that patterns treat differently; added tokens and prefixes of them.
PIECES = [*"abzAZ09 \n\t'\"{}:,.-_<|>\r", "'re", "'ll", "'RE", "name", "  ", "\n ", "true"]
PIECES += [*"\v\f\x00\x1c\x7f", '": "', '", "', "<|end|>", "<|en"]
# Possible following text: letters of contractions, spaces and characters beyond ASCII.
FOLLOWING = [*PIECES, "é", "ſ", "\u212a", "\uff1a", "\u00a0", "中", "\u2028", "\u0301", "\u0338"]  # noqa: RUF001


def trained(*patterns: str, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(*map(split, patterns), texts=TRAINING, size=1500, ignore_merges=ignore_merges)
    return with_added(tokenizer)


def sentence_piece(*, across_words: bool, metaspace: bool) -> PreTrainedTokenizerFast:
    tokenizer = byte_fallback(
        None if metaspace else PREPEND,
        pre_tokenizers.Metaspace(prepend_scheme="first", split=False) if metaspace else None,
        strip=True,
        texts=[part for text in TRAINING for part in text.split("\n")],
        size=1500,
        alphabet=[chr(code) for code in range(33, 127) if chr(code) not in "~^"],  # two characters are bytes
        across_words=across_words,
    )
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["<|plugin|>", "zz"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    if name.startswith("sentence piece"):
        return sentence_piece(across_words="across" in name, metaspace="metaspace" in name)
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


KINDS = ["demo", "gpt2", "qwen", "llama", "digits"]
KINDS += ["sentence piece", "sentence piece, metaspace", "sentence piece across words"]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_certain_tokens_equal_the_tokenizer_for_every_continuation(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name)
    split = engine_split(tokenizer, tmp_path)
    table = build_token_table(tokenizer, len(tokenizer))
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
        # After tokens of the text. Some of them are outside the examined range.
        text = some_text(rng) + text
        whole = encode(text)
        cut = rng.randrange(len(whole))
        behind = b"".join(table.tokens[token] for token in whole[cut:])
        if behind.isascii() and text.isascii():
            found = split.forced(whole[max(0, cut - 17) : cut], behind.decode())
            certain += len(found)
            assert whole[cut : cut + len(found)] == found, (whole, cut)
            following = "".join(rng.choice(FOLLOWING) for _ in range(rng.randrange(5)))
            longer = encode(text + following)
            assert not found or longer[: cut + len(found)] == whole[: cut + len(found)], (text, following)
    assert certain > CASES


def test_nothing_is_certain_behind_a_split_that_is_not_the_tokenizer_s(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gpt2")
    split = engine_split(tokenizer, tmp_path)
    letters = [tokenizer.backend_tokenizer.token_to_id(letter) for letter in "the"]
    assert len(tokenizer.encode("the")) < 3
    assert split.forced(tokenizer.encode("the"), " output of") == tokenizer.encode(" output")
    assert split.forced(letters, " output of") == []
    assert split.forced([], "") == []
    assert split.forced([], "é") == []


def test_an_added_token_is_found_wherever_it_begins(tmp_path: Path) -> None:
    """Its start may be in tokens before the first place where every pattern splits."""
    tokenizer = tokenizer_of("gpt2")
    tokenizer.add_tokens(["<|a-b c|>"])
    split = engine_split(tokenizer, tmp_path)

    def encode(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    before, text = encode("1 2 3 4 5 6 7 8 9 10 11 12 <|a"), "-b c|> so it is"
    assert len(before) > 16 and len(encode("<|a" + text)) < len(encode("<|") + encode(text))
    assert split.forced(before, text) == []
    assert split.forced(before, "-b c so it is") == encode("-b c so it")


def test_of_a_long_text_a_part_is_looked_at(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gpt2")
    split = engine_split(tokenizer, tmp_path)
    assert split.forced([], "a" * 2_000_000) == []
    found = split.forced([], "it is " * 400_000)
    text = tokenizer.backend_tokenizer.decode(found)
    assert ("it is " * 400_000).startswith(text) and 500 < len(text) <= 512


def test_unsupported_tokenizer_is_named_as_the_reason(tmp_path: Path) -> None:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    split_at_spaces, folded, no_bytes = (Tokenizer(models.BPE(byte_fallback=True)) for _ in range(3))
    split_at_spaces.pre_tokenizer = pre_tokenizers.Metaspace()
    folded.normalizer = normalizers.Sequence([normalizers.Replace(" ", "\u2581"), normalizers.Lowercase()])
    no_bytes.normalizer = normalizers.Replace(" ", "\u2581")
    no_steps = Tokenizer(models.BPE())
    no_steps.pre_tokenizer = pre_tokenizers.Sequence([])
    spelled = [*(f"<0x{byte:02X}>" for byte in range(256)), "a", "<0x0A>a"]
    vocabulary = {token: id for id, token in enumerate(spelled)}
    merged_bytes = Tokenizer(models.BPE(vocabulary, [("<0x0A>", "a")], byte_fallback=True))
    merged_bytes.normalizer = normalizers.Replace(" ", "\u2581")
    spaced = Tokenizer(models.BPE())
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for tokenizer, says in (
        (unigram, "Unigram, not BPE"),
        (Tokenizer(models.BPE(byte_fallback=True)), "does not replace spaces"),
        (split_at_spaces, "Metaspace"),
        (folded, "Lowercase"),
        (no_bytes, "no token for the byte 0"),
        (merged_bytes, "may merge bytes"),
        (trained(r"\p{N}").backend_tokenizer, "no pattern that splits a text into words"),
        (no_steps, "ByteLevel"),
        (Tokenizer(models.BPE()), "ByteLevel"),
        (spaced, "without add_prefix_space"),
        (trained(r"\w+").backend_tokenizer, json.dumps(r"\w+")),
    ):
        found = build_token_split(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
        assert says in found.unsupported
        assert not found.merges
    build_token_table(trained(GPT2), 1503).save(tmp_path / "token_table.safetensors")
    with pytest.raises(Exception, match="convert the model again"):
        _engine.TokenSplit(tmp_path)
    found.save(tmp_path / "token_split.safetensors")
    with pytest.raises(Exception, match="is not supported"):
        _engine.TokenSplit(tmp_path)
