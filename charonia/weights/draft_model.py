"""The draft model or EAGLE-3 head of speculative_method (docs/speculation.md), in settings of callers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

METHOD, MODEL = "speculative_method", "speculative_model"
_DRAFT_MODEL, _EAGLE3 = "draft_model", "eagle3"
NO_MODEL = (  # after its name
    "is an EAGLE-3 head, and no model: serve the model that it was trained for, with speculative_method = eagle3, and "
    "name the head in speculative_model"
)


def draft_of(settings: Mapping[str, str]) -> str | None:
    """Return the draft model that the settings name; None if they name none, or choose another method. The engine warns
    about a model that is not used."""
    used = settings.get(METHOD, _DRAFT_MODEL) in (_DRAFT_MODEL, _EAGLE3)
    return settings.get(MODEL) or None if used else None


def reads_head(settings: Mapping[str, str]) -> bool:
    """Whether the draft model of these settings is an EAGLE-3 head."""
    return settings.get(METHOD) == _EAGLE3


def draft_settings(settings: Mapping[str, str], weights: Path) -> dict[str, str]:
    """Return the engine's settings for the draft model of `settings`, with this weights folder."""
    return {METHOD: settings.get(METHOD, _DRAFT_MODEL), MODEL: str(weights)}
