"""Finds LoRA adapters: folders of PEFT, or hub ids."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from charonia.errors import InvalidRequestError, ModelError
from charonia.weights import hub
from charonia.weights.workspace import existing


def locate_adapter(adapter: str | os.PathLike[str]) -> Path:
    """Return the absolute path of an adapter's folder; downloads a hub id. Raises ModelError."""
    path = existing(adapter)
    if path is None:
        return hub.download_adapter(str(adapter))
    _check_utf8(str(path.absolute()))
    if not path.is_dir():
        raise ModelError(f"{path} is a file; expected a folder of PEFT with adapter_config.json, or a hub id")
    return path.absolute()


def split_adapter(text: str) -> tuple[str, str]:
    """Split NAME=ADAPTER. Raises InvalidRequestError."""
    _check_utf8(text)
    name, equals, adapter = (part.strip() for part in text.partition("="))
    if not name or not equals or not adapter:
        raise InvalidRequestError(f"{text!r} is not NAME=ADAPTER: ADAPTER is a folder of PEFT or a hub id")
    return name, adapter


def adapter_names(setting: str) -> list[str]:
    """Return the names in the setting lora_adapters."""
    return list(dict.fromkeys(split_adapter(one)[0] for one in setting.split(",") if one.strip()))


def _check_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{text!r} is not UTF-8: rename the adapter or its folder") from error


def lora_setting(adapters: Iterable[str]) -> str:
    """Return the setting lora_adapters for entries NAME=ADAPTER. Raises ModelError and InvalidRequestError."""
    entries = []
    for text in adapters:
        name, adapter = split_adapter(text)
        folder = locate_adapter(adapter)
        if "," in f"{name}{folder}":
            raise InvalidRequestError(f"{text!r} has a comma, which separates adapters: choose a path without a comma")
        entries.append(f"{name}={folder}")
    return ",".join(entries)
