"""Every generated file and what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from definitions import docs, engine, limits, sampling, services, tensors

ROOT = Path(__file__).resolve().parents[1]

# Path -> its text; what is not generated of a file is as it is there.
FILES: dict[str, Callable[[], str]] = {
    **engine.FILES,
    **sampling.FILES,
    **tensors.FILES,
    **services.FILES,
    **limits.FILES,
    **docs.FILES,
}


def render() -> dict[str, str]:
    """The text of every generated file, by its path from the repository's root."""
    return {path: make() for path, make in FILES.items()}
