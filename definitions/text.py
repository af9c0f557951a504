"""Parts of generated text: literals, comments, heads."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

WIDTH = 120
_HARD_SPACE = "\N{NO-BREAK SPACE}"
_ROOT = Path(__file__).resolve().parents[1]


def head(comment: str, *sources: str) -> str:
    """Return the first line of a generated file. `comment`: the mark that starts a comment."""
    files = " and ".join(f"definitions/{source}" for source in sources)
    return f"{comment} Generated from {files} by `make generate`; do not edit.\n"


def whole(text: str) -> str:
    """Mark a text such as `; >= 0` so that comment() does not break lines in it."""
    return text if len(text) > 60 else text[:2] + text[2:].replace(" ", _HARD_SPACE)


def plain(text: str) -> str:
    """Remove the marks of whole()."""
    return text.replace(_HARD_SPACE, " ")


def comment(mark: str, text: str, indent: int) -> str:
    """Return the lines of a comment."""
    start = f"{' ' * indent}{mark} "
    filled = textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=start)
    return plain(filled) + "\n"


def cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return plain(text).replace("|", "\\|")


def literal(text: str) -> str:
    """Return a C++ or Python string in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def literals(text: str, indent: int) -> str:
    """Return a C++ string literal, split into several if it is too long for a line. The first line is not indented."""
    rows = textwrap.wrap(text, WIDTH - indent - 8, drop_whitespace=False) or [""]
    return ("\n" + " " * indent).join(literal(row) for row in rows)


def with_region(path: str, name: str, text: str, current: str | None = None) -> str:
    """Replace the lines between the marks `generated: NAME` and `end of generated: NAME` in a file's text. `current`:
    the text to use instead of the file's. Raises ValueError if the marks do not exist exactly once."""
    old = (_ROOT / path).read_text(encoding="utf-8") if current is None else current
    pattern = re.compile(
        rf"^(?P<begin>[^\n]*\bgenerated: {name}\b[^\n]*\n)(?P<text>.*?)(?P<end>^[^\n]*\bend of generated: {name}\b)",
        re.DOTALL | re.MULTILINE,
    )
    if len(pattern.findall(old)) != 1:
        raise ValueError(f"{path} needs one line with `generated: {name}`, and one with `end of generated: {name}`")
    return pattern.sub(lambda found: found["begin"] + text + found["end"], old)
