"""Writes the split rules of a tokenizer to the engine's token_split.safetensors, for jump-forward of structured output.

The engine has no tokenizer. For BPE (Sennrich et al. 2016) it needs the merges and the positions where a text is split
before merging:
- Byte-level BPE (Radford et al. 2019) has pre-tokenizers. PATTERNS lists the supported ones, with their equivalents on
  ASCII in ECMAScript's syntax. engine/src/text/token_split.cpp relies on properties of these patterns.
- SentencePiece's BPE (Kudo and Richardson 2018) merges the whole text. But no merge joins two characters that are not
  adjacent in any token, such as the last letter of a word and the next space. Such a pair acts as a split.
Tests compare the results with `tokenizers`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_AFTER_DIGITS = r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Patterns in tokenizer.json: for digits, GPT-2, Qwen, Llama 3 and Phi-4.
PATTERNS = {
    r"\d": "[0-9]",
    r"\p{N}": "[0-9]",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    _HEAD + r"\p{N}" + _TAIL: _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]" + _AFTER_DIGITS,
    _HEAD + r"\p{N}{1,3}" + _TAIL: _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}" + _AFTER_DIGITS,
}

_SPACE = "\u2581"  # SentencePiece's replacement of a space


@dataclass(frozen=True)
class TokenSplit:
    """merges[rank]: ids of the two merged tokens and of the result. stages: patterns of the pre-tokenizers on ASCII;
    each splits the pieces of the previous one. added: tokens that are found in a text before it is split. characters:
    SentencePiece's token of each ASCII character. joined: pairs of characters that are adjacent in some token.
    unsupported: why the split rules are not supported; then the other fields are empty."""

    merges: list[tuple[int, int, int]]
    stages: list[str]
    added: list[str]
    ignore_merges: bool = False
    unsupported: str = ""
    characters: list[int] = field(default_factory=list)
    joined: list[tuple[int, int]] = field(default_factory=list)

    def save(self, file: Path) -> None:
        """Write token_split.safetensors: `merges` i32 [merges, 3], and for SentencePiece `characters` i32 [128] and
        `joined` i32 [pairs, 2]; the other fields are metadata."""
        metadata = {
            "stages": json.dumps(self.stages),
            "added": json.dumps(self.added),
            "ignore_merges": "1" if self.ignore_merges else "0",
            "unsupported": self.unsupported,
        }
        tensors = {"merges": np.array(self.merges, dtype=np.int32).reshape(-1, 3)}
        if self.characters:
            tensors["characters"] = np.array(self.characters, dtype=np.int32)
            tensors["joined"] = np.array(self.joined, dtype=np.int32).reshape(-1, 2)
        file.write_bytes(save(tensors, metadata))


class _UnknownError(Exception):
    """The split rules are not supported; the message says why."""


def build_token_split(tokenizer: PreTrainedTokenizerFast) -> TokenSplit:
    """Return the split rules of a tokenizer. `unsupported` is set if they are not supported."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        return _read(definition)
    except _UnknownError as unknown:
        return TokenSplit([], [], [], unsupported=str(unknown))


def _read(definition: dict[str, Any]) -> TokenSplit:
    model, normalizer = definition["model"], definition["normalizer"]
    if model.get("type") != "BPE":
        raise _UnknownError(f"the tokenizer's model is {model.get('type')}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _UnknownError(f"the tokenizer's BPE has {name} = {model[name]!r}")
    added = definition["added_tokens"]
    for token in added:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise _UnknownError(f"the added token {token['content']!r} has lstrip, rstrip or single_word")
    vocabulary: dict[str, int] = model["vocab"]
    merges, merged = [], []
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merges.append((vocabulary[first], vocabulary[second], vocabulary[first + second]))
        merged.append(first + second)
    names = [token["content"] for token in added]
    if model.get("byte_fallback"):
        _check_spaces(normalizer, definition["pre_tokenizer"])
        if model.get("ignore_merges"):
            raise _UnknownError("the tokenizer's BPE has byte_fallback and ignore_merges")
        names = [name.replace(_SPACE, " ") for name in names]
        return TokenSplit(merges, [], names, characters=_characters(vocabulary), joined=_joined(merged))
    # NFC does not change ASCII.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _UnknownError(f"the tokenizer has the normalizer {normalizer['type']}")
    stages = _stages(definition["pre_tokenizer"])
    return TokenSplit(merges, stages, names, bool(model.get("ignore_merges")))


def _check_spaces(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> None:
    """Check that SentencePiece's normalizer only replaces spaces, and only adds one space before a text."""
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    replaced = 0
    for step in steps:
        if step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE:
            replaced += 1
        elif step["type"] != "Prepend" or step["prepend"] != _SPACE:
            raise _UnknownError(f"the tokenizer has the normalizer {json.dumps(step, ensure_ascii=False)}")
    if pre_tokenizer is not None:
        metaspace = pre_tokenizer["type"] == "Metaspace" and pre_tokenizer["replacement"] == _SPACE
        # No space is left after the normalizer.
        nothing = replaced and pre_tokenizer["type"] == "Split" and pre_tokenizer["pattern"] == {"String": " "}
        if not nothing and (not metaspace or pre_tokenizer.get("split", True)):
            raise _UnknownError(f"the pre-tokenizer {json.dumps(pre_tokenizer, ensure_ascii=False)} is not supported")
        replaced += metaspace
    if replaced != 1:
        raise _UnknownError("the tokenizer has byte_fallback, but does not replace spaces as SentencePiece does")


def _characters(vocabulary: dict[str, int]) -> list[int]:
    found = []
    for code in range(128):
        character = _SPACE if code == ord(" ") else chr(code)
        token = vocabulary.get(character, vocabulary.get(f"<0x{code:02X}>"))
        if token is None:
            raise _UnknownError(f"the tokenizer has no token for the byte {code} of ASCII")
        found.append(token)
    return found


def _joined(merged: list[str]) -> list[tuple[int, int]]:
    found = set()
    for token in merged:
        if re.search("<0x[0-9A-F]{2}>", token):
            raise _UnknownError(f"the tokenizer may merge bytes, to {token!r}")
        text = token.replace(_SPACE, " ")
        found |= {(ord(a), ord(b)) for a, b in pairwise(text) if a.isascii() and b.isascii()}
    return sorted(found)


def _stages(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1] is None or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        raise _UnknownError("the tokenizer's last pre-tokenizer is not ByteLevel without add_prefix_space")
    stages = [_stage(step) for step in steps[:-1]]
    if steps[-1].get("use_regex", True):
        stages.append(_GPT2)
    if all(stage == PATTERNS[r"\d"] for stage in stages):
        raise _UnknownError("the tokenizer has no pattern that splits a text into words")
    return stages


def _stage(step: dict[str, Any]) -> str:
    if step["type"] == "Digits" and step["individual_digits"]:
        return "[0-9]"
    pattern = step.get("pattern", {}).get("Regex")
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] or pattern not in PATTERNS:
        raise _UnknownError(f"the pre-tokenizer {json.dumps(step, ensure_ascii=False)} is not supported")
    return PATTERNS[pattern]
