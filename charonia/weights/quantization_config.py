"""Reads a checkpoint's quantisation settings: `quantization_config` in config.json, or the files of older formats.

The configuration says how a module is quantised if it is quantised. Its tensors show whether it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from charonia.errors import ModelError, UnsupportedError
from charonia.families import QuantizationConfig, text_part
from charonia.gguf.folder_names import model_file
from charonia.json_files import read_json
from charonia.weights import quantization_methods as methods
from charonia.weights.quantization_settings import FORMATS, REMEDY, Settings

# Files of folders without quantization_config in config.json, with the default quant_method of each file.
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def read_quantization(folder: Path, config: Mapping[str, Any]) -> QuantizationConfig | None:
    """Return None for a model whose weights are not quantised. config: config.json of the folder.

    Raises UnsupportedError for an unsupported method and ModelError for missing or wrong values.
    """
    found = _find(folder, config)
    if found is None:
        return None
    file, key, settings, method = found
    place = f"{file}: {key}" if key else file
    readers: dict[str, Callable[[Settings], QuantizationConfig | None]] = {
        "compressed-tensors": methods.compressed_tensors,
        "awq": methods.awq,
        "gptq": methods.gptq,
        "fp8": methods.fp8,
        "mxfp4": methods.mxfp4,
        "modelopt": methods.modelopt,
    }
    if model_file(folder):
        readers["gguf"] = lambda _: QuantizationConfig("gguf", lambda names: None)
    if method not in readers:
        raise UnsupportedError(
            f"{place} has method {method!r}, which is not supported; supported: {', '.join(FORMATS)}: {REMEDY}"
        )
    made = readers[method](Settings(place, settings))
    return replace(made, file=file) if made else None


def cache_type(folder: Path, config: Mapping[str, Any]) -> str:
    """Return "fp8" or "other" for a model that was made for such a quantised KV cache, otherwise ""."""
    found = _find(folder, config)
    if found is None:
        return ""
    file, _, settings, method = found
    modelopt = method == "modelopt"
    scheme = methods.modelopt_cache(Settings(file, settings)) if modelopt else settings.get(methods.CACHE_SCHEME)
    if scheme is None:
        return ""
    if isinstance(scheme, dict):
        return "fp8" if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else "other"
    # AutoFP8 writes "static".
    return "fp8" if method == "fp8" or (modelopt and str(scheme).upper() == "FP8") else "other"


def _find(folder: Path, config: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any], str] | None:
    """Return the file, the key in it, the settings and the method."""
    for part in (config, text_part(config)):
        for key in ("quantization_config", "compression_config"):
            value = part.get(key)
            if value is None or value == {}:
                continue
            if not isinstance(value, dict):
                raise ModelError(f"config.json: {key} is {value!r}; it must be an object")
            return "config.json", key, value, str(value.get("quant_method") or _unnamed_method(value))
    for name, default in OLD_FILES.items():
        if (folder / name).is_file():
            value = read_json(folder / name)
            return name, "", value, str(value.get("quant_method") or default)
    return None


def _unnamed_method(value: Mapping[str, Any]) -> str:
    """Return the method of a configuration without quant_method, as the first versions of these methods wrote it."""
    producer = value.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else None
    if "modelopt" in (name, value.get("quant_library")):
        return "modelopt"  # it has config_groups too
    if "config_groups" in value:
        return "compressed-tensors"
    return "bitsandbytes" if value.get("load_in_4bit") or value.get("load_in_8bit") else "unknown"
