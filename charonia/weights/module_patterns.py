"""Regular expressions over module names in config.json. Downloaded files are not trusted, so RE2 matches them in linear
time: Python's own engine can backtrack for hours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

_LOOKAHEADS = ("(?!", "(?=")
# Length limit of expressions with look-ahead. Finding the end of a look-ahead by trial takes quadratic time.
_MAX_LETTERS = 1000


class PatternError(ValueError):
    """The text is not a supported regular expression."""


@dataclass(frozen=True)
class ModulePattern:
    """A regular expression. It matches from the start of a name, as with re.match.

    RE2 has no look-ahead. At the start of an expression, where configurations use it (`^(?!.*experts).*proj`), it is a
    separate expression that a name must match, or must not match.
    """

    body: Any  # a re2 pattern
    conditions: tuple[tuple[bool, Any], ...]  # (whether the name must match, re2 pattern)

    def match(self, name: str) -> bool:
        if any((found.match(name) is not None) is not wanted for wanted, found in self.conditions):
            return False
        return self.body.match(name) is not None

    def any_match(self, names: Iterable[str]) -> bool:
        return any(self.match(name) for name in names)


@lru_cache(maxsize=4096)
def module_pattern(text: str, end: str = "") -> ModulePattern:
    """Compile a pattern. end: an expression that must follow. Raises PatternError."""
    rest = text.removeprefix("^")
    if rest.startswith(_LOOKAHEADS) and len(rest) > _MAX_LETTERS:
        raise PatternError(f"it has {len(rest)} characters; with look-ahead the maximum is {_MAX_LETTERS}")
    conditions = []
    while rest.startswith(_LOOKAHEADS):
        inner, after = _split_lookahead(rest)
        conditions.append((rest.startswith("(?="), inner))
        rest = after
    if conditions and any(_is_whole(rest[:at]) and _is_whole(rest[at + 1 :]) for at in _places(rest, "|")):
        raise PatternError("a look-ahead stands before alternatives: put the alternatives into parentheses")
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
    """Split a text into its leading look-ahead and the rest. The look-ahead ends at the first parenthesis that makes it
    a complete expression."""
    for end in _places(text, ")"):
        inner = text[len("(?!") : end]
        if _is_whole(inner):
            return _compile(inner), text[end + 1 :]
    raise PatternError(f"the look-ahead {text[:3]} has no end, or RE2 does not support its expression")


def _compile(text: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except UnicodeEncodeError as error:  # JSON may contain half of a surrogate pair
        raise PatternError(f"it is not valid Unicode: {error.reason}") from None
    except re2.error as error:
        reason = error.args[0] if error.args else error
        words = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise PatternError(words) from None
