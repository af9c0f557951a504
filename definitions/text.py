"""Pieces of generated text: literals, comments, heads."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

WIDTH = 120
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_ROOT = Path(__file__).resolve().parents[1]


def head(comment: str, *sources: str) -> str:
    """The first line of a generated file. `comment` begins a comment."""
    files = " and ".join(f"definitions/{source}" for source in sources)
    return f"{comment} Generated from {files} by `make generate`; do not edit.\n"


def whole(text: str) -> str:
    """`; >= 0`, for a comment that comment() does not cut in it."""
    return text if len(text) > 60 else text[:2] + text[2:].replace(" ", _HARD_SPACE)


def plain(text: str) -> str:
    """Without what whole() has put there."""
    return text.replace(_HARD_SPACE, " ")


def comment(mark: str, text: str, indent: int) -> str:
    """Lines of a comment."""
    start = f"{' ' * indent}{mark} "
    filled = textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=start)
    return plain(filled) + "\n"


def cell(text: str) -> str:
    """Of a Markdown table."""
    return plain(text).replace("|", "\\|")


def literal(text: str) -> str:
    """A string of C++ or Python in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def literals(text: str, indent: int) -> str:
    """A string literal of C++, cut into several where the line would be too long. The first line is not indented."""
    rows = textwrap.wrap(text, WIDTH - indent - 8, drop_whitespace=False) or [""]
    return ("\n" + " " * indent).join(literal(row) for row in rows)


def with_region(path: str, name: str, text: str, current: str | None = None) -> str:
    """A file's text with the lines between its marks `generated: NAME` and `end of generated: NAME` replaced. `current`
    stands for what is in the file. ValueError where the marks are not there once."""
    old = (_ROOT / path).read_text(encoding="utf-8") if current is None else current
    pattern = re.compile(
        rf"^(?P<begin>[^\n]*\bgenerated: {name}\b[^\n]*\n)(?P<text>.*?)(?P<end>^[^\n]*\bend of generated: {name}\b)",
        re.DOTALL | re.MULTILINE,
    )
    if len(pattern.findall(old)) != 1:
        raise ValueError(f"{path} needs one line with `generated: {name}`, and one with `end of generated: {name}`")
    return pattern.sub(lambda found: found["begin"] + text + found["end"], old)
