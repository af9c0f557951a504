"""Events: the parts of a response that the parser returns, in their order in the response."""

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
    """index: the number of the call in the response, from 0. id: unique within the response."""

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
    """complete: the arguments are a JSON object. Otherwise they are not valid JSON, or the response ended in them."""

    index: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
