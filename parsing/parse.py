"""From an answer's tokens to its text, reasoning and calls of tools, a response at a time. No Triton here: model.py
translates tensors to and from these functions.

Answers are read by the package `charonia_answers`; the table of every token's bytes is that of postprocessing. charonia
convert puts copies of both beside this file.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from charonia_answers.reading import Part, Reader
from detokenize import TokenTable

# Answers that are remembered at most, and characters of their options, which may name many tools. Of those whose
# request has failed no end is seen; the oldest are forgotten.
MAX_ANSWERS = 16384
MAX_OPTIONS = 1 << 26


@dataclass
class _Answer:
    reader: Reader
    options: int  # characters of its options


class Answers:
    """The answers that are being made."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._running: OrderedDict[tuple[bytes, int], _Answer] = OrderedDict()
        self._options = 0  # characters of those of the answers that are remembered

    def __len__(self) -> int:
        return len(self._running)

    def read(
        self, options: str, index: int, ids: Sequence[int], span: tuple[int, int], *, last: bool, cut_off: bool = False
    ) -> Part:
        """What the next response of an answer adds to it.

        options: as preprocessing gives them; "" for none. index: of the request's sequences. ids: the response's
        tokens. span: which of their bytes are text. last: nothing more comes; cut_off: the model had not ended.
        """
        # Two requests never have the same options, which are as long as the names of all tools: they are read once.
        key = (hashlib.blake2b(options.encode(), digest_size=16).digest(), index)
        answer = self._running.pop(key, None)
        if answer is None:
            reader = Reader(json.loads(options) if options else {}, self._table.special_tokens)
            answer = _Answer(reader, len(options))
        else:
            self._options -= len(options)
        tokens = [(token, self._table.piece(token)) for token in ids]
        part = answer.reader.read(tokens, span, last=last, cut_off=cut_off)
        if not last:
            self._running[key] = answer
            self._options += len(options)
            self._forget_oldest()
        return part

    def _forget_oldest(self) -> None:
        """But for the one that was read last."""
        while len(self._running) > MAX_ANSWERS or (self._options > MAX_OPTIONS and len(self._running) > 1):
            _, answer = self._running.popitem(last=False)
            self._options -= answer.options
