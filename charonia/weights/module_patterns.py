"""Regular expressions over names of modules, as config.json has them. They come with a download, so they are matched in
a time that is linear in the name's length, by RE2: Python's own engine can backtrack for hours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

_LOOKAHEADS = ("(?!", "(?=")
# Of an expression with look-ahead: where that ends is found by trying, in a time that grows with the square of this.
_MAX_LETTERS = 1000


class PatternError(ValueError):
    """Why a text is no regular expression that can be matched."""


@dataclass(frozen=True)
class ModulePattern:
    """A regular expression. Names match from their beginning on, as with re.match.

    RE2 has no look-ahead. At the beginning of an expression, where configurations use it (`^(?!.*experts).*proj`), it
    is an expression of its own, which a name must match, or must not.
    """

    body: Any  # of re2
    conditions: tuple[tuple[bool, Any], ...]  # whether the name has to match, and what

    def match(self, name: str) -> bool:
        if any((found.match(name) is not None) is not wanted for wanted, found in self.conditions):
            return False
        return self.body.match(name) is not None

    def any_match(self, names: Iterable[str]) -> bool:
        return any(self.match(name) for name in names)


@lru_cache(maxsize=4096)
def module_pattern(text: str, end: str = "") -> ModulePattern:
    """end: an expression for what has to follow. Raises PatternError."""
    rest = text.removeprefix("^")
    if rest.startswith(_LOOKAHEADS) and len(rest) > _MAX_LETTERS:
        raise PatternError(f"it has {len(rest)} characters, and with look-ahead {_MAX_LETTERS} are the most")
    conditions = []
    while rest.startswith(_LOOKAHEADS):
        inner, after = _split_lookahead(rest)
        conditions.append((rest.startswith("(?="), inner))
        rest = after
    if conditions and any(_is_whole(rest[:at]) and _is_whole(rest[at + 1 :]) for at in _places(rest, "|")):
        raise PatternError("look-ahead is before alternatives: put these into parentheses")
    body = rest if conditions else text
    compiled = _compile(body)
    return ModulePattern(_compile(f"(?:{body}){end}") if end else compiled, tuple(conditions))


def _places(text: str, letter: str) -> Iterator[int]:
    return (at for at, found in enumerate(text) if found == letter)


def _is_whole(text: str) -> bool:
    try:
        _compile(text)
    except PatternError:
        return False
    return True


def _split_lookahead(text: str) -> tuple[Any, str]:
    """What is in the parentheses that a text begins with, and what follows them: they end where it is a whole
    expression."""
    for end in _places(text, ")"):
        inner = text[len("(?!") : end]
        if _is_whole(inner):
            return _compile(inner), text[end + 1 :]
    raise PatternError(f"what begins with {text[:3]} has no end, or is none that RE2 knows")


def _compile(text: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except UnicodeEncodeError as error:  # JSON may have half a pair
        raise PatternError(f"it is no Unicode text: {error.reason}") from None
    except re2.error as error:
        reason = error.args[0] if error.args else error
        words = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise PatternError(words) from None
