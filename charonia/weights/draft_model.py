"""The draft model of speculative_method = draft_model (docs/speculation.md), in settings of callers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
