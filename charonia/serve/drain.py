"""Makes Triton load and unload models, and lets requests end before Triton is stopped.

When Triton 24.10 is stopped, it stops all models together, and running calls of the ensemble lose their text. An
unloaded model takes no new request, but its running calls go on. So the ensemble is unloaded first, and Triton is
stopped when the engine has no requests left. (Answers by subscription are not calls of the ensemble, so the engine's
metrics count.)

Triton's own API for this is closed: its key would be visible in a command line. Instead the engine's backend reads
orders from a pipe.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from charonia.errors import ServeError
from charonia.serve import logs
from charonia.serve.fetch import Silence, fetch

ENSEMBLE, ENGINE = "ensemble", "engine"
# Only models of an explicitly controlled repository can be unloaded. All of them are loaded at the start.
OPTIONS = ("--model-control-mode=explicit", "--load-model=*")
_CHANGED = re.compile(r"successfully (unloaded|loaded) '([^']+)'")
_FAILED = re.compile(r"loading '([^']+)': (.*)", re.DOTALL)  # printed by the backend
_QUEUES = re.compile(rb'^charonia_num_requests_(?:running|waiting)\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE)
_ENDED = re.compile(
    rb'^charonia_request(?:_success|s_rejected)_total\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)$', re.MULTILINE
)
_POLL_S = 0.05
_METRICS_S = 1  # time for Triton to answer with its metrics
CUT_OFF_S = 5  # time for the engine to end its requests with an error
LAST_TEXT_S = 5  # time for these errors to reach the clients
_LOOK_S = 0.2  # between two looks at the metrics
# Triton counts calls that were cancelled by gRPC, or whose gateway died, as running for ever. If the engine has been
# idle for so long, running calls are taken for such calls.
_IDLE_S = 10


def part_of(part: str, label: str) -> str:
    """Triton's name of a part of the model with that label."""
    return f"{part}.{label}" if label else part


