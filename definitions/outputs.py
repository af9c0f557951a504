"""Lists every generated file and its content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
# CMake writes the C++ files before a build. The others are committed.
CPP = [path for path in FILES if path.endswith((".h", ".inc"))]
COMMITTED = [path for path in FILES if path not in CPP]


def render(paths: Iterable[str]) -> dict[str, str]:
    """Return the text of generated files, by their paths from the repository's root."""
    return {path: FILES[path]() for path in paths}
