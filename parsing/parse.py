"""From an answer's tokens to its text, reasoning and calls of tools, a response at a time. No Triton here: model.py
translates tensors to and from these functions.

How markup is written, and the parser, are in the package `answers`; the table of every token's bytes is that of
postprocessing. charonia convert puts copies of both beside this file.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from answers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from answers.formats import CALL_FORMATS, REASONING_FORMATS
from answers.parser import AnswerParser, special_marks
from detokenize import TokenTable

# Answers that are remembered at most, and characters of their options, which may name many tools. Of those whose
# request has failed no end is seen; the oldest are forgotten.
MAX_ANSWERS = 16384
MAX_OPTIONS = 1 << 26

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass
class Part:
    """What a response adds to an answer. calls: as the tensor `tool_calls` has them."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_reasoning_tokens: int = 0  # of the answer so far


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
            answer = _Answer(self._table, json.loads(options) if options else {})
        else:
            self._options -= len(options)
        part = answer.read(ids, span, last=last, cut_off=cut_off)
        if not last:
            answer.options = len(options)
            self._running[key] = answer
            self._options += len(options)
            self._forget_oldest()
        return part

    def _forget_oldest(self) -> None:
        """But for the one that was read last."""
        while len(self._running) > MAX_ANSWERS or (self._options > MAX_OPTIONS and len(self._running) > 1):
            _, answer = self._running.popitem(last=False)
            self._options -= answer.options


class _Answer:
    def __init__(self, table: TokenTable, options: Mapping[str, Any]) -> None:
        self.options = 0  # their characters
        calls = CALL_FORMATS.get(options.get("calls") or "")
        reasoning = REASONING_FORMATS.get(options.get("reasoning") or "")
        markup = (*(calls.markup if calls else ()), *(reasoning.markup if reasoning else ()))
        marks = special_marks(markup, table.special_tokens)
        self._table = table
        self._marks = {table.special_tokens[token]: mark for token, mark in marks.items()}
        self._parser = AnswerParser(
            calls,
            reasoning,
            names=options.get("names", ()),
            texts=options.get("texts"),
            in_reasoning=bool(options.get("in_reasoning")),
            marks=marks,
            parallel=bool(options.get("parallel", True)),
            forced=bool(options.get("forced")),
            certain=bool(options.get("certain")),
            continued=bool(options.get("continued")),
        )
        self._num_reasoning_tokens = 0

    def read(self, ids: Sequence[int], span: tuple[int, int], *, last: bool, cut_off: bool) -> Part:
        events: list[Event] = []
        for text in self._texts(ids, span):
            before = self._parser.in_reasoning
            events += self._parser.feed(text)
            self._num_reasoning_tokens += before or self._parser.in_reasoning
        if last:
            events += self._parser.finish(cut_off=cut_off)
        return Part(
            "".join(event.text for event in events if isinstance(event, Content)),
            "".join(event.text for event in events if isinstance(event, Reasoning)),
            _call_deltas(events),
            self._num_reasoning_tokens,
        )

    def _texts(self, ids: Sequence[int], span: tuple[int, int]) -> Iterator[str]:
        """Of each token what the parser gets: what it adds to the text, and the marks of special tokens. Responses are
        cut where characters end, tokens are not."""
        decoder = _utf8_decoder("replace")
        begin, end = span
        at = 0
        for number, token in enumerate(ids, start=1):
            piece = self._table.piece(token)
            # A special token may stand before the leading space that is no text.
            mark = self._marks.get(token, "") if at <= end else ""
            text = piece[max(begin - at, 0) : max(end - at, 0)]
            at += len(piece)
            yield decoder.decode(text, final=bool(mark) or number == len(ids)) + mark


def _call_deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallBegin):
            deltas.append({"index": event.index, "id": event.id, "name": event.name})
        elif isinstance(event, CallArguments | CallEnd):
            if not deltas or deltas[-1]["index"] != event.index:
                deltas.append({"index": event.index})
            if isinstance(event, CallEnd):
                deltas[-1]["complete"] = event.complete
            else:
                deltas[-1]["arguments"] = deltas[-1].get("arguments", "") + event.text
    return deltas
