"""`charonia serve`: starts Triton with its models and the gateway, watches them, and ends them in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from charonia.serve.errors import ServeError

if TYPE_CHECKING:
    from charonia.serve.launcher import serve

__all__ = ["ServeError", "serve"]


def __getattr__(name: str) -> Any:
    """Every command of `charonia` imports this package for its options, and most of them serve nothing."""
    if name != "serve":
        raise AttributeError(f"module 'charonia.serve' has no attribute {name!r}")
    from charonia.serve.launcher import serve

    return serve
