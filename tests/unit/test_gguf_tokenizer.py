"""Tokenizers of GGUF files have the ids of released tokenizers with the same vocabulary."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from released_tokenizers import write_released_tokenizer
from tokenizers import Regex, Tokenizer, pre_tokenizers

from charonia import UnsupportedError
from charonia.gguf.tokenizer import _CASED, PATTERNS, write_tokenizer
from charonia.text.tokenizer import PROBES, load_tokenizer

TEXTS = [
    *PROBES,
    " ",
    "\n\n\n",
    "a<|im_end|>b <|eot_id|>",
    "Größe, dix-sept, 3,14159 und 10\u00a0000",
    "he'll SHOULD'VE I'm x'y ''s",
]


def metadata_of(folder: Path, kind: str, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for a tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    size = max(vocabulary.values()) + 1
    tokens, types = [f"[PAD{index}]" for index in range(size)], [5] * size  # 5: unused
    for token, index in vocabulary.items():
        tokens[index], types[index] = token, 1
    for entry in content["added_tokens"]:
        types[entry["id"]] = 3 if entry["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    values = {"model": kind, "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.slow  # reads the vocabularies of released tokenizers
@pytest.mark.parametrize(
    ("name", "kind", "pre"),
    [
        ("qwen3", "gpt2", "qwen2"),
        ("llama3_1", "gpt2", "llama-bpe"),
        ("gptoss", "gpt2", "gpt-4o"),
        ("deepseek_v3", "gpt2", "deepseek-v3"),
        ("gemma3", "gemma4", ""),
    ],
)
def test_a_gguf_tokenizer_has_the_ids_and_texts_of_the_released_one(
    name: str, kind: str, pre: str, tmp_path: Path
) -> None:
    released, made = tmp_path / "released", tmp_path / "made"
    write_released_tokenizer(name, released)
    made.mkdir()
    write_tokenizer(metadata_of(released, kind, pre), made)
    ours = load_tokenizer(made).backend_tokenizer
    theirs = Tokenizer.from_file(str(released / "tokenizer.json"))
    for text in TEXTS:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected) == theirs.decode(expected)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # Its third pattern takes ASCII letters too.
        ("deepseek-llm", "Größe x12\n (ok),  ну 3.14 日本! ", "Gr|öß|e| x|12|\n| (|ok|),| | ну| |3|.|14| |日本|!| "),
        ("mellum2", "def f1(x): 12\n  return x's", "def| f|1|(|x|):| |1|2|\n | return| x|'s"),
    ],
)
def test_pieces_of_pre_tokenizers_without_a_released_vocabulary(pre: str, text: str, pieces: str) -> None:
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[pre]]
    found = pre_tokenizers.Sequence(splits).pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces.split("|")


def test_the_letters_of_deepseek_v2_have_cases() -> None:
    """Unicode has got more of them since the pattern was written."""
    is_letter = re.compile(f"[{_CASED}]")
    for code in range(0x20000):
        letter = chr(code)
        kind = unicodedata.category(letter)
        if is_letter.match(letter):
            assert kind in ("Lu", "Ll", "Lt"), hex(code)
        elif code < 0x530:  # Latin, Greek and Cyrillic
            assert kind not in ("Lu", "Ll", "Lt"), hex(code)


def small_sentencepiece() -> dict[str, Any]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{index:02X}>" for index in range(256)),
        "\u2581a",
        "\u2581",
        "a",
        "<|end|>",
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_beginning_token_is_added_as_the_file_says(tmp_path: Path) -> None:
    metadata = small_sentencepiece()
    for added, expected in ((None, [1, 259]), (False, [259]), (True, [1, 259])):
        given = metadata if added is None else {**metadata, "tokenizer.ggml.add_bos_token": added}
        write_tokenizer(given, tmp_path)
        assert load_tokenizer(tmp_path).encode("a") == expected
        assert load_tokenizer(tmp_path).encode("a", "a") == 2 * expected


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"tokenizer.ggml.model": "t5"}, "'t5'"), ({"tokenizer.ggml.pre": "unknown-split"}, "'unknown-split'")],
)
def test_unknown_kinds_and_splits_are_rejected_by_name(changed: dict[str, str], named: str, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    write_tokenizer(metadata, tmp_path)
    with pytest.raises(UnsupportedError, match=named):
        write_tokenizer({**metadata, **changed}, tmp_path)


def test_special_tokens_of_phi_3_remove_the_spaces_after_them(tmp_path: Path) -> None:
    newline = 3 + ord("\n")
    phi3 = {"general.architecture": "phi3"}
    for given, expected in (({}, [1, 262, 260, newline, 261]), (phi3, [1, 262, 259])):
        write_tokenizer({**small_sentencepiece(), **given}, tmp_path)
        assert load_tokenizer(tmp_path).encode("<|end|>\na") == expected


def test_gemma_4_has_a_beginning_token_whatever_the_file_says(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    write_tokenizer(metadata, tmp_path)
    assert load_tokenizer(tmp_path).encode("ab") == [2, 6]
