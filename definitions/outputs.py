"""Every generated file and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from definitions import engine

ROOT = Path(__file__).resolve().parents[1]

# Path -> its text. The argument is the text that is there, for files of which a part alone is generated.
FILES: dict[str, Callable[[], str]] = {
    **engine.FILES,
}


def render() -> dict[str, str]:
    """The text of every generated file, by its path from the repository's root."""
    return {path: make() for path, make in FILES.items()}
