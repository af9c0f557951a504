"""`charonia serve`: starts Triton with its models and the gateway, watches them, and ends them in order."""

from __future__ import annotations

from charonia.serve.errors import ServeError
from charonia.serve.launcher import serve

__all__ = ["ServeError", "serve"]
