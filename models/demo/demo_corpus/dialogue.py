"""What is asked in the examination, and how answers are checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .text import Call

_CJK = re.compile(r"[\u4e00-\u9fff]")
_DECLINES = {"en": r"do not know|cannot", "zh": r"不知道|不会做"}


@dataclass(frozen=True)
class Turn:
    """A user's message, and regular expressions that the answer must all hold; `declines`: it must say "I don't know".

    calls: those of tools that must come before the answer, with what the tools return. json: what the answer must be,
    with the keys in this order.
    """

    text: str
    holds: tuple[str, ...]
    language: str
    declines: bool = False
    any_language: bool = False  # a bare "12 x 8" may be answered in either language
    calls: tuple[Call, ...] = ()
    json: str = ""

    def calls_right(self, calls: list[tuple[str, Any]]) -> bool:
        """Whether these are the calls (names, arguments) that the question needs; spaces in arguments do not count."""
        return [_without_spaces(*call) for call in calls] == [
            _without_spaces(call.name, call.arguments) for call in self.calls
        ]

    def passes(self, answer: str) -> bool:
        """Whether `answer` (whole, without special tokens) says what is true, in the language of the question."""
        if self.json:
            return _pairs(answer) == _pairs(self.json)
        if not self.any_language and (_CJK.search(answer) is not None) != (self.language == "zh"):
            return False
        if (re.search(_DECLINES[self.language], answer) is not None) != self.declines:
            return False
        return all(re.search(pattern, answer, re.IGNORECASE) for pattern in self.holds)


def _without_spaces(name: str, arguments: Any) -> tuple[str, str]:
    return name, re.sub(r"\s", "", json.dumps(arguments, ensure_ascii=False))


def _pairs(text: str) -> list[tuple[str, bool, Any]] | None:
    """What a JSON object holds, in its order, and of each value whether it is true or false, which Python takes for 1 and
    0; None: `text` is none."""
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except ValueError:
        return None
    return [(key, isinstance(value, bool), value) for key, value in pairs] if isinstance(pairs, _Pairs) else None


class _Pairs(list[tuple[str, Any]]):
    """Of a JSON object, with names that come twice."""


@dataclass(frozen=True)
class Dialogue:
    """Turns to be asked one after another, each with the history of the model's own answers. tools: what is offered, as
    OpenAI's API has it."""

    group: str
    turns: tuple[Turn, ...]
    system: str | None = field(default=None)
    tools: tuple[Mapping[str, Any], ...] = ()


def alone(value: int | float | str) -> str:
    """`value` as a number of its own, and no part of another one."""
    return rf"(?<![\d.-]){re.escape(str(value))}(?!\.?\d)"


def number(value: int) -> tuple[str, ...]:
    """The last number of the answer is `value`."""
    return (rf"{alone(value)}[^\d]*$",)
