"""Child processes that do not outlive their parent, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> Callable[[], None]:
    """A preexec_fn. parent: os.getpid() of the caller, of whose threads the one counts that starts the child."""

    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return set_death_signal
