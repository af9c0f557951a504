"""Settings of the engine as callers give them: the keys of config.ini."""

from __future__ import annotations

from collections.abc import Mapping

Setting = str | int | float | bool
# For engines whose responses are measured: a request has the sampling parameters that it names, whatever the model's
# generation_config.json recommends.
MEASURED: dict[str, Setting] = {"generation_config": "none"}


def spell_settings(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Values of config.ini's keys as config.ini spells them."""
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
