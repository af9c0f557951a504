"""The models that one Triton serves: their names, their repository, and which of them are loaded.

Triton has several models for each: `preprocessing`, `engine`, `ensemble` and so on. The first model has these names.
The names of further models end with their label: `ensemble.LABEL`.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from charonia.errors import ServeError
from charonia.serve import drain
from charonia.settings import ServeSettings, env_name
from charonia.weights.workspace import TRITON_MODELS, existing, model_task

State = Literal["loaded", "unloaded", "loading", "unloading"]

_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LABEL = 60
_COUNT = re.compile(r"(instance_group\s*\[\s*\{\s*count:\s*)\d+")
_STEP = re.compile(r'(\bmodel_name\s*:\s*")([^"]*)"')
_UNLOAD_S = 60  # time for the parts of a model to be gone once it has no calls
_LOOK_S = 0.2  # between two looks for a model without requests
_WATCH_S = 1.0
_SETTLE_S = 10.0  # time for the first request of a model that was loaded for it
_LOST_S = 5  # time for the ensemble after that; calls that Triton counts for ever keep it loaded


@dataclass(frozen=True)
class Served:
    """A served model. Clients request it by `name`; the first model may have several names, with commas between them.
    `settings`: its own inference parameters. `need_bytes`: the memory that it needs; `room_bytes`: the memory for all
    loaded models; both on one GPU, if they are known."""

    name: str
    label: str  # empty: the first model
    workspace: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    need_bytes: int = 0
    room_bytes: int = 0

    @property
    def names(self) -> list[str]:
        return names_of(self.name)

    @property
    def task(self) -> str:
        """generate, embed or score."""
        return model_task(self.workspace)

    def part(self, part: str) -> str:
        """The name of a part in Triton."""
        return drain.part_of(part, self.label)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.part(part) for part in TRITON_MODELS)


def first_request(one: Served) -> tuple[str, list[str]]:
    """A route for the model, and the lines of a JSON body that a new user can send."""
    model, question = json.dumps(one.names[0], ensure_ascii=False), "What is the capital of France?"
    if one.task == "embed":
        return "/v1/embeddings", [f'{{"model": {model}, "input": "{question}"}}']
    if one.task == "score":
        documents = '["Paris is the capital of France.", "Rome is the capital of Italy."]'
        return "/v1/rerank", [f'{{"model": {model}, "query": "{question}",', f'"documents": {documents}}}']
    messages = f'[{{"role": "user", "content": "{question}"}}]'
    return "/v1/chat/completions", [f'{{"model": {model}, "temperature": 0,', f'"messages": {messages}}}']


def asked_for(settings: ServeSettings) -> list[tuple[str | None, str | None]]:
    """Name and location of each model in the settings. The first may be the default model."""
    first = named(settings.model) if settings.model else (None, None)
    more = [named(entry.strip()) for entry in settings.more_models.split(",") if entry.strip()]
    return [(first[0] or settings.model_name, first[1]), *more]


def named(text: str) -> tuple[str | None, str | None]:
    """Splits NAME=MODEL. MODEL alone has no name. Raises ServeError for a NAME with spaces, and for several models."""
    if existing(text) is not None:
        return None, text
    name, separator, model = (part.strip() for part in text.partition("="))
    location = model if separator else name
    if len(name.split()) > 1 or (len(location.split()) > 1 and existing(location) is None):
        raise ServeError(
            f"{text!r} is no path, and has spaces, so it names several models or none: start charonia serve with an "
            f"argument for each model, or set {env_name('more_models')} to all but the first, with commas. A NAME in "
            "NAME=MODEL has no spaces"
        )
    if not separator:
        return None, text
    if not name or not model or "," in name:
        raise ServeError(f"{text!r} names no model: write MODEL or NAME=MODEL, where clients ask for NAME")
    return name, model


def added(text: str) -> tuple[str, str]:
    """Name and location in NAME=MODEL, with an absolute path; empty for another text. Raises ServeError."""
    name, location = named(text)
    if name is None or location is None:
        return "", ""
    found = existing(location)
    return name, location if found is None else str(found.absolute())


def names_of(text: str) -> list[str]:
    """The names in a list with commas; the first is the model's own."""
    return list(dict.fromkeys(filter(None, map(str.strip, text.split(","))))) or [text]


