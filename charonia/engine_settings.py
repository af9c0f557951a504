"""Engine settings from callers: the keys of config.ini."""

from __future__ import annotations

from collections.abc import Mapping

from charonia.errors import InvalidRequestError

Setting = str | int | float | bool
_ELSEWHERE = {  # names that callers try
    "lora": "lora_adapters = 'NAME=FOLDER', and lora = 'NAME' in generate()",
    "speculative_config": "speculative_method, speculative_model and speculative_tokens",
}
# For measured engines: requests use only the sampling parameters that they contain, and ignore the model's
# generation_config.json.
MEASURED: dict[str, Setting] = {"generation_config": "none"}


def spell_settings(settings: Mapping[str, Setting]) -> dict[str, str]:
    """Return the values of config.ini's keys in the format of config.ini. Raises InvalidRequestError for keys of other
    programs."""
    for key in settings.keys() & _ELSEWHERE.keys():
        raise InvalidRequestError(f"unknown setting {key!r}; here: {_ELSEWHERE[key]}")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
