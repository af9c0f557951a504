"""Has Triton load and unload models. Lets what runs come to its end before it is asked to shut down.

When it is asked to shut down, Triton 24.10 stops all models at once, and the calls of the ensemble that
are in flight lose their text. A model that is unloaded takes no new request and is not ready, but its calls in flight
go on. So the ensemble is unloaded first. Answers by subscription are no calls of it, and need Triton to take calls: to
cancel them, and for the names of tokens. So the engine has to be idle before Triton is asked.

Triton's own API for that is closed to everybody: its key would stand in a command line. The engine's backend loads and
unloads models when this process tells it to, through a pipe. What takes longer than it may is ended in the same way: an
engine that is unloaded ends its requests with an error, which reaches the callers of the ensemble as long as that runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from charonia.serve import logs
from charonia.serve.errors import ServeError
from charonia.serve.fetch import Silence, fetch

ENSEMBLE, ENGINE = "ensemble", "engine"
# Explicitly, or no model can be unloaded. All of the repository are loaded at the start, as without these options.
OPTIONS = ("--model-control-mode=explicit", "--load-model=*")
_CHANGED = re.compile(r"successfully (unloaded|loaded) '([^']+)'")
_FAILED = re.compile(r"loading '([^']+)': (.*)", re.DOTALL)  # the backend's words
_QUEUES = re.compile(rb'^charonia_num_requests_(?:running|waiting)\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE)
_POLL_S = 0.05
_LOOK_S = 1  # between two looks at the engine's metrics, and what an answer may take
_CUT_OFF_S = 5  # that the engine may take to end what it has
_LAST_WORDS_S = 1  # that its last errors may take from there to the callers
_SECOND_LOOK_S = 0.2  # after which an idle engine is asked again: what it had just been given is counted then
_SILENT_S = 5  # after which metrics that say nothing of the engine are not asked any more
IDLE_S = 10  # after which calls of an ensemble whose engine has nothing to do are taken for lost
# The same where the gateway has died: Triton counts its calls for ever, as those that were cancelled. Other clients'
# calls get this time between two models of the ensemble, in which the engine has nothing to do.
ORPHANED_IDLE_S = 3


def part_of(part: str, label: str) -> str:
    """Triton's name of a part of the model with that label."""
    return f"{part}.{label}" if label else part


