"""Texts in xgrammar's EBNF."""

from __future__ import annotations

import re

_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f]')


def literal(text: str) -> str:
    """A text as a literal."""
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(found: re.Match[str]) -> str:
    char = found.group()
    return f"\\{char}" if char in '"\\' else f"\\u{ord(char):04x}"
