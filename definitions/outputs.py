"""Lists every generated file and its content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from definitions import docs, engine, limits, sampling, services, tensors

ROOT = Path(__file__).resolve().parents[1]

# Path -> text. Parts of a file that are not generated stay unchanged.
FILES: dict[str, Callable[[], str]] = {
    **engine.FILES,
    **sampling.FILES,
    **tensors.FILES,
    **services.FILES,
    **limits.FILES,
    **docs.FILES,
}


def render() -> dict[str, str]:
    """Return the text of every generated file, by its path from the repository's root."""
    return {path: make() for path, make in FILES.items()}
