"""Charonia, an inference engine for large language models. `Engine` is the Python API."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from charonia.errors import (
    CharoniaError,
    DeadlineExceededError,
    EngineClosedError,
    InternalError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    OverloadedError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from charonia.api.engine import AsyncStream, Engine, Stream
    from charonia.api.guides import Guide
    from charonia.api.results import Chunk, Output, SamplingParams, Timings

__version__ = "0.1.0"

# Imported on first use, so that the command line and the Triton models start without loading the engine.
_LAZY = {
    "AsyncStream": "charonia.api.engine",
    "Chunk": "charonia.api.results",
    "Engine": "charonia.api.engine",
    "Guide": "charonia.api.guides",
    "Output": "charonia.api.results",
    "SamplingParams": "charonia.api.results",
    "Stream": "charonia.api.engine",
    "Timings": "charonia.api.results",
}

__all__ = [
    "AsyncStream",
    "CharoniaError",
    "Chunk",
    "DeadlineExceededError",
    "Engine",
    "EngineClosedError",
    "Guide",
    "InternalError",
    "InvalidRequestError",
    "ModelError",
    "NotFoundError",
    "Output",
    "OverloadedError",
    "SamplingParams",
    "Stream",
    "Timings",
    "UnsupportedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'charonia' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