def with_labels(found: Sequence[tuple[str, Path]]) -> list[Served]:
    """The models with these names and workspaces. Raises ServeError for equal names, or for a name with a comma after
    the first one."""
    served: list[Served] = []
    for name, workspace in found:
        if served and "," in name:
            raise ServeError(
                f"the model of {workspace} is called {name!r}, and only the first of several models may have a comma "
                f"in its name: name it in another way, as in charonia serve {served[0].workspace} second={workspace}"
            )
        if any(name in one.names for one in served):
            raise ServeError(
                f"two models are called {name!r}: name them apart, as in charonia serve first={workspace} "
                f"second={workspace}"
            )
        base = label = _NO_LABEL.sub("_", name).strip("._-")[:_MAX_LABEL] or "model"
        number = 2
        while any(one.label == label for one in served):
            label, number = f"{base}-{number}", number + 1
        served.append(Served(name, label if served else "", workspace))
    return served


def make_repository(served: Sequence[Served], folder: Path, text_instances: int | None) -> Path:
    """Makes a model repository of all models, with links and changed configurations. text_instances: of each
    `preprocessing`; None: the number in the workspace."""
    shutil.rmtree(folder, ignore_errors=True)
    for one in served:
        add_to_repository(one, folder, text_instances)
    return folder


def add_to_repository(one: Served, folder: Path, text_instances: int | None) -> None:
    """Adds the parts of a model to a repository, as make_repository() does."""
    for part in TRITON_MODELS:
        source = one.workspace / "model_repository" / part
        model = folder / one.part(part)
        shutil.rmtree(model, ignore_errors=True)  # of a model that could not be loaded
        model.mkdir(parents=True)
        (model / "1").symlink_to((source / "1").resolve())
        file = source / "config.pbtxt"
        config = _renamed(file, file.read_text(encoding="utf-8"), part, one)
        if part == "preprocessing" and text_instances is not None:
            config, changes = _COUNT.subn(rf"\g<1>{text_instances}", config)
            if changes != 1:
                raise ServeError(f"{file} has no instance_group with a count to change")
        if part == "engine":
            config += "".join(
                f'parameters {{ key: "{key}" value: {{ string_value: {_quoted(value)} }} }}\n'
                for key, value in sorted(one.settings.items())
            )
        (model / "config.pbtxt").write_text(config, encoding="utf-8")


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _renamed(file: Path, config: str, part: str, one: Served) -> str:
    """The configuration with the names of this model."""
    if not one.label:
        return config
    config, changes = re.subn(rf'(?m)^(\s*name\s*:\s*"){part}"', rf'\g<1>{one.part(part)}"', config, count=1)
    if changes != 1:
        raise ServeError(f"{file} does not begin with name: {part!r}: run charonia convert again")
    return _STEP.sub(lambda step: f'{step[1]}{one.part(step[2])}"', config) if part == "ensemble" else config


