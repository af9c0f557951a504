"""Reads and checks the values of a quantisation configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from charonia.errors import ModelError, UnsupportedError

FORMATS = ("compressed-tensors", "awq", "gptq", "fp8", "mxfp4", "modelopt", "gguf")
DENSE = "hf"  # the name that --model-format has for weights that are not quantised
REMEDY = (
    "use the model's 16-bit original, or a copy that is quantised as compressed-tensors (written by llm-compressor), "
    "AWQ, GPTQ or FP8"
)


class Settings:
    """The values of an object in a JSON file. Error messages name its place in the file."""

    def __init__(self, place: str, values: Mapping[str, Any]) -> None:
        self.place = place
        self.values = values

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that exists and is not null."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def integer(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(keys[0], value, "an integer")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of texts")
        return tuple(value)

    def inner(self, key: str) -> Settings | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object")
        return Settings(f"{self.place}.{key}", value)

    def group_size(self, *keys: str, default: int | None = None) -> int:
        """Return the number of columns that share a scale; 0 means all columns, which files write as -1."""
        size = self.integer(*keys, default=default)
        if size != -1 and size <= 0:
            raise self.wrong(keys[0], size, "a positive number, or -1 for all columns")
        return max(0, size)

    def wrong(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.place}: {key} is {value!r}; it must be {expected}")

    def unsupported(self, key: str, value: Any, supported: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.place}: {key} {value!r} is not supported; supported: {supported}. {REMEDY[0].upper()}{REMEDY[1:]}"
        )
