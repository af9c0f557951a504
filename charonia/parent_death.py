"""Ends child processes when their parent ends, in whatever way."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """Return a preexec_fn. parent: os.getpid() of the caller. The child also ends with the thread that starts it."""

    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)

    return set_death_signal