class Models:
    """Which models are loaded. Loads and unloads them while Triton runs. Any thread may call.

    `alive`: whether Triton was ready and still runs. `limits`: the time for the calls of a model that is unloaded, and
    the time for loading, in seconds. `make`: makes a model that is added later, given its name, its location and the
    models before it. If loading fails, its context removes the model. `publish`: makes served() known to clients after
    each load, and raises ServeError if that fails; the next load repeats it. `on_demand`: only the first models that
    fit together are loaded, and ensure() loads the others. `idle_s`: a model without requests for so long is unloaded;
    0: never."""

    def __init__(
        self,
        control: drain.ModelControl,
        served: Sequence[Served],
        *,
        alive: Callable[[], bool],
        metrics_url: str,
        limits: tuple[float, float],
        make: Callable[[str, str, Sequence[Served]], AbstractContextManager[Served]] | None = None,
        publish: Callable[[], None] = lambda: None,
        on_demand: bool = False,
        idle_s: float = 0,
    ) -> None:
        self._control = control
        self._served = {one.names[0]: one for one in served}
        self._alive = alive
        self._metrics_url = metrics_url
        self._drain_s, self._load_s = limits
        self._make = make
        self._publish = publish
        self._on_demand = on_demand
        self._idle_s = idle_s
        self._wanted = set(_fitting(served) if on_demand else self._served)  # loaded by a Triton that is started again
        self._states: dict[str, State] = {
            name: "loaded" if name in self._wanted else "unloaded" for name in self._served
        }
        self._uses = Uses(metrics_url)
        self._busy = threading.Lock()
        self._ended = False

    def wanted(self) -> list[Served]:
        """The models that the operator has not unloaded."""
        return [one for name, one in list(self._served.items()) if name in self._wanted]

    def labels(self) -> list[str]:
        """The labels of the loaded models."""
        return [one.label for name, one in list(self._served.items()) if self._states[name] == "loaded"]

    def engines(self) -> list[str]:
        """The engines that Triton may have, among them those that are being unloaded."""
        return [one.part(drain.ENGINE) for name, one in list(self._served.items()) if self._states[name] != "unloaded"]

    def end(self) -> None:
        """Rejects further orders, and does not wait for a model that is being loaded."""
        self._ended = True

    def options(self) -> list[str]:
        """Triton's options for the models to load."""
        wanted = self.wanted()
        if len(wanted) == len(self._served):
            return list(drain.OPTIONS)
        return [drain.OPTIONS[0], *(f"--load-model={part}" for one in wanted for part in one.parts)]

    def restarted(self) -> None:
        """Called after Triton was started again."""
        for name in list(self._served):
            self._states[name] = "loaded" if name in self._wanted else "unloaded"

    def describe(self) -> list[dict[str, Any]]:
        """Name, state and ensemble of each model. The first is the default."""
        return [
            {"name": name, "state": self._states[name], "ensemble": one.part(drain.ENSEMBLE)}
            for name, one in list(self._served.items())
        ]

    def served(self) -> list[Served]:
        """All models, loaded or not. The first is the default."""
        return list(self._served.values())

    def find(self, name: str) -> Served | None:
        """The model with this name, which may be any name of the first model."""
        return next((one for one in self.served() if name in one.names), None)

    def load(self, name: str) -> str:
        """Loads a model. Returns a message for the user. Raises ServeError if it fails."""
        with self._ordered():
            one = self._known(name)
            loaded = self._states[one.names[0]] == "loaded"
            if not loaded and self._on_demand:
                self._exchange(one, time.monotonic())
            elif not loaded:
                self._load(one)
            self._publish()
            return f"{name} is loaded already" if loaded else f"{name} is loaded"

    def add(self, name: str, location: str) -> str:
        """Serves a further model, like load(). A Triton that is started again has it too. Raises CharoniaError if it
        fails; then the model is not served."""
        assert self._make is not None
        with self._ordered():
            if self.find(name):
                raise ServeError(
                    f"a model is called {name!r} already: choose another name, or charonia models load {name}"
                )
            with self._make(name, location, self.served()) as one:
                self._states[name], self._served[name] = "loading", one
                try:
                    self._load(one)
                except BaseException:
                    del self._served[name]
                    raise
            self._publish()  # before another order begins, whose model may fail
            return f"{name} is loaded"

    def _load(self, one: Served) -> None:
        name = one.names[0]
        self._states[name] = "loading"
        self._wanted.add(name)
        try:
            for part in one.parts:
                self._control.load(part, self._load_s, lambda: self._alive() and not self._ended)
        except ServeError:
            self._wanted.discard(name)
            if not self._ended:  # else Triton ends, and reads no orders
                for part in reversed(one.parts):
                    self._control.unload(part)
                self._control.wait_unread(one.parts, _UNLOAD_S, lambda: self._alive() and not self._ended)
            self._states[name] = "unloaded"
            raise
        self._states[name] = "loaded"
        if self._on_demand:
            self._uses.begin(one.part(drain.ENGINE))

    def unload(self, name: str, limit_s: float | None = None) -> str:
        """Unloads a model, like load(). After limit_s (default: drain_timeout_s) its running requests end with an
        error."""
        with self._ordered():
            one = self._known(name)
            own = one.names[0]
            if self._states[own] == "unloaded":
                return f"{name} is not loaded"
            if self._wanted == {own}:
                raise ServeError(f"{name} is the only model that is loaded: end charonia serve instead of unloading it")
            if self._unload(one, self._drain_s if limit_s is None else limit_s) or not self._alive():
                return f"{name} is unloaded"
            return (
                f"{name} takes no requests any more. Triton still counts calls that clients cancelled by gRPC as "
                f"running: until {name} is loaded again, its /v2/health/ready is 400, and some memory may be in use"
            )

    def _unload(self, one: Served, limit_s: float) -> bool:
        """After limit_s its running requests end with an error. Returns False if Triton still counts calls of the
        model."""
        own = one.names[0]
        self._states[own] = "unloading"
        self._wanted.discard(own)
        self._control.drain(self._metrics_url, limit_s, lambda: not self._alive(), labels=(one.label,))
        for part in reversed(one.parts):
            self._control.unload(part)
        ensemble = one.part(drain.ENSEMBLE)
        others = [part for part in one.parts if part != ensemble]
        gone = self._control.wait_unloaded(others, _UNLOAD_S, self._alive)
        gone = gone and self._control.wait_unloaded([ensemble], _LOST_S, self._alive)
        self._states[own] = "unloaded"
        return gone

    def ensure(self, name: str, limit_s: float) -> str:
        """Loads a model for a request. If the memory is too small for it, unloads the model without requests whose last
        request is the oldest. Waits at most limit_s for such a model, and for other orders. Raises ServeError."""
        if not self._on_demand:
            raise ServeError(f"{name} is not loaded: its operator loads it with charonia models load {name}", 503)
        one, deadline = self._known(name), time.monotonic() + limit_s
        own = one.names[0]
        if self._states[own] == "loaded":
            return f"{name} is loaded"
        with self._ordered(wait_s=limit_s):
            if self._states[own] != "loaded":
                self._exchange(one, deadline)
        return f"{name} is loaded"

    def _exchange(self, one: Served, deadline: float) -> None:
        """Loads a model instead of others, if the memory is too small for all."""
        before = set(self._wanted)
        try:
            self._make_room(one, deadline)
            self._load(one)
        except BaseException:
            self._wanted.discard(one.names[0])
            self._wanted = self._wanted or before
            raise

    def _make_room(self, one: Served, deadline: float) -> None:
        while self._used_bytes() + one.need_bytes > one.room_bytes:
            loaded = {other.part(drain.ENGINE): name for name, other in self._served.items() if self._is_loaded(name)}
            if engine := self._uses.least_recent(loaded):
                if self._wanted == {loaded[engine]}:  # a Triton that is started again loads a model in any case
                    self._wanted.add(one.names[0])
                # A request that arrives now still ends. The next ones wait for this order.
                self._unload(self._served[loaded[engine]], math.inf)
                continue
            if time.monotonic() >= deadline or self._ended or not self._alive():
                raise ServeError(
                    f"{one.names[0]} does not fit next to {', '.join(loaded.values())}, which have requests: try again",
                    503,
                )
            time.sleep(_LOOK_S)

    def _is_loaded(self, name: str) -> bool:
        return self._states[name] == "loaded"

    def _used_bytes(self) -> int:
        return sum(one.need_bytes for name, one in self._served.items() if self._is_loaded(name))

    def watch(self) -> None:
        """Unloads models that are idle for long, until end(). The last loaded model stays."""
        while not self._ended:
            time.sleep(_WATCH_S)
            engines = {one.part(drain.ENGINE): name for name, one in list(self._served.items())}
            self._uses.look(engines)
            for engine, name in engines.items():
                if self._idle_s and self._is_loaded(name) and self._uses.idle_s(engine) >= self._idle_s:
                    with contextlib.suppress(ServeError):  # it is the last one, or another order runs
                        self.unload(name, math.inf)

    def _known(self, name: str) -> Served:
        if one := self.find(name):
            return one
        there = ", ".join(each for one in self.served() for each in one.names)
        raise ServeError(
            f"there is no model {name!r}: this server has {there}; charonia models load {name}=PATH adds one", 404
        )

    @contextmanager
    def _ordered(self, wait_s: float = 0) -> Iterator[None]:
        """Allows one order at a time. wait_s: how long to wait for another order."""
        if not self._busy.acquire(timeout=wait_s):
            raise ServeError(
                "another model is being loaded or unloaded: wait for that (charonia models list)",
                503 if wait_s else 409,
            )
        try:
            if self._ended:
                raise ServeError("charonia serve ends: start it again", 503)
            if not self._alive():
                raise ServeError("Triton is not ready: wait until it is", 503)
            yield
        finally:
            self._busy.release()


