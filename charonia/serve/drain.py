"""Lets calls of the ensemble come to their end before Triton is asked to shut down.

When it is asked to shut down, Triton 24.10 stops all models at once, and the calls of the ensemble that
are in flight lose their text. A model that is unloaded takes no new request and is not ready, but its calls in flight
go on. So the ensemble is unloaded first.

Triton's own API for that is closed to everybody: its key would stand in a command line. The engine's backend unloads
the ensemble when this process tells it to, through a pipe. What takes longer than it may is ended in the same way: an
engine that is unloaded ends its requests with an error, which reaches the callers of the ensemble as long as that runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable

from charonia.serve import logs
from charonia.serve.fetch import Silence, fetch

ENSEMBLE, ENGINE = "ensemble", "engine"
# Explicitly, or no model can be unloaded. All of the repository are loaded at the start, as without these options.
OPTIONS = ("--model-control-mode=explicit", "--load-model=*")
_UNLOADED = re.compile(rf"successfully unloaded '({ENSEMBLE}|{ENGINE})'")
_BUSY = re.compile(rb"^charonia_num_requests_(?:running|waiting)\{[^}]*\} (?!0(?:\.0*)?$)", re.MULTILINE)
_KNOWN = b"charonia_num_requests_running{"
_POLL_S = 0.05
_LOOK_S = 1  # between two looks at the engine's metrics, and what an answer may take
_CUT_OFF_S = 5  # that the engine may take to end what it has
_LAST_WORDS_S = 1  # that its last errors may take from there to the callers
IDLE_S = 10  # after which calls of an ensemble whose engine has nothing to do are taken for lost
# The same where the gateway has died: Triton counts its calls for ever, as those that were cancelled. Other clients'
# calls get this time between two models of the ensemble, in which the engine has nothing to do.
ORPHANED_IDLE_S = 3


class ModelControl:
    """Has one Triton after the other unload models, by a pipe that the engine's backend reads."""

    def __init__(self) -> None:
        self._pipe, self._orders = os.pipe()
        self._unloaded = {model: threading.Event() for model in (ENSEMBLE, ENGINE)}

    @property
    def descriptor(self) -> int:
        """Of the pipe that the server has to inherit."""
        return self._pipe

    def environment(self) -> dict[str, str]:
        return {"CHARONIA_CONTROL_FD": str(self._pipe)}

    def see(self, line: str) -> None:
        """A line of the server's log."""
        if _UNLOADED.search(line) and (entry := logs.parse(line)) and (found := _UNLOADED.match(entry.message)):
            self._unloaded[found.group(1)].set()

    def restarted(self) -> None:
        """Another server takes the place of one whose log has been read to its end: it has unloaded nothing."""
        for unloaded in self._unloaded.values():
            unloaded.clear()

    def drain(self, metrics_url: str, limit_s: float, hurry: Callable[[], bool], idle_s: float = IDLE_S) -> str | None:
        """Unloads the ensemble of the Triton with these metrics, and returns None once its calls have ended, or when
        hurry() says so. What runs after limit_s is ended by the engine with an error.

        Triton may still count calls then, and waits for them when it is told to end. Nobody else needs to: all has been
        said to their clients, or these are gone. That is returned, in words where it says something of the clients.
        Calls that were cancelled by gRPC are counted for ever, too. So they are not waited for when the engine has had
        nothing to do for idle_s.
        """
        self._unload(ENSEMBLE)
        now = time.monotonic()
        deadline, idle_since, next_look = now + limit_s, now, now + _LOOK_S
        while not self._unloaded[ENSEMBLE].wait(_POLL_S):
            now = time.monotonic()
            if hurry():
                return None
            if now > deadline:
                return self._cut_off(hurry, "", _CUT_OFF_S)
            if now < next_look:
                continue
            if not _is_idle(metrics_url):
                idle_since = now
            elif now - idle_since > idle_s:
                return self._cut_off(
                    hurry,
                    "Triton still counts calls of the ensemble, and the engine has had nothing to do for "
                    f"{idle_s:g} s: their clients cancelled them by gRPC or are gone (docs/contracts.md). They are not "
                    "waited for",
                    _LAST_WORDS_S,
                )
            next_look = time.monotonic() + _LOOK_S
        return None

    def _cut_off(self, hurry: Callable[[], bool], why: str, limit_s: float) -> str | None:
        """Has the engine end, and the requests that it has. Returns None when no call is left after that, or hurry()
        says so, else `why`. A call that was cancelled by gRPC keeps the engine's model loaded: then after limit_s."""
        self._unload(ENGINE)
        deadline = time.monotonic() + limit_s
        while not self._unloaded[ENSEMBLE].wait(_POLL_S) and not hurry():
            if self._unloaded[ENGINE].is_set():
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                return why
        return None

    def _unload(self, model: str) -> None:
        with contextlib.suppress(OSError):  # the server has ended
            os.write(self._orders, f"{model}\n".encode())

    def close(self) -> None:
        for descriptor in (self._pipe, self._orders):
            os.close(descriptor)


def _is_idle(metrics_url: str) -> bool:
    """Whether the engine says that it has no request; false where it says nothing."""
    try:
        return says_idle(fetch(metrics_url, _LOOK_S) or b"")
    except Silence:
        return False


def says_idle(metrics: bytes) -> bool:
    """Whether these metrics have the engine's, and it has no request."""
    return _KNOWN in metrics and _BUSY.search(metrics) is None