class ModelControl:
    """Has one Triton after the other load and unload models, by a pipe that the engine's backend reads."""

    def __init__(self) -> None:
        self._pipe, self._orders = os.pipe()
        # By Triton's name of the model: set while the log has last said so.
        self._unloaded: dict[str, threading.Event] = defaultdict(threading.Event)
        self._loaded: dict[str, threading.Event] = defaultdict(threading.Event)
        self._failed: dict[str, str] = {}

    @property
    def descriptor(self) -> int:
        """Of the pipe that the server has to inherit."""
        return self._pipe

    def environment(self) -> dict[str, str]:
        return {"CHARONIA_CONTROL_FD": str(self._pipe)}

    def see(self, line: str) -> None:
        """A line of the server's log."""
        if " loaded '" not in line and "unloaded '" not in line and "loading '" not in line:
            return
        entry = logs.parse(line)
        if entry and (found := _CHANGED.match(entry.message)):
            (self._loaded if found.group(1) == "loaded" else self._unloaded)[found.group(2)].set()
        elif entry and (failed := _FAILED.match(entry.message)):
            self._failed[failed.group(1)] = failed.group(2)

    def restarted(self) -> None:
        """Another server takes the place of one whose log has been read to its end: it has unloaded nothing."""
        for event in (*self._unloaded.values(), *self._loaded.values()):
            event.clear()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):  # orders that it has not read were for that one
            os.read(self._pipe, 1 << 16)

    def load(self, model: str, limit_s: float, alive: Callable[[], bool]) -> None:
        """Returns when Triton has loaded one of its models. Raises ServeError where it cannot, is not alive() any more
        or takes longer than limit_s."""
        self._loaded[model].clear()
        self._failed.pop(model, None)
        self._order(f"+{model}")
        deadline = time.monotonic() + limit_s
        while not self._loaded[model].wait(_POLL_S):
            if why := self._failed.get(model):
                raise ServeError(f"{model} cannot be loaded: {why}")
            if not alive():
                raise ServeError(f"Triton ended, or was to end, while it loaded {model}")
            if time.monotonic() > deadline:
                raise ServeError(f"{model} is not loaded after {limit_s:g} s: see Triton's log")

    def unload(self, model: str) -> None:
        """Has Triton unload one of its models: it takes no new request, and is gone when it has none left."""
        self._order(model)

    def wait_unloaded(self, models: Iterable[str], limit_s: float, alive: Callable[[], bool]) -> bool:
        """Whether all of these that were loaded are gone within limit_s."""
        deadline = time.monotonic() + limit_s
        for model in models:
            while not self._unloaded[model].wait(_POLL_S):
                if time.monotonic() > deadline or not alive():
                    return False
        return True

    def drain(
        self,
        metrics_url: str,
        limit_s: float,
        hurry: Callable[[], bool],
        idle_s: float = IDLE_S,
        labels: Collection[str] = ("",),
    ) -> str | None:
        """Unloads the ensembles of the Triton with these metrics, and returns None once their calls have ended and
        their engines have nothing to do, or when hurry() says so. What runs after limit_s is ended by the engine with
        an error. labels: of the models.

        Triton may still count calls then, and waits for them when it is asked to shut down. Nobody else needs to: all
        has been said to their clients, or these are gone. That is returned, in words where it says something of the
        clients. Calls that were cancelled by gRPC are counted for ever, too. So they are not waited for when the engine
        has had nothing to do for idle_s.
        """
        ensembles, engines = ([part_of(part, label) for label in labels] for part in (ENSEMBLE, ENGINE))
        for ensemble in ensembles:
            self._order(ensemble)
        now = time.monotonic()
        deadline, idle_since, next_look = now + limit_s, now, now + _LOOK_S
        while not self._are_unloaded(ensembles):
            now = time.monotonic()
            if hurry():
                return None
            if now > deadline:
                return self._cut_off(ensembles, engines, hurry, "", _CUT_OFF_S)
            if now < next_look:
                continue
            if not _are_idle(metrics_url, engines):
                idle_since = now
            elif now - idle_since > idle_s:
                return self._cut_off(
                    ensembles,
                    engines,
                    hurry,
                    "Triton still counts calls of the ensemble, and the engine has had nothing to do for "
                    f"{idle_s:g} s: their clients cancelled them by gRPC or are gone (docs/contracts.md). They are not "
                    "waited for",
                    _LAST_WORDS_S,
                )
            next_look = time.monotonic() + _LOOK_S
        self._wait_idle(metrics_url, engines, deadline, hurry)
        return None

    def _wait_idle(
        self, metrics_url: str, engines: Collection[str], deadline: float, hurry: Callable[[], bool]
    ) -> None:
        """Returns when these engines have no request any more, as their metrics say twice. Has them end what they have
        after the deadline, which is time.monotonic()'s. Where metrics say nothing of them for 5 s, they are not waited
        for."""
        heard, was_idle = time.monotonic(), False
        while not hurry():
            idle = _are_idle(metrics_url, engines)
            if idle and was_idle:
                return
            was_idle = bool(idle)
            now = time.monotonic()
            if idle is not None:
                heard = now
            if now - heard >= _SILENT_S:
                return
            if now >= deadline and not idle:
                for engine in engines:
                    self._order(engine)
                self.wait_unloaded(engines, _CUT_OFF_S, lambda: not hurry())
                return
            time.sleep(_SECOND_LOOK_S)

    def _are_unloaded(self, models: Iterable[str]) -> bool:
        """Waits a little where they are not."""
        return all(self._unloaded[model].wait(_POLL_S) for model in models)

    def _cut_off(
        self,
        ensembles: Collection[str],
        engines: Collection[str],
        hurry: Callable[[], bool],
        why: str,
        limit_s: float,
    ) -> str | None:
        """Has the engines end, and the requests that they have. Returns None when no call is left after that, or
        hurry() says so, else `why`. A call that was cancelled by gRPC keeps the engine's model loaded: then after
        limit_s."""
        for engine in engines:
            self._order(engine)
        deadline = time.monotonic() + limit_s
        while not self._are_unloaded(ensembles) and not hurry():
            if all(self._unloaded[engine].is_set() for engine in engines):
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            if time.monotonic() > deadline:
                return why
        return None

    def _order(self, order: str) -> None:
        """NAME: that model is to be unloaded, +NAME: to be loaded."""
        name = order.removeprefix("+")
        if order == name:
            self._loaded[name].clear()
        else:
            self._unloaded[name].clear()
        with contextlib.suppress(OSError):  # the server has ended
            os.write(self._orders, f"{order}\n".encode())

    def close(self) -> None:
        for descriptor in (self._pipe, self._orders):
            os.close(descriptor)


def _are_idle(metrics_url: str, engines: Collection[str]) -> bool | None:
    """Whether these engines say that they have no request; None where nothing is heard of one."""
    try:
        metrics = fetch(metrics_url, _LOOK_S) or b""
    except Silence:
        return None
    states = [says_idle(metrics, engine) for engine in engines]
    return None if None in states else all(states)


def says_idle(metrics: bytes, engine: str = ENGINE) -> bool | None:
    """Whether that engine has no request; None where these metrics have nothing of it."""
    queues = [float(value) for name, value in _QUEUES.findall(metrics) if name.decode() == engine]
    return not any(queues) if queues else None