def _fitting(served: Sequence[Served]) -> Iterator[str]:
    """The names of the first models that fit together, at least one."""
    used = 0
    for number, one in enumerate(served):
        if number and used + one.need_bytes > one.room_bytes:
            return
        used += one.need_bytes
        yield one.names[0]


class Uses:
    """When engines had requests, by Triton's metrics. Any thread may call."""

    def __init__(self, metrics_url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics_url = metrics_url
        self._clock = clock
        self._lock = threading.Lock()
        # By loaded engine: its number of ended requests, the time of its last one, and when the engine was seen first.
        self._seen: dict[str, tuple[float, float, float]] = {}

    def look(self, engines: Collection[str]) -> dict[str, float]:
        """Returns the requests of each engine that is loaded and known to Triton."""
        with self._lock:
            return self._look(engines)

    def _look(self, engines: Collection[str]) -> dict[str, float]:
        found, now = drain.requests_of(self._metrics_url), self._clock()
        if found is None:
            return {}
        for engine in engines:
            if engine not in found:
                self._seen.pop(engine, None)
                continue
            running, ended = found[engine]
            before, used_at, since = self._seen.get(engine, (ended, -math.inf, now))
            self._seen[engine] = ended, now if running or ended != before else used_at, since
        return {engine: found[engine][0] for engine in engines if engine in found}

    def begin(self, engine: str) -> None:
        """The engine was loaded again, and no request has reached it yet."""
        with self._lock:
            self._seen.pop(engine, None)
        self.look([engine])

    def idle_s(self, engine: str) -> float:
        """Seconds without a request, since the engine was loaded at most."""
        with self._lock:
            _, used_at, since = self._seen.get(engine, (0, math.inf, math.inf))
            return max(0.0, self._clock() - max(used_at, since))

    def least_recent(self, engines: Collection[str]) -> str | None:
        """The engine without a request whose last request is the oldest. An engine that was just loaded, and has not
        had a request since, is not among them: the requests that it was loaded for are on their way."""
        with self._lock:
            running, now = self._look(engines), self._clock()
            idle = {
                engine: self._seen[engine]
                for engine, count in running.items()
                if not count and (self._seen[engine][1] > -math.inf or now - self._seen[engine][2] >= _SETTLE_S)
            }
        return min(idle, key=lambda engine: max(idle[engine][1:]), default=None)


def option_values(served: Iterable[Served]) -> str:
    """The value of CHARONIA_GATEWAY_MORE_MODELS: all models except the first."""
    return ",".join(f"{one.name}={one.label}" for one in served if one.label)
