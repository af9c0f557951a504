"""Errors of `charonia serve`."""

from __future__ import annotations

from charonia.errors import CharoniaError


class ServeError(CharoniaError):
    """The text names the fault and the remedy. It may have the last lines of a log below."""
