"""Parser of GPT-OSS' format harmony, in which a response is a list of messages. The prompt has the beginning of the
first header.

    <|start|>assistant [to=RECIPIENT] <|channel|>CHANNEL [to=RECIPIENT] [<|constrain|>] [json] <|message|>TEXT<|end|>

The texts of the channel `analysis` are reasoning. Messages to `functions.NAME` are calls. All other messages are
content: the channels `final` and `commentary`. The last message ends with <|return|> or <|call|>.

Header words are not part of any text. A text without a header is content.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping
from typing import Any

from .formats import CALL_FORMATS, REASONING_FORMATS, CallFormat, ReasoningFormat
from .parser import MAX_NAME, AnswerParser, NoCallError, Reading, with_marks
from .scanners import JsonScanner

CALLS = CALL_FORMATS["harmony"]
REASONING = REASONING_FORMATS["harmony"]
_MAX_HEADER = 2 * MAX_NAME  # characters
_RECIPIENT = re.compile(r"to=(\S+)")
MARKS = ("<|start|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>", "<|message|>")


class HarmonyParser(AnswerParser):
    """Parameters: as in AnswerParser. continued: the response continues a text of the channel `final`."""

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None = REASONING,
        *,
        marks: Mapping[str, str] | None = None,
        continued: bool = False,
        **more: Any,
    ) -> None:
        self._continued = continued
        self._marks = [with_marks(mark, marks or {}) for mark in MARKS]
        self._start, self._channel, *self._ends, self._constrain, self._message = self._marks
        self._after_text = [self._start, self._channel, *self._ends]
        super().__init__(calls, reasoning, marks=marks, **more)

    def _read_answer(self) -> Reading:
        yield
        mark = self._ends[0]
        if self.in_reasoning or self._continued:
            mark = yield from self._read_text(reasoning=self.in_reasoning)
        while mark:
            mark = yield from self._read_message(mark)
        if not self.num_calls:
            self._content.end()

    def _read_message(self, mark: str) -> Generator[None, None, str]:
        """Parse a message. mark: the last mark that was consumed. Returns the mark after the message; "" at the end of
        the response."""
        header = yield from self._read_header(mark)
        if header is None:
            return ""
        found = _RECIPIENT.search(header) if self._calls else None
        recipient = found[1] if found else ""
        name = recipient.removeprefix(CALLS.name_mark)
        if name and (name != recipient or name in self._names):
            return (yield from self._read_call(name))
        channel = header.partition(self._channel)[2].split(maxsplit=1)
        return (yield from self._read_text(reasoning=channel[:1] == ["analysis"]))

    def _read_header(self, mark: str) -> Generator[None, None, str | None]:
        """Return the header, in which the channel's mark is a word. Returns "" before a text without a header, and None
        if the response ends within the header."""
        header, begun = "", False  # begun: a mark has begun the header

        def give(text: str) -> None:
            nonlocal header
            first = (header + text).lstrip()[:3]
            if len(header) + len(text) > _MAX_HEADER or not (begun or "to=".startswith(first)):
                raise NoCallError
            header += text

        while mark != self._message:
            if mark == self._start or mark in self._ends:
                header = ""
            begun = mark not in self._ends
            header += f" {mark} " if mark == self._channel else " " if mark == self._constrain else ""
            try:
                mark = yield from self._until(self._marks, give)
            except NoCallError:
                self._text, self._at = header.replace(f" {self._channel} ", "") + self._text[self._at :], 0
                return ""
            if not begun and (mark in self._ends or not (mark or self._certain or self._cut_off)):
                self._content.next_push()(header)
            if not mark:
                return None
        return header

    def _read_text(self, *, reasoning: bool) -> Generator[None, None, str]:
        channel = self._reasoning if reasoning else self._content
        self.in_reasoning = reasoning
        mark = yield from self._until(self._after_text, channel.next_push())
        self.in_reasoning = False
        return mark

    def _read_call(self, name: str) -> Generator[None, None, str]:
        """Parse the arguments of a call. No text means no arguments."""
        char = yield from self._spaces()
        if not char and self._cut_off:
            return ""
        complete = not char
        self._begin_call(name)
        for mark in self._after_text:
            complete |= yield from self._follows(mark)
        if complete:
            self._give_arguments("{}")
        elif char == "{":
            with contextlib.suppress(NoCallError):
                yield from self._scan_arguments(JsonScanner())
                complete = True
        mark = yield from self._until(self._after_text, (lambda _: None) if complete else self._give_arguments)
        self._end_call(complete=complete)
        return mark
