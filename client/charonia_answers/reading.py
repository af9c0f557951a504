"""From the bytes of an answer's tokens to its text, reasoning and calls of tools, a response at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from .formats import CALL_FORMATS, REASONING_FORMATS, CallFormat, ReasoningFormat
from .parser import AnswerParser, special_marks

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def markup_of(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """All that these formats mark calls and reasoning with."""
    return (*(calls.markup if calls else ()), *(reasoning.markup if reasoning else ()))


@dataclass
class Part:
    """What a response adds to an answer. calls: as the tensor `tool_calls` has them."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_reasoning_tokens: int = 0  # of the answer so far


class Reader:
    """Reads one answer of a request. options: as preprocessing gives them, {} for none. special_tokens: the ids of the
    special tokens that are part of the markup, or of all, by how they are written."""

    def __init__(self, options: Mapping[str, Any], special_tokens: Mapping[str, int]) -> None:
        calls = CALL_FORMATS.get(options.get("calls") or "")
        reasoning = REASONING_FORMATS.get(options.get("reasoning") or "")
        marks = special_marks(markup_of(calls, reasoning), special_tokens)
        self._marks = {special_tokens[token]: mark for token, mark in marks.items()}
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

    def read(
        self, tokens: Sequence[tuple[int, bytes]], span: tuple[int, int], *, last: bool, cut_off: bool = False
    ) -> Part:
        """What the next response adds to the answer. tokens: each with its bytes, none of special ones. span: which of
        these bytes, joined, are text. last: nothing more comes; cut_off: the model had not ended."""
        events: list[Event] = []
        for text in self._texts(tokens, span):
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

    def _texts(self, tokens: Sequence[tuple[int, bytes]], span: tuple[int, int]) -> Iterator[str]:
        """Of each token what the parser gets: what it adds to the text, and the marks of special tokens. Responses are
        cut where characters end, tokens are not."""
        decoder = _utf8_decoder("replace")
        begin, end = span
        at = 0
        for number, (token, piece) in enumerate(tokens, start=1):
            # A special token may stand before the leading space that is no text.
            mark = self._marks.get(token, "") if at <= end else ""
            text = piece[max(begin - at, 0) : max(end - at, 0)]
            at += len(piece)
            yield decoder.decode(text, final=bool(mark) or number == len(tokens)) + mark


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
