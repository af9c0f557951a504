"""Lets calls of the ensemble come to their end before Triton is asked to shut down.

When it is asked to shut down, Triton 24.10 stops all models at once, and the calls of the ensemble that
are in flight lose their text. A model that is unloaded takes no new request and is not ready, but its calls in flight
go on. So the ensemble is unloaded first.

Triton's own API for that is closed to everybody: its key would stand in a command line. The engine's backend unloads
the ensemble when this process tells it to, through a pipe.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable

from charonia.serve import logs

ENSEMBLE = "ensemble"
# Explicitly, or no model can be unloaded. All of the repository are loaded at the start, as without these options.
OPTIONS = ("--model-control-mode=explicit", "--load-model=*")
_UNLOADED = f"successfully unloaded '{ENSEMBLE}'"
_BUSY = re.compile(rb"^charonia_num_requests_(?:running|waiting)\{[^}]*\} (?!0(?:\.0*)?$)", re.MULTILINE)
_KNOWN = b"charonia_num_requests_running{"
_POLL_S = 0.05
_LOOK_S = 1  # between two looks at the engine's metrics, and what an answer may take
IDLE_S = 10  # after which calls of an ensemble whose engine has nothing to do are taken for lost
# The same where the gateway has died: Triton counts its calls for ever, as those that were cancelled. Other clients'
# calls get this time between two models of the ensemble, in which the engine has nothing to do.
ORPHANED_IDLE_S = 3


class ModelControl:
    """Has one Triton after the other unload the ensemble, by a pipe that the engine's backend reads."""

    def __init__(self) -> None:
        self._pipe, self._orders = os.pipe()
        self._unloaded = threading.Event()

    @property
    def descriptor(self) -> int:
        """Of the pipe that the server has to inherit."""
        return self._pipe

    def environment(self) -> dict[str, str]:
        return {"CHARONIA_CONTROL_FD": str(self._pipe)}

    def see(self, line: str) -> None:
        """A line of the server's log."""
        if _UNLOADED in line and (entry := logs.parse(line)) and entry.message.startswith(_UNLOADED):
            self._unloaded.set()

    def restarted(self) -> None:
        """Another server takes the place of one whose log has been read to its end: it has unloaded nothing."""
        self._unloaded.clear()

    def drain(self, metrics_url: str, limit_s: float, hurry: Callable[[], bool], idle_s: float = IDLE_S) -> str:
        """Unloads the ensemble of the Triton with these metrics, and returns once its calls have ended, or when hurry()
        says so. Returns why calls are left, for people; empty where none is, or where there is no need to say.

        Triton counts a call of the ensemble that was cancelled by gRPC as in flight for ever. So it is not waited for
        when the engine has had nothing to do for idle_s.
        """
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._orders, f"{ENSEMBLE}\n".encode())
        now = time.monotonic()
        deadline, idle_since, next_look = now + limit_s, now, now + _LOOK_S
        while not self._unloaded.wait(_POLL_S):
            now = time.monotonic()
            if hurry() or now > deadline:
                return ""
            if now < next_look:
                continue
            if not _is_idle(metrics_url):
                idle_since = now
            elif now - idle_since > idle_s:
                return (
                    f"Triton still counts calls of the ensemble, and the engine has had nothing to do for {idle_s:g} "
                    "s: their clients cancelled them by gRPC or are gone (docs/contracts.md). They are not waited for"
                )
            next_look = time.monotonic() + _LOOK_S
        return ""

    def close(self) -> None:
        for descriptor in (self._pipe, self._orders):
            os.close(descriptor)


def _is_idle(metrics_url: str) -> bool:
    """Whether the engine says that it has no request; false where it says nothing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(metrics_url, timeout=_LOOK_S) as answer:
            text: bytes = answer.read()
    except (http.client.HTTPException, OSError):
        return False
    return _KNOWN in text and _BUSY.search(text) is None
