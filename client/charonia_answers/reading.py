"""Parses the tokens of a response into text, reasoning and tool calls, one chunk at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .content_tokens import ContentTokens
from .events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from .formats import CALL_FORMATS, REASONING_FORMATS, CallFormat, ReasoningFormat
from .harmony import CALLS, REASONING, HarmonyParser
from .parser import AnswerParser, special_marks
from .xml import text_parameters

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def markup_of(calls: CallFormat | None, reasoning: ReasoningFormat | None) -> tuple[str, ...]:
    """All markup of these formats."""
    return (*(calls.markup if calls else ()), *(reasoning.markup if reasoning else ()))


def functions_of(tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The functions of a request's tools."""
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else None for tool in tools]
    return [function for function in functions if isinstance(function, Mapping)]


def named_functions(functions: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {one["name"]: one for one in functions if isinstance(one.get("name"), str)}


@dataclass
class Part:
    """The content that a chunk adds to a response. calls: fields of charonia_client's ToolCallDelta."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    num_reasoning_tokens: int = 0  # of the whole response so far
    # With find_content_tokens: which tokens `content` consists of, by their number in the response, from 0.
    content_tokens: list[int] = field(default_factory=list)


class Reader:
    """Parses one response.

    formats: the model's, as the output `answer_formats` of preprocessing describes them.
    tools: those that may be called; None: none.
    forced: the response consists of calls. parallel: False: it has one call at most.
    begun: the text of the message that the response continues; None: it begins a new message.
    in_reasoning: the prompt ends within the reasoning.
    find_content_tokens: whether to find `Part.content_tokens`.
    """

    def __init__(
        self,
        formats: Mapping[str, Any],
        tools: Sequence[Any] | None = None,
        *,
        forced: bool = False,
        parallel: bool = True,
        begun: str | None = None,
        in_reasoning: bool = False,
        find_content_tokens: bool = False,
    ) -> None:
        calls = _format(CALL_FORMATS, formats.get("tool_calls") if tools is not None else None)
        # A begun message has no reasoning, because its text follows the reasoning.
        harmony = formats.get("reasoning") == REASONING.name
        reasoning = _format(REASONING_FORMATS, formats.get("reasoning") if begun is None or harmony else None)
        special_tokens = formats.get("special") or {}
        marks = special_marks(markup_of(CALLS if harmony else calls, reasoning), special_tokens)
        self._marks = {special_tokens[token]: mark for token, mark in marks.items()}
        functions = functions_of(tools or ())
        texts = {}
        if calls and calls.xml:
            named = named_functions(functions)
            texts = {name: text_parameters(function.get("parameters")) for name, function in named.items()}
        self._parser = (HarmonyParser if harmony else AnswerParser)(
            calls,
            reasoning,
            names=named_functions(functions) if calls and (calls.bare or harmony) else (),
            texts={name: found for name, found in texts.items() if found},
            in_reasoning=in_reasoning,
            marks=marks,
            parallel=parallel,
            forced=forced and calls is not None,
            certain=any(function.get("strict") for function in functions),
            continued=begun is not None
            if harmony
            else calls is not None and calls.bare and bool((begun or "").strip()),
        )
        self._num_reasoning_tokens = 0
        self._content_tokens = ContentTokens() if find_content_tokens else None

    def read(
        self, tokens: Sequence[tuple[int, bytes]], span: tuple[int, int], *, last: bool, cut_off: bool = False
    ) -> Part:
        """Returns what the next chunk adds to the response. tokens: each with its bytes, which are empty for special
        tokens. span: the text is this range of the joined bytes. last: it is the last chunk; cut_off: the response did
        not end by itself."""
        events: list[Event] = []
        for text, piece, mark in self._texts(tokens, span):
            before = self._parser.in_reasoning
            made = self._parser.feed(text)
            events += made
            self._num_reasoning_tokens += before or self._parser.in_reasoning
            if self._content_tokens:
                reasons = before, self._parser.in_reasoning
                self._content_tokens.add(piece, made, mark=bool(mark), reasons=reasons)
        if last:
            made = self._parser.finish(cut_off=cut_off)
            events += made
            if self._content_tokens:
                self._content_tokens.resolve(made)
        found = self._content_tokens.found if self._content_tokens else []
        if self._content_tokens:
            self._content_tokens.found = []
        return Part(
            "".join(event.text for event in events if isinstance(event, Content)),
            "".join(event.text for event in events if isinstance(event, Reasoning)),
            _call_deltas(events),
            self._num_reasoning_tokens,
            found,
        )

    def _texts(self, tokens: Sequence[tuple[int, bytes]], span: tuple[int, int]) -> Iterator[tuple[str, bytes, str]]:
        """Yields the parser's input for each token: its part of the text, and the mark of a special token. Then the
        bytes of the text, and the mark. A chunk ends with a whole character, a token may not."""
        decoder = _utf8_decoder("replace")
        begin, end = span
        at = 0
        for number, (token, piece) in enumerate(tokens, start=1):
            # A special token may precede the leading space that is not part of the text.
            mark = self._marks.get(token, "") if at <= end else ""
            text = piece[max(begin - at, 0) : max(end - at, 0)]
            at += len(piece)
            yield decoder.decode(text, final=bool(mark) or number == len(tokens)) + mark, text, mark


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


def _format(formats: Mapping[str, Any], name: str | None) -> Any:
    if name is not None and name not in formats:
        known = ", ".join(formats)
        raise ValueError(f"this version of charonia-client does not know the format {name!r}; it knows {known}")
    return None if name is None else formats[name]
