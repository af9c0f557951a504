"""Converts the token ids of one response to its text, with the table of token bytes from `charonia convert`.

The engine splits responses between characters and reports which bytes are text (without a leading space, and up to a
stop word). So the text of a response does not depend on earlier responses. The conversion is a gather, a slice and a
decode.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file


class TextTokens(NamedTuple):
    """The text of a response is bytes [begin, end) of the joined bytes of ids [n]."""

    begin: int
    end: int
    ids: npt.NDArray[np.int32]

    @classmethod
    def of(cls, values: npt.NDArray[np.int32]) -> TextTokens:
        """Parse the tensor text_tokens, [2 + n]. Raises ValueError if it has fewer than 2 elements."""
        begin, end = values[:2].tolist()
        return cls(begin, end, values[2:])


class TokenTable:
    """offsets: i64 [vocab + 1]; data: u8 [total]; special: u8 [vocab]. A special token has no text."""

    def __init__(
        self, offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8], special: npt.NDArray[np.uint8]
    ) -> None:
        if len(offsets) != len(special) + 1 or offsets[0] != 0 or offsets[-1] != len(data):
            raise ValueError(
                f"offsets {offsets.shape}, bytes {data.shape} and special {special.shape} do not fit together"
            )
        raw = data.tobytes()
        bounds = offsets.tolist()
        self._bytes = [raw[begin:end] for begin, end in pairwise(bounds)]
        self._special = [bool(value) for value in special.tolist()]
        # The bytes that each token adds to a text.
        self._pieces = [b"" if special else text for text, special in zip(self._bytes, self._special, strict=True)]

    @classmethod
    def load(cls, file: Path) -> TokenTable:
        tensors = load_file(file)
        return cls(tensors["offsets"], tensors["bytes"], tensors["special"])

    def join(self, ids: npt.NDArray[np.int32]) -> bytes:
        """The joined text bytes of ids [n]. Ids past the table (a padded vocabulary) have no bytes."""
        pieces = self._pieces
        size = len(pieces)
        return b"".join([pieces[token] for token in ids.tolist() if 0 <= token < size])

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text."""
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""

    def text(self, ids: npt.NDArray[np.int32], begin: int, end: int) -> bytes:
        """Bytes [begin, end) of the joined text of ids, as valid UTF-8. Each maximal invalid subpart becomes one
        U+FFFD."""
        return self.join(ids)[begin:end].decode("utf-8", "replace").encode("utf-8")

    def lookup(self, ids: npt.NDArray[np.int32]) -> tuple[list[bytes], list[bool]]:
        """For each of ids [n]: its bytes, also for special tokens, and whether it is special. An id past the table:
        b"", True."""
        size = len(self._bytes)
        pairs = [(self._bytes[i], self._special[i]) if 0 <= i < size else (b"", True) for i in ids.tolist()]
        return [token for token, _ in pairs], [special for _, special in pairs]
