"""Parses a response while it is generated: text, reasoning and tool calls. `formats` describes their markup.

Text outside calls is returned unchanged. The markup of calls is not returned. A call *begins* when its name and the
beginning of its arguments are parsed. If the call breaks off before this point, all of it is text, unless the response
was cut off there. After this point, arguments are returned as they arrive, and cannot be taken back. If the call breaks
off later, its arguments are the text that the model wrote up to the end of the call. They are not valid JSON then: the
parser does not complete them. If a list breaks off after a call, the rest of the list is dropped up to its end. If no
mark begins the list, the rest is text.

White space around calls and reasoning is dropped. If there are calls, white space after the last text is dropped too.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from io import StringIO

from .events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from .formats import CallFormat, ReasoningFormat
from .scanners import GemmaScanner, JsonScanner, PythonScanner, Scanner

# Maximum number of characters that are held back until it is known whether they are a call.
MAX_HELD = 1 << 16
MAX_NAME = 256  # characters of a function's name
_MAX_SPACE = 4096  # characters of white space that are held back, because a call may follow
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]+")
_MARKS = re.compile("[\ud800-\udfff]+")
_NAME = re.compile(r"[^\s\[{\"\ud800-\udfff]+")
# A name that is followed by marks ends before them.
_MARKED_NAME = re.compile(r"[^\s<`\[{\"\ud800-\udfff]+")
_NUMBERED = re.compile(r"(.+):[0-9]+")
PYTHON_NAME = re.compile(r"[^\s<>()\[\]{}=,;:\"'\ud800-\udfff]+")
XML_NAME = re.compile(r"[^\s<>\ud800-\udfff]+")
_BESIDE = ("type", "id")  # ignored members of a call in JSON
_PYTHON = {"True": "true", "False": "false", "None": "null"}

Reading = Generator[None, None, None]


def _xml_value(value: str, text: bool | None) -> str:
    """Convert the value of a parameter to JSON. text: the value is a string or null. Otherwise it is JSON, or a string
    if it is not valid JSON."""
    word = value.strip()
    if text:
        return "null" if word in ("null", "None") else json.dumps(value, ensure_ascii=False)
    scanner = JsonScanner()
    at, shown = scanner.feed(word + " ", 0)  # a number ends at the next character
    if scanner.done and not (word + " ")[at:].strip():
        return shown.strip()
    return _PYTHON.get(word) or json.dumps(value, ensure_ascii=False)


class NoCallError(Exception):
    """The text is not a call, or the call is not complete."""


def special_marks(markup: Iterable[str], tokens: Iterable[str]) -> dict[str, str]:
    """Map each special token that is part of markup to the character that replaces it in the parser's input. The
    character is a surrogate, which no text contains. So a text that spells such a token is not parsed as markup. The
    parser removes marks from texts, because special tokens are not part of the text."""
    joined = "\n".join(markup)
    found = sorted({token for token in tokens if token and token in joined})
    return {token: chr(0xD800 + at) for at, token in enumerate(found)}


def with_marks(text: str, marks: Mapping[str, str]) -> str:
    for token in sorted(marks, key=len, reverse=True):
        text = text.replace(token, marks[token])
    return text


def _joins_with(event: Event) -> object:
    """Return a key that is equal for consecutive events whose texts are one text."""
    if isinstance(event, CallArguments):
        return event.index
    return type(event) if isinstance(event, Content | Reasoning) else event


def _joined(events: list[Event]) -> list[Event]:
    """Join the texts of events with one key into one event."""
    first = events[0]
    if len(events) == 1 or not isinstance(first, Content | Reasoning | CallArguments):
        return events
    texts = "".join(event.text for event in events if isinstance(event, Content | Reasoning | CallArguments))
    return [replace(first, text=texts)]


class _Channel:
    """Collects one kind of text. White space is held back until the text after it is known."""

    def __init__(self, make: type[Content] | type[Reasoning], events: list[Event]) -> None:
        self._make = make
        self._events = events
        self._held = ""
        self._flows = False  # inside white space that is too long to be held back
        self.begun = False
        self.drops_first = False  # white space at the beginning is dropped
        self.drops_last = False  # white space at the end is dropped

    def push(self, text: str) -> None:
        core = text.strip(_SPACE)
        if not core:
            self._push_space(text)
            return
        begin = len(text) - len(text.lstrip(_SPACE))
        self._push_space(text[:begin])
        self._give(self._held + core)
        self._held, self._flows, self.drops_last = "", False, False
        self._push_space(text[begin + len(core) :])

    def next_push(self) -> Callable[[str], None]:
        """Return `push` for a text that an empty line separates from the texts before."""
        between = "\n\n" if self.begun else ""

        def push(text: str) -> None:
            nonlocal between
            if text:
                self.push(between + text)
                between = ""

        return push

    def _push_space(self, text: str) -> None:
        if self._flows:
            self._give(text)
        elif text and (self.begun or not self.drops_first):
            self._held += text
            if len(self._held) > _MAX_SPACE:
                self._flows = True
                self._give(self._held)
                self._held = ""

    def _give(self, text: str) -> None:
        if text:
            self.begun = True
            self._events.append(self._make(text))

    def drop_first(self) -> None:
        """Drop the white space before the next text, unless a text came before."""
        self.drops_first = True
        if not self.begun:
            self._held = ""

    def drop_last(self) -> None:
        """Drop the white space that is held back."""
        self._held = ""

    def end_text(self) -> None:
        """End the text here: drop the white space before and after this place."""
        self._held = ""
        self.drops_last = True

    def end(self) -> None:
        """Return the white space that is held back, unless it must be dropped."""
        if self.drops_last:
            return
        self._give(self._held)
        self._held = ""


@dataclass
class _Call:
    """The call that is being parsed."""

    index: int
    muted: bool


class AnswerParser:
    """Parser of one response. Pass the pieces of the response to `feed` in order, then call `finish`.

    calls, reasoning: the formats; None: the parser does not look for them.
    names: the functions of the request; empty: any name is accepted.
    texts: for the syntax xml, in which values have no quotes. For each function, the parameters that are strings; True:
      the parameter may also be null. Other values are JSON, or a string if they are not valid JSON.
    in_reasoning: the prompt ends with the beginning of reasoning.
    marks: the result of `special_marks`. The input has these marks instead of the special tokens.
    parallel: False: calls after the first are dropped.
    certain: a grammar ensures that a text that begins like a call is a call. So if the response ends within the call,
      this text is not content. forced: the response consists of reasoning and calls, so it has no content.
    continued: the response continues a text, so a call without markup cannot begin it.
    new_id: creates the id of a call.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None = None,
        *,
        names: Collection[str] = (),
        texts: Mapping[str, Mapping[str, bool]] | None = None,
        in_reasoning: bool = False,
        marks: Mapping[str, str] | None = None,
        parallel: bool = True,
        certain: bool = False,
        forced: bool = False,
        continued: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        marks = marks or {}
        self._calls = calls
        self._begins = [with_marks(mark, marks) for mark in calls.begin] if calls else []
        self._end = with_marks(calls.end, marks) if calls else ""
        self._quote = with_marks(calls.quote, marks) if calls else ""
        self._arguments_mark = with_marks(calls.arguments_mark.strip("\n"), marks) if calls else ""
        self._id_mark = with_marks(calls.id_mark, marks) if calls else ""
        self._name_mark = with_marks(calls.name_mark, marks) if calls else ""
        self._arguments_end = with_marks(calls.arguments_end.strip("\n"), marks) if calls else ""
        self._call_begin, call_end = (with_marks(mark, marks) for mark in calls.each) if calls else ("", "")
        self._call_end = call_end or self._end
        self._thought = [with_marks(mark, marks) for mark in (reasoning.begin, reasoning.end)] if reasoning else []
        self._wrapping = [with_marks(mark, marks) for mark in reasoning.content] if reasoning else ["", ""]
        self._wrapped = False  # inside these marks: after the first, before the second
        self._names = frozenset(names)
        self._texts = texts or {}
        self._xml = calls.xml if calls else None
        self._xml_marks = [with_marks(mark, marks) for mark in calls.xml.marks] if calls and calls.xml else []
        self._parallel = parallel
        self._certain = certain or forced
        self._cut_off = False
        self._new_id = new_id or self._random_id
        self.in_reasoning = in_reasoning and reasoning is not None
        self.num_calls = 0  # calls that have begun
        self._ids: set[str] = set()  # ids that the model wrote
        self._events: list[Event] = []
        self._content = _Channel(Content, [] if forced else self._events)
        self._reasoning = _Channel(Reasoning, self._events)
        self._content.begun = continued
        self._reasoning.drop_first()
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: StringIO | None = None  # parsed text that may be a call
        self._call: _Call | None = None
        self._in_list = False  # inside a list of calls that a mark begins
        self._listed = False  # a call of this list was parsed
        self._stray_end = False  # the end mark of calls is missing; it is not text, nor is the end mark of a call
        self._steps = self._read_answer()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Parse the next piece of the response. Returns the events that are certain."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._step()

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        """End the response and return the remaining events. cut_off: the model did not finish the response. Then an
        unfinished call after a mark or another call is dropped. Without `cut_off` and `certain`, it is content."""
        self._ended = True
        self._cut_off = cut_off
        return self._step()

    def _step(self) -> list[Event]:
        next(self._steps, None)
        events = self._events[:]
        self._events.clear()
        return [one for _, group in itertools.groupby(events, _joins_with) for one in _joined(list(group))]

    # --- input

    def _has(self, count: int) -> Generator[None, None, bool]:
        """Wait until `count` characters are available. Returns False if the response ends before."""
        while len(self._text) - self._at < count:
            if self._ended:
                return False
            yield
        return True

    def _take(self, count: int) -> str:
        piece = self._text[self._at : self._at + count]
        self._at += count
        if self._held is not None:
            self._held.write(piece)
            if self._held.tell() > MAX_HELD:
                raise NoCallError
        return piece

    def _hold(self, begun: str = "") -> None:
        """Keep a copy of the characters that are consumed from here on, because they may turn out to be text."""
        self._held = StringIO()
        self._held.write(begun)

    def _peek(self) -> Generator[None, None, str]:
        """Return the next character without consuming it; "" at the end."""
        return self._text[self._at] if (yield from self._has(1)) else ""

    def _accept(self, mark: str) -> Generator[None, None, bool]:
        """Consume `mark` if it comes next. Returns whether it does."""
        if not (yield from self._follows(mark)):
            return False
        self._take(len(mark))
        return True

    def _follows(self, mark: str) -> Generator[None, None, bool]:
        """Whether `mark` comes next. Consumes nothing."""
        for at, char in enumerate(mark):
            if not (yield from self._has(at + 1)) or self._text[self._at + at] != char:
                return False
        return bool(mark)

    def _expect(self, mark: str) -> Reading:
        if mark and not (yield from self._accept(mark)):
            raise NoCallError

    def _spaces(self, more: str = "") -> Generator[None, None, str]:
        """Consume white space and the characters in `more`. Returns the character after them, which is not consumed."""
        while (char := (yield from self._peek())) and char in _SPACE + more:
            self._take(self._run(_SPACES) or 1)
        return char

    def _run(self, pattern: re.Pattern[str]) -> int:
        """Return the number of next characters that match a pattern."""
        found = pattern.match(self._text, self._at)
        return len(found.group()) if found else 0

    def _until(self, marks: Collection[str], give: Callable[[str], None], last: str = "") -> Generator[None, None, str]:
        """Pass the text before the first of `marks` to `give`, and consume the mark. Returns the mark, or "" if the
        response ends before a mark. last: if the response ends within this mark, the beginning of the mark is
        dropped."""
        wanted = sorted((mark for mark in marks if mark), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, wanted)) or r"(?!)")
        longest = max(map(len, wanted), default=1)
        while True:
            found = pattern.search(self._text, self._at)
            if found:
                give(self._plain(self._text[self._at : found.start()]))
                self._at = found.end()
                return found.group()
            end = len(self._text)
            held = wanted if not self._ended else [last] if last else []
            tails = range(max(self._at, end - longest + 1), end)
            end = next((at for at in tails if any(mark.startswith(self._text[at:]) for mark in held)), end)
            give(self._plain(self._text[self._at : end]))
            self._at = len(self._text) if self._ended else end
            if self._ended:
                return ""
            yield

    def _plain(self, text: str) -> str:
        return _MARKS.sub("", text)

    # --- the response

    def _read_answer(self) -> Reading:
        yield
        if self.in_reasoning:
            yield from self._read_reasoning()
        while True:
            if not self._content.begun and (yield from self._read_beginning()):
                continue
            marks = [*self._begins, *((self._end, self._call_end) if self._stray_end else ())]
            last = self._wrapping[1] if self._wrapped else ""
            mark = yield from self._until([*marks, last], self._content.push, last)
            if not mark:
                break
            if mark == self._end:
                self._stray_end = False
            elif mark == last:
                self._wrapped = False
                self._content.end_text()
            while mark in self._begins:
                mark = yield from self._read_calls(mark)
        if not self.num_calls:
            self._content.end()

    def _read_beginning(self) -> Generator[None, None, bool]:
        """Parse reasoning, an opening content mark, or calls without markup. They can come only before all text.
        Returns whether one of them was found."""
        while (char := (yield from self._peek())) and char in _SPACE:
            self._content.push(self._take(self._run(_SPACES)))
        if self._content.begun:
            return False
        if self._thought and (yield from self._accept(self._thought[0])):
            yield from self._read_reasoning()
            return True
        if (yield from self._accept(self._wrapping[0])):
            self._wrapped = True
            self._content.drop_first()
            return True
        bracket = self._calls.bracket if self._calls and self._calls.bare else ""
        if bracket and (char == bracket or (char == "[" and not self._certain)):
            yield from self._read_calls("")
            return True
        return False

    def _read_reasoning(self) -> Reading:
        """Parse the text of the reasoning. Some models write its opening mark again although the prompt has it."""
        self.in_reasoning = True
        yield from self._spaces()
        yield from self._accept(self._thought[0])
        yield from self._until(self._thought[1:], self._reasoning.push, self._thought[1])
        self.in_reasoning = False
        self._content.drop_first()

    # --- calls

    def _read_calls(self, mark: str) -> Generator[None, None, str]:
        """Parse calls. mark: the consumed mark that begins them, or "". Returns the mark that begins the next calls, or
        ""."""
        assert self._calls is not None
        self._hold(mark)
        self._in_list = self._listed = False
        # Llama 4 may write an empty block before calls without marks.
        if mark and self._calls.bare and (yield from self._accept(self._end)):
            self._held = None
            return ""
        try:
            if self._calls.syntax == "json":
                yield from self._read_json(strict=not mark)
            elif self._calls.syntax == "pythonic":
                yield from self._read_pythonic(strict=not mark)
            else:
                yield from self._read_marked(mark)
        except NoCallError:
            if self._listed and self._held:  # a text that was parsed as a string may contain its end mark
                self._text, self._at = self._held.getvalue() + self._text[self._at :], 0
            if self._call or self._listed:
                return (yield from self._read_broken())
            marked = mark or self.num_calls
            if self._held and self._ended and (self._certain or (self._cut_off and marked)):
                self._content.drop_last()
                self._at = len(self._text)
            elif self._held:
                self._content.push(self._plain(self._held.getvalue()))
            else:  # the arguments are complete, the rest is not
                yield from self._read_end("")
        finally:
            self._held = None
        return ""

    def _read_json(self, *, strict: bool) -> Reading:
        """Parse a call as a JSON object, several objects, or a list of objects. Between several objects there is
        nothing or a comma. If calls need no markup, there may also be a semicolon."""
        assert self._calls is not None
        bare = self._calls.bare
        listed = (yield from self._spaces()) == "["
        if listed:
            self._take(1)
            yield from self._spaces()
        self._in_list = listed and not strict
        yield from self._read_object(strict=strict)
        closing = "};" if bare else "}"
        # A grammar allows only semicolons between calls, so the text after a comma is not a call.
        commas = listed or not (bare and self._certain)
        while (char := (yield from self._spaces(closing))) == "{" or (char == "," and commas):
            self._hold()
            if char == ",":
                self._take(1)
                char = yield from self._spaces()
                if (listed and char == "]") or (yield from self._at_end()):
                    break
            # If calls have no end mark, the text after them may begin with JSON that is not a call.
            yield from self._read_object(
                strict=strict or (bare and not listed), has_arguments=not (listed or self._end)
            )
        if self._in_list and char not in ("]", ""):
            raise NoCallError
        self._held = None
        yield from self._read_end(f"{closing}]" if listed else closing)

    def _at_end(self) -> Generator[None, None, bool]:
        """Whether the end of calls, the beginning of other calls or the end of the response comes next."""
        for mark in (self._end, *self._begins):
            if (yield from self._follows(mark)):
                return True
        return self._ended and self._end.startswith(self._text[self._at :])

    def _read_end(self, closing: str) -> Reading:
        """Consume the end mark of calls, and surplus brackets before it. If the mark comes later, it is not text. If
        the response ends within the mark, the beginning of the mark is not text."""
        yield from self._spaces(closing)
        if (yield from self._accept_last(self._end)):
            self._stray_end = False

    def _accept_last(self, mark: str) -> Generator[None, None, bool]:
        """Consume `mark` if it comes next, or its beginning if the response ends within it. Returns whether the whole
        mark was consumed."""
        if (yield from self._accept(mark)):
            return True
        if self._ended and mark.startswith(rest := self._text[self._at :]):
            self._take(len(rest))
        return False

    def _read_object(self, *, strict: bool, has_arguments: bool = False) -> Reading:
        """Parse {"name": ..., "arguments": {...}}.

        strict: the name must be one of `names`, and the call must have arguments. Before the arguments, only the name
          and the members in _BESIDE are allowed.
        has_arguments: the call must have arguments.
        """
        assert self._calls is not None
        yield from self._expect("{")
        name, arguments, done, more, others = "", "", False, False, False
        while (yield from self._spaces()) != "}":
            if more:
                yield from self._expect(",")
                yield from self._spaces()
            more = True
            key = yield from self._read_string(MAX_NAME)
            yield from self._spaces()
            yield from self._expect(":")
            char = yield from self._spaces()
            if key == "name" and not name:
                name = yield from self._read_string(MAX_NAME)
                if not name or _MARKS.search(name) or (strict and self._names and name not in self._names):
                    raise NoCallError
            elif key in self._calls.keys and not arguments and not done:
                if char == "{" and name:
                    yield from self._read_arguments(name)
                    done = True
                else:
                    arguments = yield from self._read_whole_arguments(char)
            elif not done and (key in ("name", *self._calls.keys) or (strict and key not in _BESIDE)):
                raise NoCallError
            else:
                others |= key not in _BESIDE
                yield from self._read_value(JsonScanner())
        self._take(1)
        if not done:
            # Other members may be the arguments.
            if not name or (not arguments and (strict or has_arguments or others)):
                raise NoCallError
            self._begin_call(name)
            self._give_arguments(arguments or "{}")
            self._end_call()

    def _read_whole_arguments(self, char: str) -> Generator[None, None, str]:
        """Parse arguments that come before the name, or that are JSON within a string. null or an empty string means no
        arguments."""
        if char == "n" and (yield from self._read_value(JsonScanner())):
            return "{}"
        if char == '"':
            text = yield from self._read_string(MAX_HELD)
            if not text.strip(_SPACE):
                return "{}"
            scanner = JsonScanner()
            at, arguments = scanner.feed(text, 0)
            if not text.startswith("{") or not scanner.done or text[at:].strip():
                raise NoCallError
            return arguments
        if char != "{":
            raise NoCallError
        return (yield from self._read_value(JsonScanner()))

    def _read_string(self, limit: int) -> Generator[None, None, str]:
        if (yield from self._peek()) != '"':
            raise NoCallError
        text: str = json.loads((yield from self._read_value(JsonScanner(), limit)))
        return text

    def _read_value(self, scanner: Scanner, limit: int = MAX_HELD) -> Generator[None, None, str]:
        parts = []
        size = 0
        while not scanner.done:
            if not (yield from self._has(1)):
                raise NoCallError
            end, part = scanner.feed(self._text, self._at)
            self._take(end - self._at)
            parts.append(part)
            size += len(part)
            if scanner.broken or size > limit:
                raise NoCallError
            if not scanner.done:
                yield from self._wait()
        return "".join(parts)

    def _wait(self) -> Reading:
        """Wait for more text."""
        if self._ended:
            raise NoCallError
        yield

    def _read_marked(self, mark: str) -> Reading:
        """Parse a call, or several calls with marks around each. mark: the consumed mark."""
        read_one = self._read_xml if self._xml else self._read_named
        yield from self._spaces()
        if mark != self._call_begin:
            yield from self._expect(self._call_begin)
        yield from read_one()
        while self._call_begin:
            yield from self._spaces()
            if not (yield from self._accept_last(self._call_begin)):
                break
            self._hold(self._call_begin)
            yield from read_one()
        if self._stray_end or not self._end:
            yield from self._read_end("")

    def _read_named(self) -> Reading:
        """Parse NAME{...} with marks between name and arguments, and with `call:` before the name for Gemma."""
        assert self._calls is not None
        yield from self._spaces()
        if self._calls.syntax == "gemma":
            yield from self._expect("call:")
        prefix = self._name_mark if (yield from self._accept(self._name_mark)) else ""
        name = yield from self._read_word(_MARKED_NAME if self._call_begin else _NAME)
        id = ""
        if self._calls.numbered and (found := _NUMBERED.fullmatch(name)):
            id, name = prefix + name, found[1]
        yield from self._spaces()
        if (yield from self._accept(self._id_mark)):
            while (char := (yield from self._peek())) and char.isalnum():
                self._take(1)
        # The word after a fence may be missing.
        fence = self._arguments_end if self._arguments_mark.startswith(self._arguments_end) else ""
        yield from self._accept(fence)
        yield from self._accept(self._arguments_mark.removeprefix(fence))
        if (yield from self._spaces()) != "{":
            raise NoCallError
        yield from self._read_arguments(name, id)
        if self._arguments_end:
            yield from self._spaces()
            yield from self._accept_last(self._arguments_end)
        if self._call_begin:
            yield from self._spaces()
            yield from self._accept_last(self._call_end)

    def _read_pythonic(self, *, strict: bool) -> Reading:
        """Parse NAME(key=value, ...), several of them with commas or line ends between them, or a list of them. strict:
        only a list of functions in `names` is accepted."""
        listed = (yield from self._spaces()) == "["
        if listed:
            self._take(1)
        elif strict:
            raise NoCallError
        self._in_list = not strict
        while True:
            yield from self._spaces()
            name = yield from self._read_word(PYTHON_NAME)
            if strict and self._names and name not in self._names:
                raise NoCallError
            yield from self._expect("(")
            yield from self._read_keywords(name)
            self._hold()
            char = yield from self._spaces()
            if char == ",":
                self._take(1)
                char = yield from self._spaces()
            if not char or (listed and char == "]") or (yield from self._at_end()):
                break
        self._held = None
        yield from self._read_end("]" if listed else "")

    def _read_keywords(self, name: str) -> Reading:
        """Parse the arguments of a call in Python, up to the closing bracket."""
        before = "{"
        while (yield from self._spaces()) != ")":
            if before == ", ":
                yield from self._expect(",")
                if (yield from self._spaces()) == ")":
                    break
            key = yield from self._read_word(PYTHON_NAME)
            yield from self._spaces()
            yield from self._expect("=")
            if before == "{":
                self._begin_call(name)
            self._give_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._scan_arguments(PythonScanner())
        self._take(1)
        if before == "{":
            self._begin_call(name)
        self._give_arguments("}" if before == ", " else "{}")
        self._end_call()

    def _read_xml(self) -> Reading:
        """Parse a name, and parameters with marks around each."""
        name_begin, name_end, key_begin, key_end, value_begin, value_end, close = self._xml_marks
        yield from self._spaces()
        yield from self._expect(name_begin)
        name = yield from self._read_word(XML_NAME)
        yield from self._expect(name_end)
        before, begun = "{", False
        while True:
            yield from self._spaces()
            if not (yield from self._accept(key_begin)):
                break
            if not begun:
                begun = True
                self._begin_call(name)
            key = yield from self._read_word(XML_NAME)
            yield from self._expect(key_end)
            if value_begin:
                yield from self._spaces()
                yield from self._expect(value_begin)
            self._give_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._read_xml_value(self._texts.get(name, {}).get(key), value_end)
        ended = bool(close) and (yield from self._accept(close))
        closed = not ended and (yield from self._accept(self._call_end))
        if not ended and not closed:
            raise NoCallError
        if not begun:
            self._begin_call(name)
        self._give_arguments("}" if begun else "{}")
        self._end_call()
        self._stray_end &= not closed or bool(self._call_begin)

    def _read_word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        word = ""
        while (yield from self._peek()) and (count := self._run(pattern)):
            word += self._take(min(count, MAX_NAME + 1))
            if len(word) > MAX_NAME:
                raise NoCallError
        if not word:
            raise NoCallError
        return word

    def _read_xml_value(self, text: bool | None, end: str) -> Reading:
        """Parse the value of a parameter. text: its entry in `texts`. A string is returned as it arrives. Other values
        are held back until they are complete or longer than MAX_HELD."""
        assert self._xml is not None
        held: list[str] = []
        size = 0
        begun = text is False

        def give(piece: str) -> None:
            nonlocal size, begun
            if begun:
                self._give_arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
                return
            held.append(piece)
            size += len(piece)
            if size > MAX_HELD:
                begun = True
                self._give_arguments(json.dumps("".join(held), ensure_ascii=False)[:-1])

        if begun:
            self._give_arguments('"')
        ends = [end]
        # A line end at the beginning and at the end of the value is not part of it.
        if self._xml.value[0].startswith("\n"):
            yield from self._accept("\n")
            ends.append(f"\n{end}")
        if not (yield from self._until(ends, give)):
            raise NoCallError
        self._give_arguments('"' if begun else _xml_value("".join(held), text))

    def _read_arguments(self, name: str, id: str = "") -> Reading:
        """Begin the call and return its arguments as they arrive."""
        self._begin_call(name, id)
        yield from self._scan_arguments(JsonScanner() if not self._quote else GemmaScanner(self._quote))
        self._end_call()

    def _scan_arguments(self, scanner: Scanner) -> Reading:
        while not scanner.done:
            end, part = scanner.feed(self._text, self._at)
            self._take(end - self._at)
            self._give_arguments(part)
            if scanner.broken:
                raise NoCallError
            if not scanner.done:
                yield from self._wait()

    def _read_broken(self) -> Generator[None, None, str]:
        """Parse the rest of a call whose arguments are not valid JSON, or the rest of a list after a call. Returns the
        mark that begins the next calls, or ""."""
        give = (lambda _: None) if self._xml else self._give_arguments  # the rest of xml is not JSON: it has marks
        ends = [self._call_end, self._end] if self._end else list(self._begins)
        if not self._call:  # the rest of a list; unfinished arguments may contain the mark that begins calls
            ends += self._begins
        mark = yield from self._until(ends, give)
        self._end_call(complete=False)
        self._stray_end = bool(self._call_begin) and mark == self._call_end
        return mark if mark in self._begins else ""

    def _begin_call(self, name: str, id: str = "") -> None:
        """id: the id that the model wrote; "" if it wrote none."""
        self._held = None
        self._content.drop_first()
        self._call = _Call(self.num_calls, muted=bool(self.num_calls) and not self._parallel)
        if not self._call.muted:
            self.num_calls += 1
            self._events.append(CallBegin(self._call.index, self._own_id(id) or self._new_id(), name))

    def _give_arguments(self, text: str) -> None:
        if self._call and not self._call.muted and text:
            self._events.append(CallArguments(self._call.index, text))

    def _end_call(self, *, complete: bool = True) -> None:
        if self._call and not self._call.muted:
            self._events.append(CallEnd(self._call.index, complete))
        self._call = None
        self._stray_end = bool(self._end)
        if self._in_list:
            self._listed = True
            self._hold()

    def _own_id(self, id: str) -> str:
        """Return the id that the model wrote, or "" if it wrote the same id before."""
        if id in self._ids:
            return ""
        self._ids.add(id)
        return id

    def _random_id(self) -> str:
        length = self._calls.id_characters if self._calls else 0
        return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"
