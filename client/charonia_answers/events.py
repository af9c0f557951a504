"""What the parser finds in an answer, in the order in which it stands there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text that is neither reasoning nor a call."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    """index: of the answer's calls, from 0 on. id: a new one."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments. Joined, the pieces of a complete call are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """complete: its arguments are a JSON object. Otherwise the answer ended within them, or they are no JSON."""

    index: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
