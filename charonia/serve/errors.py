"""What keeps the stack from starting or going on."""

from __future__ import annotations

import os

from charonia.errors import CharoniaError


class ServeError(CharoniaError):
    """The text says what was wrong and what would be right; it may have the last lines of a log below."""


class DeviceFailure(ServeError):
    """The engine's device has failed and Triton has ended; started again, the stack may go on."""

    exit_code = os.EX_TEMPFAIL  # Triton's too: kDeviceFailedExitCode in engine/triton/server_exit.h