class ModelControl:
    """Makes one Triton after the other load and unload models, by a pipe that the engine's backend reads."""

    def __init__(self) -> None:
        self._pipe, self._orders = os.pipe()
        # By Triton's name of the model. Set if the last message in the log said so.
        self._unloaded: dict[str, threading.Event] = defaultdict(threading.Event)
        self._loaded: dict[str, threading.Event] = defaultdict(threading.Event)
        self._failed: dict[str, str] = {}
        self._may_read: set[str] = set()  # ordered to load, and neither failed nor unloaded since

    @property
    def descriptor(self) -> int:
        """The end of the pipe that the server inherits."""
        return self._pipe

    def environment(self) -> dict[str, str]:
        return {"CHARONIA_CONTROL_FD": str(self._pipe)}

    def see(self, line: str) -> None:
        """Reads a line of the server's log."""
        if " loaded '" not in line and "unloaded '" not in line and "loading '" not in line:
            return
        entry = logs.parse(line)
        if entry and (found := _CHANGED.match(entry.message)):
            change, name = found.groups()
            if change == "unloaded":
                self._may_read.discard(name)
            (self._loaded if change == "loaded" else self._unloaded)[name].set()
        elif entry and (failed := _FAILED.match(entry.message)):
            self._may_read.discard(failed.group(1))
            self._failed[failed.group(1)] = failed.group(2)

    def restarted(self) -> None:
        """Forgets the server before, whose log was read to its end, and the orders that it did not read."""
        for event in (*self._unloaded.values(), *self._loaded.values()):
            event.clear()
        self._may_read.clear()
        os.set_blocking(self._pipe, False)
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 1 << 16)

    def load(self, model: str, limit_s: float, alive: Callable[[], bool]) -> None:
        """Returns when Triton has loaded this part. Raises ServeError if that fails, if alive() becomes false,
        or after limit_s."""
        self._loaded[model].clear()
        self._failed.pop(model, None)
        self._may_read.add(model)
        self._order(f"+{model}")
        deadline = time.monotonic() + limit_s
        while not self._loaded[model].wait(_POLL_S):
            if why := self._failed.get(model):
                raise ServeError(f"{model} cannot be loaded: {why}")
            if not alive():
                raise ServeError(f"Triton ended, or was to end, while it loaded {model}", 503)
            if time.monotonic() > deadline:
                raise ServeError(f"{model} is not loaded after {limit_s:g} s: see Triton's log", 503)

    def may_read(self, model: str) -> bool:
        """Whether Triton may still read the files of a part that load() was called for."""
        return model in self._may_read

    def wait_unread(self, models: Iterable[str], limit_s: float, alive: Callable[[], bool]) -> None:
        """Returns when Triton reads no files of these parts, after limit_s, or when alive() becomes false."""
        deadline = time.monotonic() + limit_s
        while any(map(self.may_read, models)) and alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def unload(self, model: str) -> None:
        """Makes Triton unload this part, which takes no new request and is gone when it has no requests left."""
        self._order(model)

    def wait_unloaded(self, models: Iterable[str], limit_s: float, alive: Callable[[], bool]) -> bool:
        """Whether all these models are gone within limit_s."""
        deadline = time.monotonic() + limit_s
        for model in models:
            while not self._unloaded[model].wait(_POLL_S):
                if time.monotonic() > deadline or not alive():
                    return False
        return True

    def drain(
        self, metrics_url: str, limit_s: float, hurry: Callable[[], bool], labels: Collection[str] = ("",)
    ) -> None:
        """Unloads the ensembles of the models with these labels. Returns when their engines have no requests, or when
        hurry() is true. After limit_s the engines end their requests with an error. metrics_url: Triton's metrics."""
        ensembles, engines = ([part_of(part, label) for label in labels] for part in (ENSEMBLE, ENGINE))
        for ensemble in ensembles:
            self._order(ensemble)
        idle_since = time.monotonic()
        deadline, idle_looks = idle_since + limit_s, 0
        while not hurry():
            idle, now = _are_idle(metrics_url, engines), time.monotonic()
            idle_looks = idle_looks + 1 if idle else 0
            if not idle:
                idle_since = now
            # Two looks: a call may just be on its way to the engine.
            if (idle_looks >= 2 and self._are_unloaded(ensembles)) or now - idle_since >= _IDLE_S:
                return
            if now >= deadline:
                for engine in engines:
                    self._order(engine)
                self.wait_unloaded(engines, CUT_OFF_S, lambda: not hurry())
                self.wait_unloaded(ensembles, LAST_TEXT_S, lambda: not hurry())
                return
            time.sleep(_LOOK_S)

    def _are_unloaded(self, models: Iterable[str]) -> bool:
        return all(self._unloaded[model].is_set() for model in models)

    def _order(self, order: str) -> None:
        """NAME unloads that model, +NAME loads it."""
        name = order.removeprefix("+")
        (self._loaded if order == name else self._unloaded)[name].clear()
        with contextlib.suppress(OSError):  # the server has ended
            os.write(self._orders, f"{order}\n".encode())

    def close(self) -> None:
        for descriptor in (self._pipe, self._orders):
            os.close(descriptor)


def _are_idle(metrics_url: str, engines: Collection[str]) -> bool:
    """Whether the metrics say of each of these engines that it has no requests."""
    found = requests_of(metrics_url) or {}
    return all(engine in found and found[engine][0] == 0 for engine in engines)


def requests_of(metrics_url: str) -> dict[str, tuple[float, float]] | None:
    """The number of running and waiting requests of each engine, and of those that have ended. None if Triton does not
    answer."""
    try:
        metrics = fetch(metrics_url, _METRICS_S) or b""
    except Silence:
        return None
    ended: dict[str, float] = defaultdict(float)
    for name, value in _ENDED.findall(metrics):
        ended[name.decode()] += float(value)
    now: dict[str, float] = defaultdict(float)
    for name, value in _QUEUES.findall(metrics):
        now[name.decode()] += float(value)
    return {engine: (count, ended[engine]) for engine, count in now.items()}
