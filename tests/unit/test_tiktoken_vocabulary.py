"""Qwen 1's vocabulary: the fast tokenizer equals byte-pair encoding by ranks, byte for byte."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from charonia.errors import ModelError
from charonia.text.tiktoken_vocabulary import FILE, load_tiktoken, read_ranks
from charonia.text.token_table import build_token_table
from charonia.text.tokenizer import load_tokenizer

WORDS = ["the", "th", " the", "ing", "in", "ring", " st", "str", " string", "er", "中", "中文", "é", "caf", "café"]
# In the order of training: short tokens first, because longer ones are made of them.
PARTS = [" t", "he", " s", "ng", "ri", "st", "ca", "af", "\u4e2d".encode()[:2], "中", "\u6587".encode()[:2], "文"]


def vocabulary() -> dict[bytes, int]:
    tokens = [bytes([byte]) for byte in range(256)]
    for token in [*PARTS, *WORDS]:
        data = token if isinstance(token, bytes) else token.encode()
        if data not in tokens:
            tokens.append(data)
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, ranks: dict[bytes, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (folder / FILE).write_text("".join(lines))


def by_ranks(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The definition: join the neighbours with the lowest rank until no pair is a token."""
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = [(ranks[a + b], index) for index, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
        if not pairs:
            return [ranks[part] for part in parts]
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    write(path, vocabulary())
    return path


@given(st.lists(st.sampled_from([*WORDS, *"theringcaféxyz 中文"]), max_size=12).map("".join))
def test_words_are_encoded_by_ranks(folder: Path, text: str) -> None:
    text = re.sub(r"[ ']", "", text)
    ranks = vocabulary()
    # Letters without a break are one piece.
    tokenizer = _cached(folder)
    assert tokenizer.encode(text, add_special_tokens=False) == by_ranks(text.encode(), ranks)


@functools.cache
def _cached(folder: Path) -> PreTrainedTokenizerFast:
    return load_tiktoken(folder, chat=False)


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_the_table_gives_every_text_back(folder: Path, text: str) -> None:
    tokenizer = _cached(folder)
    table = build_token_table(tokenizer, len(tokenizer))
    # A text that contains a special token's name is that token. Random texts do not contain one.
    assert table.text(tokenizer.encode(text, add_special_tokens=False)).decode() == unicodedata.normalize("NFC", text)


def test_special_tokens_follow_the_ranks(folder: Path) -> None:
    tokenizer = load_tiktoken(folder, chat=False)
    count = len(vocabulary())
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>", "<|extra_204|>")
    assert [tokenizer.convert_tokens_to_ids(name) for name in names] == [
        count,
        count + 1,
        count + 2,
        count + 3,
        count + 207,
    ]
    assert tokenizer.encode("the<|im_end|>") == [vocabulary()[b"the"], count + 2]
    assert tokenizer.chat_template is None


def test_a_chat_model_has_chatml_with_its_system_message(tmp_path: Path) -> None:
    write(tmp_path, vocabulary())
    (tmp_path / "generation_config.json").write_text(json.dumps({"chat_format": "chatml"}))
    tokenizer = load_tokenizer(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("damage", ["QQ==", "QQ== x", "!!! 3", "QQ== 9999"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    write(tmp_path, vocabulary())
    with (tmp_path / FILE).open("a") as file:
        file.write(damage + "\n")
    with pytest.raises(ModelError, match="download it again"):
        read_ranks(tmp_path / FILE)
