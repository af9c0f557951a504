"""Computes a hash of everything on which the responses of a server depend."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from context_length import setting

# Settings of the engine that can change responses. config.ini has the properties of the model.
SETTINGS = (
    "tensor_para_size",
    "session_len",
    "cache_block_seq_len",
    "quant_policy",
    "rope_scaling_factor",
    "use_logn_attn",
    "generation_config",
    "device",
    "reproducible",
)
# charonia serve sets this variable to a hash of the engine's library, which changes with each version and build.
ENGINE_BUILD = "CHARONIA_ENGINE_BUILD"
_CPU_FEATURES = re.compile(r"\b(?:avx|fma|amx|f16c|asimd|sve)\w*")


def fingerprint(weights: Path, engine_config: Path, environment: Mapping[str, str], tokenizer: Path) -> str:
    """16 hex digits that change with the weights, their types, the tokenizer, the chat template, SETTINGS, the type of
    the device and the engine's build. Arguments as of context_length(); `tokenizer` is a folder."""
    digest = hashlib.sha256()
    for name, value in _parts(weights, engine_config, environment, tokenizer):
        digest.update(f"{name} {len(value)}\n".encode() + value)
    return digest.hexdigest()[:16]


def _parts(
    weights: Path, engine_config: Path, environment: Mapping[str, str], tokenizer: Path
) -> Iterator[tuple[str, bytes]]:
    manifest = _read(weights / "manifest.json")
    yield "weights", str(json.loads(manifest).get("weights", "") if manifest else "").encode()
    yield "config.ini", _read(weights / "config.ini")
    for file in sorted(tokenizer.glob("*.json")) + sorted(tokenizer.glob("*.jinja")):
        yield file.name, _read(file)
    for key in SETTINGS:
        yield key, setting(key, weights, engine_config, environment).strip().encode()
    gpus = sorted(_read(file) for file in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    yield "gpus", b"\n".join(line for text in gpus for line in text.splitlines() if line.startswith(b"Model:"))
    features = set(_CPU_FEATURES.findall(_read(Path("/proc/cpuinfo")).decode(errors="replace")))
    yield "cpu", " ".join(sorted(features)).encode()
    for name in ("CHARONIA_ISA", ENGINE_BUILD):
        yield name, environment.get(name, "").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # a missing file of the model: the engine reports it
        return b""
