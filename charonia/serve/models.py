"""The models that one Triton serves: their names, their repository, and which of them are loaded.

Triton has several models for each: `preprocessing`, `engine`, `ensemble` and so on. The first model has these names.
The names of further models end with their label: `ensemble.LABEL`.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from charonia.errors import ServeError
from charonia.serve import drain
from charonia.settings import ServeSettings, env_name
from charonia.weights.workspace import TRITON_MODELS, existing

State = Literal["loaded", "unloaded", "loading", "unloading"]

_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_LABEL = 60
_COUNT = re.compile(r"(instance_group\s*\[\s*\{\s*count:\s*)\d+")
_STEP = re.compile(r'(\bmodel_name\s*:\s*")([^"]*)"')
_UNLOAD_S = 60  # time for the parts of a model to be gone once it has no calls
_LOST_S = 1  # time for the ensemble after that; calls that Triton counts for ever keep it loaded


@dataclass(frozen=True)
class Served:
    """A served model. Clients request it by `name`; the first model may have several names, with commas between them.
    `settings`: its own inference parameters."""

    name: str
    label: str  # empty: the first model
    workspace: Path
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return names_of(self.name)

    def part(self, part: str) -> str:
        """The name of a part in Triton."""
        return drain.part_of(part, self.label)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.part(part) for part in TRITON_MODELS)


def asked_for(settings: ServeSettings) -> list[tuple[str | None, str | None]]:
    """Name and location of each model in the settings. The first may be the default model."""
    first = named(settings.model) if settings.model else (None, None)
    more = [named(entry.strip()) for entry in settings.more_models.split(",") if entry.strip()]
    return [(first[0] or settings.model_name, first[1]), *more]


def named(text: str) -> tuple[str | None, str | None]:
    """Splits NAME=MODEL. MODEL alone has no name."""
    name, separator, model = text.partition("=")
    if not separator or existing(text) is not None:
        return None, text
    first, *more = name.split()[:2] or [""]
    if more and existing(first) is not None:
        raise ServeError(
            f"{text!r} names several models: start charonia serve with an argument for each, or set "
            f"{env_name('more_models')} to all but the first, with commas"
        )
    if not name.strip() or not model.strip() or "," in name:
        raise ServeError(f"{text!r} names no model: write MODEL or NAME=MODEL, where clients ask for NAME")
    return name.strip(), model.strip()


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
    models before it. If loading fails, its context removes the model."""

    def __init__(
        self,
        control: drain.ModelControl,
        served: Sequence[Served],
        *,
        alive: Callable[[], bool],
        metrics_url: str,
        limits: tuple[float, float],
        make: Callable[[str, str, Sequence[Served]], AbstractContextManager[Served]] | None = None,
    ) -> None:
        self._control = control
        self._served = {one.names[0]: one for one in served}
        self._alive = alive
        self._metrics_url = metrics_url
        self._drain_s, self._load_s = limits
        self._make = make
        self._states: dict[str, State] = dict.fromkeys(self._served, "loaded")
        self._wanted = set(self._states)  # loaded by a Triton that is started again
        self._busy = threading.Lock()
        self._ended = False

    def wanted(self) -> list[Served]:
        """The models that the operator has not unloaded."""
        return [one for name, one in list(self._served.items()) if name in self._wanted]

    def labels(self) -> list[str]:
        """The labels of the loaded models."""
        return [one.label for name, one in list(self._served.items()) if self._states[name] == "loaded"]

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
            if self._states[one.names[0]] == "loaded":
                return f"{name} is loaded already"
            self._load(one)
            return f"{name} is loaded"

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
            return f"{name} is loaded"

    def _load(self, one: Served) -> None:
        name = one.names[0]
        self._states[name] = "loading"
        self._wanted.add(name)
        loaded = []
        try:
            for part in one.parts:
                self._control.load(part, self._load_s, lambda: self._alive() and not self._ended)
                loaded.append(part)
        except ServeError:
            self._wanted.discard(name)
            if not self._ended:  # else Triton ends, and reads no orders
                for part in reversed(one.parts):
                    self._control.unload(part)
                # Their files must stay until then.
                self._control.wait_unloaded(loaded, _UNLOAD_S, lambda: self._alive() and not self._ended)
            self._states[name] = "unloaded"
            raise
        self._states[name] = "loaded"

    def unload(self, name: str) -> str:
        """Unloads a model, like load(). After drain_timeout_s its running requests end with an error."""
        with self._ordered():
            one = self._known(name)
            own = one.names[0]
            if self._states[own] == "unloaded":
                return f"{name} is not loaded"
            if self._wanted == {own}:
                raise ServeError(f"{name} is the only model that is loaded: end charonia serve instead of unloading it")
            self._states[own] = "unloading"
            self._wanted.discard(own)
            self._control.drain(self._metrics_url, self._drain_s, lambda: not self._alive(), labels=(one.label,))
            for part in reversed(one.parts):
                self._control.unload(part)
            ensemble = one.part(drain.ENSEMBLE)
            others = [part for part in one.parts if part != ensemble]
            gone = self._control.wait_unloaded(others, _UNLOAD_S, self._alive)
            gone = gone and self._control.wait_unloaded([ensemble], _LOST_S, self._alive)
            self._states[own] = "unloaded"
            if gone or not self._alive():
                return f"{name} is unloaded"
            return (
                f"{name} takes no requests any more. Triton still counts calls that clients cancelled by gRPC as "
                f"running: until {name} is loaded again, its /v2/health/ready is 400, and some memory may be in use"
            )

    def _known(self, name: str) -> Served:
        if one := self.find(name):
            return one
        there = ", ".join(each for one in self.served() for each in one.names)
        raise ServeError(
            f"there is no model {name!r}: this server has {there}; charonia models load {name}=PATH adds one", 404
        )

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """Allows one order at a time."""
        if not self._busy.acquire(blocking=False):
            raise ServeError("another model is being loaded or unloaded: wait for that (charonia models list)", 409)
        try:
            if self._ended:
                raise ServeError("charonia serve ends: start it again", 503)
            if not self._alive():
                raise ServeError("Triton is not ready: wait until it is", 503)
            yield
        finally:
            self._busy.release()


def option_values(served: Iterable[Served]) -> str:
    """The value of CHARONIA_GATEWAY_MORE_MODELS: all models except the first."""
    return ",".join(f"{one.name}={one.label}" for one in served if one.label)
