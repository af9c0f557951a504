"""Warnings about a KV cache that is not as the model was made for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from charonia import _engine
from charonia.json_files import read_json

_KEY = "quant_policy"


def cache_warnings(weights: Path, settings: Mapping[str, str]) -> list[str]:
    """Return the warnings for a weights folder. settings: keys of config.ini, which override it. The engine itself
    warns of scale 1 (engine/src/runtime/settings.cpp)."""
    found = read_json(weights / "manifest.json").get("kv_cache")
    if not found:
        return []
    stored = _engine.read_config_ini(weights / "config.ini")
    policy = settings.get(_KEY, stored.get(_KEY, "0"))
    if policy == "0" and _KEY not in settings and "made_for" in found:
        return [
            f"{stored['model_name']} was made for a quantised KV cache (kv_cache_scheme or kv_cache_quant_algo), but "
            "its KV cache has 16 bits here: quant_policy = 16 stores it in FP8, with the model's scales if they are "
            "for FP8; quant_policy = 8 in integers, with scales that the engine computes"
        ]
    if policy == "16" and "unusable" in found:
        return [f"quant_policy = 16 cannot use the model's scales of keys and values: {found['unusable']}"]
    return []
