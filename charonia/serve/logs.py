"""Parses the log lines of Triton and the gateway. With log_format = json each line becomes one JSON object:
{"time": ..., "level": ..., "component": ..., "message": ...}, and request_id and more if an event has them."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from charonia.errors import CharoniaError

_PYTHON_LINE = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL):\s+(.*)$")
# Severity, month and day, time (UTC), thread, file and line, text.
_TRITON_LINE = re.compile(r"^([IWEF])(\d{4} \d\d:\d\d:\d\d\.\d+) \d+ (?:(\S+):\d+\] )?(.*)$")
_TRITON_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical"}
REPEATED_S = 60  # between two similar lines on the terminal
_VARIABLE = re.compile(r"\[[^\]]*\]|\b\w*\d\w*")  # the id of a request, and words with digits
_MAX_KINDS = 1000  # of lines, for Repeats
_ENGINE_SOURCE = "charonia"  # the backend logs this as its source file


@dataclass
class Entry:
    """One event. `source`: the source file, for an event of Triton. `component`: empty if the line does not name it."""

    level: str  # debug, info, warning, error, critical
    message: str
    source: str = ""
    component: str = ""
    time: str = ""  # ISO 8601; empty: not said
    fields: dict[str, Any] = field(default_factory=dict)

    def to_json(self, component: str, now: datetime) -> str:
        """`component` and `now` are defaults."""
        head = {
            "time": self.time or now.isoformat(timespec="milliseconds"),
            "level": self.level,
            "component": self.component or component,
            "message": self.message,
        }
        more = {"source": self.source} if self.source and self.source != _ENGINE_SOURCE else {}
        return json.dumps({**head, **more, **self.fields}, ensure_ascii=False)


def parse(line: str) -> Entry | None:
    """None for output that is not a log line, such as a table or a traceback."""
    if match := _PYTHON_LINE.match(line):
        return Entry(match.group(1).lower(), match.group(2))
    if match := _TRITON_LINE.match(line):
        letter, stamp, source, text = match.groups()
        entry = Entry(_TRITON_LEVELS[letter], _unquoted(text), source or "", time=_with_year(stamp))
        if source == _ENGINE_SOURCE:
            entry.component = "engine"
        return _of_object(entry.message, entry) or entry
    return _of_object(line, Entry("info", ""))


def _unquoted(text: str) -> str:
    """Triton writes its texts as JSON strings."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    return value if isinstance(value, str) else text


def _of_object(text: str, outer: Entry) -> Entry | None:
    """An event that is written as a JSON object with a message. Missing fields are taken from `outer`."""
    if not text.startswith("{"):
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("message"), str):
        return None
    return Entry(
        str(fields.pop("level", outer.level)),
        fields.pop("message"),
        outer.source,
        str(fields.pop("component", outer.component)),
        str(fields.pop("time", outer.time)),
        fields,
    )


def _with_year(stamp: str, now: datetime | None = None) -> str:
    """Adds the year, which Triton omits."""
    now = now or datetime.now(timezone.utc)
    said = datetime.strptime(f"{now.year}{stamp}", "%Y%m%d %H:%M:%S.%f").replace(tzinfo=timezone.utc)
    if said > now + timedelta(days=1):  # the last lines of a year, read in the next
        said = said.replace(year=now.year - 1)
    return said.isoformat(timespec="milliseconds")


class Repeats:
    """Suppresses lines that differ only in ids and numbers from a line in the last REPEATED_S. The log file has all of
    them. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown: dict[str, float] = {}  # when, by what the lines have in common
        self._held: dict[str, int] = {}  # how many since then

    def passed(self, text: str) -> str | None:
        """The line, with the number of similar lines that were suppressed; None to suppress it."""
        now, common = self._clock(), _VARIABLE.sub("", text)
        if now - self._shown.get(common, -math.inf) < REPEATED_S:
            self._held[common] = self._held.get(common, 0) + 1
            return None
        if len(self._shown) >= _MAX_KINDS:
            self._shown.clear()
            self._held.clear()
        self._shown[common] = now
        held = self._held.pop(common, 0)
        return f"{text} ({held} more like this are in the log)" if held else text


def renderer(log_format: Literal["text", "json"], component: str) -> Callable[[str], str | None]:
    """A function that renders a log line: unchanged, or as a JSON object. It returns None for an empty event."""
    if log_format == "text":
        return lambda line: line

    def render(line: str) -> str | None:
        entry = parse(line) or Entry("info", line)
        return entry.to_json(component, datetime.now(timezone.utc)) if entry.message.strip() else None

    return render


def write(level: str, message: str, component: str = "serve") -> None:
    """Writes a line of this process as JSON to standard error."""
    show(Entry(level, message).to_json(component, datetime.now(timezone.utc)))


def show(line: str) -> None:
    """Writes a line to standard error in one piece, because several threads write."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@contextmanager
def reported(log_format: Literal["text", "json"]) -> Iterator[None]:
    """With JSON a CharoniaError is logged as a line, and ends the process with its exit code."""
    try:
        yield
    except CharoniaError as error:
        if log_format == "text":
            raise
        write("error", str(error))
        raise SystemExit(error.exit_code) from None
