"""Computes the bytes of every token, as the tokenizer's decoder writes them, for the engine's token_table.safetensors.

The text of a sequence is the joined bytes of its tokens, so a stream can be cut between any two characters. The
decoder's definition in tokenizer.json describes how a token's string becomes bytes. Unknown decoder steps raise an
error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from charonia.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's printable character for each byte: the byte's own Latin-1 character if it is printable,
    otherwise the next character from U+0100 on (Radford et al. 2019, GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class TokenTable:
    """`tokens[id]` are the token's bytes, b"" for ids that the tokenizer does not have.

    special[id]: whether the token is omitted from texts. strip_leading_space: whether the decoder drops one leading
    space of a text.
    """

    tokens: list[bytes]
    special: list[bool]
    strip_leading_space: bool

    def text(self, ids: list[int]) -> bytes:
        """Return the joined bytes of the tokens that are not special, with the leading space."""
        return b"".join(self.tokens[token] for token in ids if not self.special[token])

    def save(self, file: Path) -> None:
        """Write token_table.safetensors: `offsets` i64 [vocab + 1], `bytes` u8 [total], `special` u8 [vocab]."""
        offsets = np.zeros(len(self.tokens) + 1, dtype=np.int64)
        np.cumsum([len(token) for token in self.tokens], out=offsets[1:])
        tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
            "offsets": offsets,
            "bytes": np.frombuffer(b"".join(self.tokens), dtype=np.uint8),
            "special": np.array(self.special, dtype=np.uint8),
        }
        # Not save_file(), which has an error of its own for a full disk.
        file.write_bytes(save(tensors, {"strip_leading_space": "1" if self.strip_leading_space else "0"}))


@dataclass
class _Decoder:
    """The steps of a decoder: strings to strings, then, at most once, strings to bytes."""

    rewrites: list[Callable[[str], str]]
    byte_level: bool = False
    byte_fallback: bool = False
    strip_leading_space: bool = False
    fused: bool = False

    def token_bytes(self, token: str, added: bool) -> bytes:
        if self.byte_level:
            # An added token means its own text, although a decoder would map characters of the alphabet to bytes.
            if added or any(char not in _ALPHABET for char in token):
                return token.encode()
            return bytes(_ALPHABET[char] for char in token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for rewrite in self.rewrites:
            token = rewrite(token)
        return token.encode("utf-8", "surrogatepass")


def _read_decoder(definition: dict[str, Any] | None) -> _Decoder:
    if definition is None:
        raise UnsupportedError("tokenizer.json has no decoder, so the bytes of its tokens are unknown")
    decoder = _Decoder([])
    _add_step(decoder, definition)
    return decoder


def _add_step(decoder: _Decoder, step: dict[str, Any]) -> None:
    kind = step.get("type")
    if kind == "Sequence":
        for inner in step["decoders"]:
            _add_step(decoder, inner)
    elif kind == "ByteLevel":
        decoder.byte_level = True
    elif kind == "ByteFallback":
        decoder.byte_fallback = True
    elif kind == "Fuse":
        decoder.fused = True
    elif kind == "Replace" and isinstance(step["pattern"].get("String"), str):
        old, new = step["pattern"]["String"], step["content"]
        decoder.rewrites.append(lambda token: token.replace(old, new))
    elif kind == "Metaspace":
        mark = step["replacement"]
        decoder.rewrites.append(lambda token: token.replace(mark, " "))
        # Older files have add_prefix_space. If neither is set, the default is to prepend.
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        decoder.strip_leading_space |= scheme in ("always", "first")
    elif kind == "Strip" and _strips_one_leading_space(step) and decoder.fused:
        decoder.strip_leading_space = True
    elif kind == "Strip" and not step["start"] and not step["stop"]:
        pass
    else:
        raise UnsupportedError(
            f"tokenizer.json: a decoder step {json.dumps(step, ensure_ascii=False)} is not supported; supported: "
            "ByteLevel and, as in SentencePiece models, Replace of a string, Metaspace, ByteFallback, Fuse and Strip "
            "of one leading space after Fuse"
        )


def _strips_one_leading_space(step: dict[str, Any]) -> bool:
    return bool(step["content"] == " " and step["start"] == 1 and step["stop"] == 0)


def build_token_table(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> TokenTable:
    """Build the table of a tokenizer, padded to the model's vocabulary with empty special tokens.

    Raises UnsupportedError for an unknown decoder, and ModelError if the tokenizer can produce ids >= vocab_size.
    """
    backend = tokenizer.backend_tokenizer
    definition = json.loads(backend.to_str())
    decoder = _read_decoder(definition["decoder"])
    added = {entry["id"]: entry for entry in definition["added_tokens"]}
    tokens = [b""] * vocab_size
    special = [True] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        entry = added.get(token_id)
        if token_id >= vocab_size:
            if entry is not None:
                continue  # an added token that the model was never resized for; the engine rejects it as input
            raise ModelError(
                f"the tokenizer's token {token!r} has id {token_id}, but the model's vocab_size is {vocab_size}: "
                "the tokenizer does not belong to this model"
            )
        tokens[token_id] = decoder.token_bytes(token, entry is not None)
        special[token_id] = bool(entry and entry["special"])
    return TokenTable(tokens, special, decoder.strip_leading_space)
