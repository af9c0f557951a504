"""How a tokenizer splits a text, for the engine's token_split.safetensors: for jump-forward of structured output.

The engine has no tokenizer. Of byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) it needs the merges, and the
pre-tokenizers by their patterns. Those it knows are listed here, with what they are on ASCII in ECMAScript's syntax.
Of each of them holds what engine/src/text/token_split.cpp says of a text's end; tests compare with `tokenizers`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_AFTER_DIGITS = r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Patterns of tokenizer.json: of digits, of GPT-2, Qwen, Llama 3 and Phi-4.
PATTERNS = {
    r"\d": "[0-9]",
    r"\p{N}": "[0-9]",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    _HEAD + r"\p{N}" + _TAIL: _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]" + _AFTER_DIGITS,
    _HEAD + r"\p{N}{1,3}" + _TAIL: _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}" + _AFTER_DIGITS,
}


@dataclass(frozen=True)
class TokenSplit:
    """merges[rank]: ids of the two tokens that are merged, and of what they become. stages: the pre-tokenizers'
    patterns, on ASCII, each of which cuts the pieces of the one before. added: tokens that are found in a text
    before it is split. unsupported: why the split is not known; the others are empty then."""

    merges: list[tuple[int, int, int]]
    stages: list[str]
    added: list[str]
    ignore_merges: bool = False
    unsupported: str = ""

    def save(self, file: Path) -> None:
        """Writes token_split.safetensors: `merges` i32 [merges, 3]; the rest is metadata."""
        metadata = {
            "stages": json.dumps(self.stages),
            "added": json.dumps(self.added),
            "ignore_merges": "1" if self.ignore_merges else "0",
            "unsupported": self.unsupported,
        }
        save_file({"merges": np.array(self.merges, dtype=np.int32).reshape(-1, 3)}, file, metadata=metadata)


class _UnknownError(Exception):
    """The split is not known; the message says what is unknown."""


def build_token_split(tokenizer: PreTrainedTokenizerFast) -> TokenSplit:
    """The split of a tokenizer. Where it is of a kind that is not known, `unsupported` says so."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        return _read(definition)
    except _UnknownError as unknown:
        return TokenSplit([], [], [], unsupported=str(unknown))


def _read(definition: dict[str, Any]) -> TokenSplit:
    model, normalizer = definition["model"], definition["normalizer"]
    if model.get("type") == "Unigram" or model.get("byte_fallback"):
        raise _UnknownError(
            f"the tokenizer is one of SentencePiece ({model['type']}), which cuts a text nowhere before it looks for "
            "tokens: which ones come first may depend on all of the text that follows; byte-level BPE is supported"
        )
    if model.get("type") != "BPE":
        raise _UnknownError(f"the tokenizer's model is {model.get('type')}, and not byte-level BPE")
    # NFC leaves ASCII as it is.
    if normalizer is not None and normalizer["type"] != "NFC":
        raise _UnknownError(f"the tokenizer has the normalizer {normalizer['type']}")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _UnknownError(f"the tokenizer's BPE has {name} = {model[name]!r}")
    stages = _stages(definition["pre_tokenizer"])
    added = definition["added_tokens"]
    for token in added:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise _UnknownError(f"the added token {token['content']!r} has lstrip, rstrip or single_word")
    vocabulary: dict[str, int] = model["vocab"]
    merges = []
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merges.append((vocabulary[first], vocabulary[second], vocabulary[first + second]))
    return TokenSplit(merges, stages, [token["content"] for token in added], bool(model.get("ignore_merges")))


def _stages(pre_tokenizer: dict[str, Any] | None) -> list[str]:
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1] is None or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        raise _UnknownError("the tokenizer's last pre-tokenizer is not ByteLevel without a space in front")
    stages = [_stage(step) for step in steps[:-1]]
    if steps[-1].get("use_regex", True):
        stages.append(_GPT2)
    if not stages:
        raise _UnknownError("the tokenizer has no pattern that splits a text")
    return stages


def _stage(step: dict[str, Any]) -> str:
    if step["type"] == "Digits" and step["individual_digits"]:
        return "[0-9]"
    pattern = step.get("pattern", {}).get("Regex")
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"] or pattern not in PATTERNS:
        raise _UnknownError(f"the pre-tokenizer {json.dumps(step, ensure_ascii=False)} is not known")
    return PATTERNS[pattern]
