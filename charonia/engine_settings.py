"""Engine settings from callers: the keys of config.ini."""

from __future__ import annotations

from collections.abc import Mapping

Setting = str | int | float | bool
# For measured engines: requests use only the sampling parameters that they contain, and ignore the model's
# generation_config.json.
MEASURED: dict[str, Setting] = {"generation_config": "none"}


def spell_settings(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the values of config.ini's keys in the format of config.ini."""
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
