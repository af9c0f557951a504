"""What keeps the stack from starting or going on."""

from __future__ import annotations

from charonia.errors import CharoniaError


class ServeError(CharoniaError):
    """The text says what was wrong and what would be right; it may have the last lines of a log below."""
