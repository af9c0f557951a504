# Generated from definitions/layer_attributes.toml by `make generate`; do not edit.
"""The properties of a layer: the keys of an entry of `layers` in manifest.json, in its order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerAttributes:
    """definitions/layer_attributes.toml describes the attributes."""

    window: int = 0
    rotation: str = "global"
    head_size: int = 0
    kv_heads: int = 0
    values: str = "projected"
    kv_source: int = 0
    inter_size: int = 0
    ffn: str = "dense"
    mixer: str = "attention"
