"""The draft model of speculative_method = draft_model (docs/speculation.md), in settings of callers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from charonia.errors import CharoniaError

METHOD, MODEL = "speculative_method", "speculative_model"
_DRAFT_MODEL = "draft_model"


def draft_of(settings: Mapping[str, str]) -> str | None:
    """Return the draft model that the settings name; None if they name none, or choose another method. The engine warns
    about a model that is not used."""
    used = settings.get(METHOD, _DRAFT_MODEL) == _DRAFT_MODEL
    return settings.get(MODEL) or None if used else None


def draft_settings(weights: Path) -> dict[str, str]:
    """Return the engine's settings for a draft model with this weights folder."""
    return {METHOD: _DRAFT_MODEL, MODEL: str(weights)}


@contextmanager
def named_as_given(folder: Path, given: str) -> Iterator[None]:
    """Put what the user gave into errors that name the folder that was made of it."""
    try:
        yield
    except CharoniaError as error:
        raise type(error)(str(error).replace(str(folder), given), error.status) from error
