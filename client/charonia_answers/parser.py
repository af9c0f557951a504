"""Reads an answer as it is made: text, reasoning and calls of tools, by the descriptions in `formats`.

What is no call is text, and comes out as it was; of a call's markup nothing does. A call *begins* once its name and the
beginning of its arguments are read; what breaks off before that is text, whole, unless the answer was cut off there.
From then on arguments are handed on as they come, and cannot be taken back: of a call that breaks off later, what the
model wrote up to the call's end is its arguments, which are no JSON then, and nothing is made up. Of a list that breaks
off behind a call the rest is dropped, up to its end; where no mark begins it, the rest is text.

White space around calls and reasoning is dropped, and so is that around all the text beside them.
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

# Characters that are held back at most until it is known whether they are a call.
MAX_HELD = 1 << 16
MAX_NAME = 256  # characters of a function's name
_MAX_SPACE = 4096  # characters of white space that are held back, since a call may follow
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]+")
_MARKS = re.compile("[\ud800-\udfff]+")
_NAME = re.compile(r"[^\s\[{\"\ud800-\udfff]+")
# Where marks follow a name, it ends before them.
_MARKED_NAME = re.compile(r"[^\s<`\[{\"\ud800-\udfff]+")
_NUMBERED = re.compile(r"(.+):[0-9]+")
PYTHON_NAME = re.compile(r"[^\s<>()\[\]{}=,;:\"'\ud800-\udfff]+")
XML_NAME = re.compile(r"[^\s<>\ud800-\udfff]+")
_BESIDE = ("type", "id")  # members of a call in JSON that say nothing
_PYTHON = {"True": "true", "False": "false", "None": "null"}

Reading = Generator[None, None, None]


def _xml_value(value: str, text: bool | None) -> str:
    """A value in JSON. text: it is a text or null; else JSON, or, where it is none, a text."""
    word = value.strip()
    if text:
        return "null" if word in ("null", "None") else json.dumps(value, ensure_ascii=False)
    scanner = JsonScanner()
    at, shown = scanner.feed(word + " ", 0)  # a number ends with what follows it
    if scanner.done and not (word + " ")[at:].strip():
        return shown.strip()
    return _PYTHON.get(word) or json.dumps(value, ensure_ascii=False)


class _NoCallError(Exception):
    """What is being read is no call, or not one that is complete."""


def special_marks(markup: Iterable[str], tokens: Iterable[str]) -> dict[str, str]:
    """For each special token that is part of markup, the character that stands for it in what the parser is fed: a
    surrogate, which no text holds. So a text that spells such a token is no markup, and what is not read as markup can
    be left out of texts, which special tokens are no part of."""
    joined = "\n".join(markup)
    found = sorted({token for token in tokens if token and token in joined})
    return {token: chr(0xD800 + at) for at, token in enumerate(found)}


def _with_marks(text: str, marks: Mapping[str, str]) -> str:
    for token in sorted(marks, key=len, reverse=True):
        text = text.replace(token, marks[token])
    return text


def _joins_with(event: Event) -> object:
    """The same for events whose texts are one text."""
    if isinstance(event, CallArguments):
        return event.index
    return type(event) if isinstance(event, Content | Reasoning) else event


def _joined(events: list[Event]) -> list[Event]:
    """What was found in one piece, and is of one kind, as one event."""
    first = events[0]
    if len(events) == 1 or not isinstance(first, Content | Reasoning | CallArguments):
        return events
    texts = "".join(event.text for event in events if isinstance(event, Content | Reasoning | CallArguments))
    return [replace(first, text=texts)]


class _Channel:
    """Collects one kind of text. White space waits until it is known what follows it."""

    def __init__(self, make: type[Content] | type[Reasoning], events: list[Event]) -> None:
        self._make = make
        self._events = events
        self._held = ""
        self._flows = False  # white space that was too long to be held back
        self.begun = False
        self.drops_first = False  # white space at the beginning is none of it
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
        """White space before what comes next is dropped, unless something came before."""
        self.drops_first = True
        if not self.begun:
            self._held = ""

    def drop_last(self) -> None:
        """White space before what comes next is dropped."""
        self._held = ""

    def end_text(self) -> None:
        """The text ends here: drops the white space before and after."""
        self._held = ""
        self.drops_last = True

    def end(self) -> None:
        """Gives what was held back."""
        if self.drops_last:
            return
        self._give(self._held)
        self._held = ""


@dataclass
class _Call:
    """The call that is being read."""

    index: int
    muted: bool


class AnswerParser:
    """Of one answer; `feed` it in order, then `finish` it.

    calls, reasoning: the formats; None: there are none to be found.
    names: the functions that were offered; empty: any.
    texts: where arguments have no quotes (xml): for each function its parameters that are texts; True: or null. What
      others are is JSON, or, where it is none, a text.
    in_reasoning: the prompt ends with the beginning of reasoning.
    marks: as `special_marks` gives them; what is fed has a special token's mark in its place.
    parallel: False: calls after the first are dropped.
    certain: a grammar sees to it that what begins like a call is one: it is no content either where the answer ends
      before it can be read. forced: there is nothing but reasoning and calls, so there is no content at all.
    continued: a text stands before the answer that is a part of it, so no call without markup begins it.
    new_id: makes a call's id.
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
        self._begins = [_with_marks(mark, marks) for mark in calls.begin] if calls else []
        self._end = _with_marks(calls.end, marks) if calls else ""
        self._quote = _with_marks(calls.quote, marks) if calls else ""
        self._arguments_mark = _with_marks(calls.arguments_mark.strip("\n"), marks) if calls else ""
        self._id_mark = _with_marks(calls.id_mark, marks) if calls else ""
        self._name_mark = _with_marks(calls.name_mark, marks) if calls else ""
        self._arguments_end = _with_marks(calls.arguments_end.strip("\n"), marks) if calls else ""
        self._call_begin, call_end = (_with_marks(mark, marks) for mark in calls.each) if calls else ("", "")
        self._call_end = call_end or self._end
        self._thought = [_with_marks(mark, marks) for mark in (reasoning.begin, reasoning.end)] if reasoning else []
        self._wrapping = [_with_marks(mark, marks) for mark in reasoning.content] if reasoning else ["", ""]
        self._wrapped = False  # the first of these has come, and the second has not
        self._names = frozenset(names)
        self._texts = texts or {}
        self._xml = calls.xml if calls else None
        self._xml_marks = [_with_marks(mark, marks) for mark in calls.xml.marks] if calls and calls.xml else []
        self._parallel = parallel
        self._certain = certain or forced
        self._cut_off = False
        self._new_id = new_id or self._random_id
        self.in_reasoning = in_reasoning and reasoning is not None
        self.num_calls = 0  # that have begun
        self._ids: set[str] = set()  # those that the model wrote
        self._events: list[Event] = []
        self._content = _Channel(Content, [] if forced else self._events)
        self._reasoning = _Channel(Reasoning, self._events)
        self._content.begun = continued
        self._reasoning.drop_first()
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: StringIO | None = None  # what was read of what may be a call
        self._call: _Call | None = None
        self._in_list = False  # calls are being read that stand in a list behind a mark
        self._listed = False  # one of it has been read
        self._stray_end = False  # the end of calls has not come; where it or a call's own end comes, it is no text
        self._steps = self._read_answer()
        next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece of the answer."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._step()

    def finish(self, *, cut_off: bool = False) -> list[Event]:
        """What is left when the answer has ended. cut_off: the model had not ended it: what it has after the beginning
        of a call is one that nobody can read, and no content."""
        self._ended = True
        self._cut_off = cut_off
        return self._step()

    def _step(self) -> list[Event]:
        next(self._steps, None)
        events = self._events[:]
        self._events.clear()
        return [one for _, group in itertools.groupby(events, _joins_with) for one in _joined(list(group))]

    # --- reading

    def _has(self, count: int) -> Generator[None, None, bool]:
        """Waits until `count` characters are there; False where the answer ends before."""
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
                raise _NoCallError
        return piece

    def _hold(self, begun: str = "") -> None:
        """From here on what is taken may turn out to be text."""
        self._held = StringIO()
        self._held.write(begun)

    def _peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        return self._text[self._at] if (yield from self._has(1)) else ""

    def _accept(self, mark: str) -> Generator[None, None, bool]:
        """Takes `mark` where it comes next, else nothing."""
        if not (yield from self._follows(mark)):
            return False
        self._take(len(mark))
        return True

    def _follows(self, mark: str) -> Generator[None, None, bool]:
        """Whether `mark` comes next, which is not taken."""
        for at, char in enumerate(mark):
            if not (yield from self._has(at + 1)) or self._text[self._at + at] != char:
                return False
        return bool(mark)

    def _expect(self, mark: str) -> Reading:
        if mark and not (yield from self._accept(mark)):
            raise _NoCallError

    def _spaces(self, more: str = "") -> Generator[None, None, str]:
        """Takes white space; the character after it."""
        while (char := (yield from self._peek())) and char in _SPACE + more:
            self._take(self._run(_SPACES) or 1)
        return char

    def _run(self, pattern: re.Pattern[str]) -> int:
        """How many of the next characters are of a kind."""
        found = pattern.match(self._text, self._at)
        return len(found.group()) if found else 0

    def _until(self, marks: Collection[str], give: Callable[[str], None], last: str = "") -> Generator[None, None, str]:
        """Gives the text before the first of `marks` and takes the mark; "" where the answer ends before one. last: a
        mark whose beginning is dropped where the answer ends within it."""
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

    # --- the answer

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
        """What may only come before all text: reasoning, and calls without markup. Whether there was any."""
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
        """What follows its beginning, which some models write although the prompt has it."""
        self.in_reasoning = True
        yield from self._spaces()
        yield from self._accept(self._thought[0])
        yield from self._until(self._thought[1:], self._reasoning.push)
        self.in_reasoning = False
        self._content.drop_first()

    # --- calls

    def _read_calls(self, mark: str) -> Generator[None, None, str]:
        """What follows the beginning of calls, which was taken. Returns the beginning of the next, or "" ."""
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
        except _NoCallError:
            if self._listed and self._held:  # its end mark may be in what was taken for a text
                self._text, self._at = self._held.getvalue() + self._text[self._at :], 0
            if self._call or self._listed:
                return (yield from self._read_broken())
            marked = mark or self.num_calls
            if self._held and self._ended and (self._certain or (self._cut_off and marked)):
                self._content.drop_last()
                self._at = len(self._text)
            elif self._held:
                self._content.push(self._plain(self._held.getvalue()))
            else:  # the arguments were complete, and the rest was not
                yield from self._read_end("")
        finally:
            self._held = None
        return ""

    def _read_json(self, *, strict: bool) -> Reading:
        """An object; several, with nothing or a comma between, or semicolons where calls need no markup; or a list."""
        assert self._calls is not None
        bare = self._calls.bare
        listed = (yield from self._spaces()) == "["
        if listed:
            self._take(1)
            yield from self._spaces()
        self._in_list = listed and not strict
        yield from self._read_object(strict=strict)
        closing = "};" if bare else "}"
        # A grammar has semicolons alone, and what comes after others is not of its making.
        commas = listed or not (bare and self._certain)
        while (char := (yield from self._spaces(closing))) == "{" or (char == "," and commas):
            self._hold()
            if char == ",":
                self._take(1)
                char = yield from self._spaces()
                if (listed and char == "]") or (yield from self._at_end()):
                    break
            # Where nothing marks the end of calls, what follows them may be a text that begins with JSON.
            yield from self._read_object(
                strict=strict or (bare and not listed), has_arguments=not (listed or self._end)
            )
        if self._in_list and char not in ("]", ""):
            raise _NoCallError
        self._held = None
        yield from self._read_end(f"{closing}]" if listed else closing)

    def _at_end(self) -> Generator[None, None, bool]:
        """Whether the end of calls, the beginning of others or the end of the answer comes next."""
        for mark in (self._end, *self._begins):
            if (yield from self._follows(mark)):
                return True
        return self._ended and self._end.startswith(self._text[self._at :])

    def _read_end(self, closing: str) -> Reading:
        """The end of calls, with brackets that come too often before it. Where it is missing, it is no text when it
        comes later; nor is its beginning, where the answer ends within it."""
        yield from self._spaces(closing)
        if (yield from self._accept_last(self._end)):
            self._stray_end = False

    def _accept_last(self, mark: str) -> Generator[None, None, bool]:
        """Takes `mark` where it comes next, and its beginning where the answer ends within it. Whether it is whole."""
        if (yield from self._accept(mark)):
            return True
        if self._ended and mark.startswith(rest := self._text[self._at :]):
            self._take(len(rest))
        return False

    def _read_object(self, *, strict: bool, has_arguments: bool = False) -> Reading:
        """{"name": ..., "arguments": {...}}.

        strict: of an offered function, with arguments, and nothing else before them.
        has_arguments: with arguments.
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
                    raise _NoCallError
            elif key in self._calls.keys and not arguments and not done:
                if char == "{" and name:
                    yield from self._read_arguments(name)
                    done = True
                else:
                    arguments = yield from self._read_whole_arguments(char)
            elif not done and (key in ("name", *self._calls.keys) or (strict and key not in _BESIDE)):
                raise _NoCallError
            else:
                others |= key not in _BESIDE
                yield from self._read_value(JsonScanner())
        self._take(1)
        if not done:
            # What else stands there may be the arguments.
            if not name or (not arguments and (strict or has_arguments or others)):
                raise _NoCallError
            self._begin_call(name)
            self._give_arguments(arguments or "{}")
            self._end_call()

    def _read_whole_arguments(self, char: str) -> Generator[None, None, str]:
        """Arguments that come before the name, or as a text that is JSON. Null or an empty text: there are none."""
        if char == "n" and (yield from self._read_value(JsonScanner())):
            return "{}"
        if char == '"':
            text = yield from self._read_string(MAX_HELD)
            if not text.strip(_SPACE):
                return "{}"
            scanner = JsonScanner()
            at, arguments = scanner.feed(text, 0)
            if not text.startswith("{") or not scanner.done or text[at:].strip():
                raise _NoCallError
            return arguments
        if char != "{":
            raise _NoCallError
        return (yield from self._read_value(JsonScanner()))

    def _read_string(self, limit: int) -> Generator[None, None, str]:
        if (yield from self._peek()) != '"':
            raise _NoCallError
        text: str = json.loads((yield from self._read_value(JsonScanner(), limit)))
        return text

    def _read_value(self, scanner: Scanner, limit: int = MAX_HELD) -> Generator[None, None, str]:
        parts = []
        size = 0
        while not scanner.done:
            if not (yield from self._has(1)):
                raise _NoCallError
            end, part = scanner.feed(self._text, self._at)
            self._take(end - self._at)
            parts.append(part)
            size += len(part)
            if scanner.broken or size > limit:
                raise _NoCallError
            if not scanner.done:
                yield from self._wait()
        return "".join(parts)

    def _wait(self) -> Reading:
        """For more text than is there."""
        if self._ended:
            raise _NoCallError
        yield

    def _read_marked(self, mark: str) -> Reading:
        """A call, or calls with marks of their own. mark: what was taken."""
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
        """NAME{...} with marks between, and, for Gemma, with `call:` before."""
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
            raise _NoCallError
        yield from self._read_arguments(name, id)
        if self._arguments_end:
            yield from self._spaces()
            yield from self._accept_last(self._arguments_end)
        if self._call_begin:
            yield from self._spaces()
            yield from self._accept_last(self._call_end)

    def _read_pythonic(self, *, strict: bool) -> Reading:
        """NAME(key=value, ...), several with commas or line ends between them, or a list of these. strict: a list, and
        of offered functions."""
        listed = (yield from self._spaces()) == "["
        if listed:
            self._take(1)
        elif strict:
            raise _NoCallError
        self._in_list = not strict
        while True:
            yield from self._spaces()
            name = yield from self._read_word(PYTHON_NAME)
            if strict and self._names and name not in self._names:
                raise _NoCallError
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
        """The arguments of a call in Python, up to the closing bracket."""
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
        """A name, and parameters with marks around each."""
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
            raise _NoCallError
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
                raise _NoCallError
        if not word:
            raise _NoCallError
        return word

    def _read_xml_value(self, text: bool | None, end: str) -> Reading:
        """text: as `texts` has it. A text is handed on as it comes; others have to be whole."""
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
        # A line's end at both ends of the value is not its own.
        if self._xml.value[0].startswith("\n"):
            yield from self._accept("\n")
            ends.append(f"\n{end}")
        if not (yield from self._until(ends, give)):
            raise _NoCallError
        self._give_arguments('"' if begun else _xml_value("".join(held), text))

    def _read_arguments(self, name: str, id: str = "") -> Reading:
        """Begins the call and hands its arguments on."""
        self._begin_call(name, id)
        yield from self._scan_arguments(JsonScanner() if not self._quote else GemmaScanner(self._quote))
        self._end_call()

    def _scan_arguments(self, scanner: Scanner) -> Reading:
        while not scanner.done:
            end, part = scanner.feed(self._text, self._at)
            self._take(end - self._at)
            self._give_arguments(part)
            if scanner.broken:
                raise _NoCallError
            if not scanner.done:
                yield from self._wait()

    def _read_broken(self) -> Generator[None, None, str]:
        """The rest of a call whose arguments are no JSON, or of a list behind a call. Returns the next beginning."""
        give = (lambda _: None) if self._xml else self._give_arguments  # it is no JSON, and the marks are in it
        ends = [self._call_end, self._end] if self._end else list(self._begins)
        if not self._call:  # of a list; arguments that are open may hold the beginning's mark
            ends += self._begins
        mark = yield from self._until(ends, give)
        self._end_call(complete=False)
        self._stray_end = bool(self._call_begin) and mark == self._call_end
        return mark if mark in self._begins else ""

    def _begin_call(self, name: str, id: str = "") -> None:
        """id: the model's; "": it has none."""
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
        self._stray_end = bool(self._end)  # until it has come
        if self._in_list:
            self._listed = True
            self._hold()

    def _own_id(self, id: str) -> str:
        """The id that the model wrote; "" where it has written it before."""
        if id in self._ids:
            return ""
        self._ids.add(id)
        return id

    def _random_id(self) -> str:
        length = self._calls.id_characters if self._calls else 0
        return uuid.uuid4().hex[:length] if length else f"call_{uuid.uuid4().hex[:24]}"
