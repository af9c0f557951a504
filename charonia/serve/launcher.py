"""Starts Triton and the gateway, waits until they are ready, supervises them, and stops them."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from charonia import _engine
from charonia.errors import ServeError
from charonia.serve import access, checks, control, drain, logs, run_folder, shared_memory, shares, triton
from charonia.serve.fetch import Silence, answers, fetch, takes_tls
from charonia.serve.model import model_name, prepare, prepare_all, prepare_draft
from charonia.serve.models import (
    Models,
    Served,
    add_to_repository,
    added,
    first_request,
    make_repository,
    option_values,
    with_labels,
)
from charonia.serve.process import Child
from charonia.settings import ServeSettings, env_name, environment, inference_settings, misspelled, shared_environment
from charonia.weights import workspace
from charonia.weights.adapters import adapter_names
from charonia.weights.cache_warnings import cache_warnings
from charonia.weights.workspace import WEIGHTS

if TYPE_CHECKING:
    from charonia.serve.liveness import Liveness

_KILL_AFTER_S = 10  # time for a process to end, in addition to drain_timeout_s for the gateway
# A stack ends at most so long after two times drain_timeout_s, one for the gateway and one for other clients.
AFTER_DRAINS_S = 2 * _KILL_AFTER_S + drain.CUT_OFF_S + drain.LAST_TEXT_S
_HURRIED_EXIT_S = 5  # time for a gateway to end after the second signal, so that it leaves no files
_MAX_DELAY_S = 30  # before a restart
_STABLE_S = 600  # restarts before a Triton that was ready for so long do not count
_POLL_S = 0.1
_INDENT = "\n              "  # of the message at the start
_GATEWAY_READS_S = 30  # time for the gateway to read the file of models, which it checks every second
_CHECK_S = 60  # time for the gateway to check its settings, which takes less than a second
_OF_EACH = {f"CHARONIA_{key.upper()}" for key in shares.KEYS}  # each of several models has its own value
_BATCH_DIR = "CHARONIA_GATEWAY_BATCH_DIR"
_LAST_OUTPUT_S = 10  # older output of a process that was killed by a signal is not shown
# A signal to a process group arrives twice if make or a shell passes it on. It counts once.
_TOGETHER_S = 0.3


class _Signals:
    """Counts Ctrl-C and SIGTERM. After the first, running requests may end. After the second, they are not awaited."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._number = 0  # the last one
        self._clock = clock
        self._arrived = threading.Event()
        self._last = -math.inf

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if now - self._last >= _TOGETHER_S:
            self.count += 1
            self._number, self._last = number, now
        self._arrived.set()

    @property
    def exit_code(self) -> int:
        """The exit code of the process, like a shell's after the second signal: 130 for Ctrl-C."""
        return 128 + self._number if self.count > 1 else 0

    def wait(self, seconds: float) -> bool:
        """Returns True if a signal has arrived."""
        return self._arrived.wait(seconds)

    @contextmanager
    def caught(self, then_ignored: bool) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self.handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if then_ignored else handler)


def serve(
    settings: ServeSettings,
    inference: Mapping[str, str] | None = None,
    console: Console | None = None,
    *,
    exits: bool = False,
) -> int:
    """Serves until Ctrl-C, SIGTERM or SIGHUP. Returns the exit code when everything has ended: 0, or 128 + its number
    if a second signal has ended it.

    inference: inference parameters, which take precedence over the environment. exits: the caller exits afterwards, so
    these signals are ignored from then on. Call it in the main thread. Raises CharoniaError if something cannot start
    or if a process ends by itself; no process is running then.
    """
    console = console or Console(stderr=True, highlight=False, soft_wrap=True)
    signals = _Signals()
    with signals.caught(then_ignored=exits):
        _Stack(settings, inference_settings(inference), console, signals).run()
    return signals.exit_code


class _Stack:
    def __init__(
        self, settings: ServeSettings, inference: Mapping[str, str], console: Console, signals: _Signals
    ) -> None:
        self._settings = settings
        self._inference = inference
        self._console = console
        self._signals = signals
        self._ready = False
        self._has_settings_of_each = False  # several models at the start: each has its own values of shares.KEYS
        self._drain_s = 0.0  # time for requests to end at the end
        self._device: list[str] = []  # where the engines run, by their log
        self._warnings: list[str] = []  # about settings
        self._adapters: set[str] = set()  # LoRA adapters that were loaded while Triton runs
        self._control = drain.ModelControl()
        self._own: Path  # the folder of this stack; set by run()
        self._held: contextlib.ExitStack  # until the end; set by run()
        self._models: Models  # set by _start()
        self._shared_memory = shared_memory.new_prefix()
        self._num_restarts = 0  # in a row
        self._ready_at = math.inf  # when the Triton that runs became ready
        self._start_server: Callable[[], Child]  # set by _start()
        self._children: list[Child] = []  # Triton, then the gateway
        self._liveness: Liveness | None = None  # of the Triton that is ready

    def run(self) -> None:
        began = time.monotonic()
        settings = self._settings
        for warning in misspelled():
            self._say(warning, "warning")
        checks.check_packages(
            own_triton=settings.triton_dir is None, gateway=settings.gateway, liveness=settings.hang_timeout_s > 0
        )
        checks.check_python()
        root = settings.run_dir.expanduser().absolute()
        with contextlib.ExitStack() as held:
            own = held.enter_context(run_folder.held(root, settings.grpc_port))
            self._own, self._held = own, held
            held.enter_context(shared_memory.owned(self._shared_memory))
            checks.check_ports(access.ports(settings))
            if settings.gateway and not self._check_gateway():
                return
            checks.check_device(self._inference)
            self._inference = prepare_draft(self._inference, root, self._say, held)
            served = prepare_all(settings, root, self._inference, self._say, held)
            shares.check_folders(served, self._inference)
            self._warn_of_settings(served)
            try:
                if not self._start(served):
                    return
                self._is_ready()
                self._take_orders()
                served = self._models.wanted()
                later = [one.name for one in self._models.served() if one not in served]
                self._announce(served, time.monotonic() - began, later)
                while not self._signals.wait(_POLL_S * 2):
                    if self._liveness and self._liveness.hung:
                        self._kill_server(f"answered no request for {settings.hang_timeout_s:g} s and was killed")
                    if self._children[0].exit_status() is None or not self._restart():
                        self._check_alive(self._children)
            finally:
                self._stop()
                self._control.close()

    def _warn_of_settings(self, served: Sequence[Served]) -> None:
        """Before Triton starts: with some of these settings it takes long, or does not fit."""
        for one in served:
            weights, settings = one.workspace / WEIGHTS, dict(self._inference)
            for text in cache_warnings(weights, settings):  # which no log of the engine has
                self._say(f"{one.name}: {text}" if len(served) > 1 else text, "warning")
            for text in _engine.setting_warnings(weights, settings):
                self._warnings.append(text)
                if self._settings.logs == "files":  # else the engine's line is on stderr already
                    self._say(f"{one.name}: {text}" if len(served) > 1 else text, "warning")

    def _take_orders(self) -> None:
        """Answers `charonia models` until the end."""
        if self._settings.models_autoload and len(self._models.served()) > 1:
            threading.Thread(target=self._models.watch, name="models", daemon=True).start()
        try:
            self._held.enter_context(control.answering(self._own, self._answer))
        except OSError as error:  # network file systems may not support sockets
            if len(self._models.served()) > 1:
                self._say(
                    f"charonia models does not reach this server: a socket cannot be made in {self._own} "
                    f"({error.strerror}). Name a folder of another file system with {env_name('run_dir')}",
                    "warning",
                )

    def _answer(self, question: Mapping[str, Any]) -> Any:
        """Answers a request of `charonia models`, or of the gateway. Raises CharoniaError."""
        do, name = question["do"], question.get("name", "")
        if do == "list":
            return self._models.describe()
        if do == "ensure":
            return self._models.ensure(name, float(question["limit_s"]))
        if do not in ("load", "unload"):
            raise ServeError(f"this charonia serve is of another version: it does not know {do!r}")
        if do == "unload":
            said = self._models.unload(name)
        elif self._models.find(name) or not all(new := added(name)):
            said = self._models.load(name)
        else:
            new_name, location = new
            # Triton runs the Python code of a workspace, and a key may belong to somebody else than the operator.
            if question.get("from_key") and workspace.locate(location).is_workspace:
                raise ServeError(
                    f"{location} is a workspace, which contains code: a key may load a model folder or a hub id. For a "
                    "workspace, use charonia models load on the server"
                )
            said = self._models.add(new_name, location)
            self._until_gateway_has(new_name)
            name = new_name
        self._say(said)
        return said if do == "unload" else "\n".join([said, *self._warnings_of(name)])

    def _warnings_of(self, name: str) -> Iterator[str]:
        """Prints the warnings about a loaded model that no log of the engine has, and yields each as a line."""
        one = self._models.find(name)
        try:
            found = cache_warnings(one.workspace / WEIGHTS, self._inference) if one else []
        except Exception as error:  # a removed or damaged workspace, whose model is loaded
            self._say(f"{name} is loaded, but its workspace cannot be read: {error!r}", "warning")
            return
        for text in found:
            self._say(f"{name}: {text}", "warning")
            yield f"warning: {name}: {text}"

    @contextmanager
    def _made(self, name: str, location: str, others: Sequence[Served]) -> Iterator[Served]:
        """Makes a further model in the repository of added models; the block loads it. If the block fails, removes the
        model and releases its workspace, except what Triton may still read. Raises CharoniaError."""
        root, inference = self._own.parent, self._inference
        if self._settings.chat_template is not None:
            raise ServeError(f"{env_name('chat_template')} is for one model: start charonia serve with both models")
        if self._settings.models_autoload:
            raise ServeError(f"{env_name('models_autoload')} plans the memory at the start: start it with all models")
        with contextlib.ExitStack() as held:
            folder = prepare(location, root, inference, self._say, held)
            *_, one = with_labels([*((other.name, other.workspace) for other in others), (name, folder)])
            made = shares.as_given(one, inference)
            if not self._has_settings_of_each and (used := shares.FOLDERS & made.settings.keys()):
                raise ServeError(f"{min(used)} is in use by the first model: start charonia serve with both models")
            if not self._has_settings_of_each and (used := shares.of_first_only(inference)):
                raise ServeError(f"{min(used)} is for the first model: start charonia serve with both models")
            if reads := [part for part in made.parts if self._control.may_read(part)]:
                for part in reads:
                    self._control.unload(part)
                raise ServeError(
                    f"Triton has not ended an earlier attempt to load {reads[0]}: load it again when Triton's log says "
                    "that it is unloaded, or start charonia serve again",
                    409,
                )
            try:
                add_to_repository(made, self._added, self._settings.text_instances)
                yield made
            except BaseException:
                if any(map(self._control.may_read, made.parts)):
                    self._held.push(held.pop_all())
                self._remove_added(part for part in made.parts if not self._control.may_read(part))
                raise
            self._held.push(held.pop_all())

    def _remove_unserved(self) -> None:
        """Before a start: removes parts that Triton may have read when their model could not be loaded."""
        served = {part for one in self._models.served() for part in one.parts}
        self._remove_added(folder.name for folder in self._added.iterdir() if folder.name not in served)

    def _remove_added(self, parts: Iterable[str]) -> None:
        for part in parts:
            shutil.rmtree(self._added / part, ignore_errors=True)

    @property
    def _added(self) -> Path:
        """Triton's repository of models that are added later."""
        return self._own / "added_models"

    @property
    def _models_file(self) -> Path:
        """The models for the gateway, which reads the file again when it changes."""
        return self._own / "models"

    def _write_models(self) -> None:
        """Raises ServeError if the file cannot be written."""
        text, changed = option_values(self._models.served()), self._models_file.with_suffix(".new")
        try:
            if self._models_file.exists() and self._models_file.read_text(encoding="utf-8") == text:
                return
            changed.write_text(text, encoding="utf-8")
            changed.replace(self._models_file)
        except OSError as error:
            raise ServeError(
                f"{changed} cannot be written ({error.strerror}), so the gateway does not know all loaded models. When "
                "that is fixed, run charonia models load again with the model's name",
                503,
            ) from None

    def _until_gateway_has(self, name: str) -> None:
        """Waits until clients can use an added model."""
        settings = self._settings
        if not settings.gateway or settings.gateway_tls_client_ca:
            return
        url = f"{access.gateway_url(settings)}/health/ready"
        deadline = time.monotonic() + _GATEWAY_READS_S
        while time.monotonic() < deadline and self._children[-1].exit_status() is None:
            with contextlib.suppress(Silence, ValueError):
                if json.loads(fetch(url, _GATEWAY_READS_S) or b"{}").get("models", {}).get(name) == "ready":
                    return
            time.sleep(_POLL_S)
        raise ServeError(f"{name} is loaded, but the gateway does not have it yet: see its log", 503)

    def _start(self, served: Sequence[Served]) -> bool:
        """Starts Triton, then the gateway. Returns False if a signal arrived."""
        settings, own = self._settings, self._own
        distribution = triton.Distribution.find(settings.triton_dir)
        self._drain_s = max(float(shares.setting_of(one, self._inference, "drain_timeout_s")) for one in served)
        self._has_settings_of_each = len(served) > 1
        shutil.rmtree(self._added, ignore_errors=True)
        self._added.mkdir()
        repository = served[0].workspace / "model_repository"
        if settings.text_instances is not None or len(served) > 1:
            repository = make_repository(served, own / "model_repository", settings.text_instances)
        base = {
            **environment(),
            **shared_environment(settings),
            **{f"CHARONIA_{key.upper()}": value for key, value in self._inference.items()},
        }
        if self._has_settings_of_each:  # the repository has them
            base = {name: value for name, value in base.items() if name not in _OF_EACH}
        self._models = Models(
            self._control,
            served,
            alive=lambda: self._ready and self._children[0].exit_status() is None,
            metrics_url=self._metrics_url(),
            limits=(self._drain_s, settings.start_timeout_s),
            make=self._made,
            publish=self._write_models,
            on_demand=settings.models_autoload,
            idle_s=settings.models_idle_s,
        )
        self._write_models()
        tls = access.grpc_tls_options(settings)
        if tls:
            base["CHARONIA_TRITON_TLS"] = "true"
        log_file = self._log_file(own, "triton")
        names = model_name(served[0].workspace) if len(served) == 1 else " and ".join(one.name for one in served)
        self._say(f"Starting Triton with {names}" + (f"; log: {log_file}" if log_file else ""))
        backends = triton.make_backend_folder(own / "backends", distribution)
        closed = access.triton_options(settings)
        env = {**base, **self._control.environment(), "CHARONIA_DRAIN_TIMEOUT_S": str(self._drain_s)}
        env = triton.environment(distribution, env, settings.jemalloc)

        def start_server() -> Child:
            self._remove_unserved()
            more = [f"--model-repository={self._added}", shared_memory.option(self._shared_memory)]
            more += [*self._models.options(), *closed, *tls]
            command = triton.command(distribution, settings, repository, backends, self._drain_s, more)
            return self._spawn("Triton", command, env, log_file, [self._control.descriptor])

        self._start_server = start_server
        self._children.append(self._start_server())
        if not self._until_server_ready():
            return False
        if not settings.gateway:
            return True
        gateway = self._spawn(
            "the gateway",
            [sys.executable, "-m", "charonia_gateway"],
            {
                **base,
                **self._gateway_environment(),
                # An engine on the CPU needs the cores.
                "CHARONIA_GATEWAY_WORKERS": str(settings.gateway_workers or int(triton.on_cpu(self._device))),
                "CHARONIA_MODEL_NAME": served[0].name,
                "CHARONIA_GATEWAY_MORE_MODELS": "",
                "CHARONIA_GATEWAY_MODELS_FILE": str(self._models_file),
                "CHARONIA_GATEWAY_CONTROL_DIR": str(own),
                env_name("models_autoload"): str(settings.models_autoload),
                _BATCH_DIR: base.get(_BATCH_DIR, str(own / "batches")),
                "CHARONIA_GATEWAY_SHUTDOWN_TIMEOUT_S": str(self._drain_s),
            },
            self._log_file(own, "gateway"),
        )
        self._children.append(gateway)
        if settings.gateway_tls_client_ca:
            return self._until(
                gateway, {"gateway": lambda: takes_tls(access.loopback(settings.host), settings.gateway_port)}
            )
        return self._until_ready(gateway, [f"{access.gateway_url(settings)}/health/ready"])

    def _gateway_environment(self) -> dict[str, str]:
        """The settings of the gateway that do not depend on the models."""
        settings = self._settings
        keys = settings.gateway_keys_file
        return {
            "CHARONIA_HOST": settings.host,
            "CHARONIA_GATEWAY_PORT": str(settings.gateway_port),
            "CHARONIA_TRITON_HOST": access.loopback(settings.triton_address),
            "CHARONIA_GRPC_PORT": str(settings.grpc_port),
            **({env_name("gateway_keys_file"): str(keys)} if keys else {}),
        }

    def _check_gateway(self) -> bool:
        """Makes the gateway check its settings, files and port now. It is started only after the model is loaded, which
        may take minutes. Returns False if a signal arrived. Raises ServeError."""
        env = {
            **environment(),
            **shared_environment(self._settings),
            **self._gateway_environment(),
            "CHARONIA_GATEWAY_WORKERS": str(self._settings.gateway_workers),
            # The check needs values, but not the real ones.
            "CHARONIA_MODEL_NAME": "any",
            "CHARONIA_GATEWAY_MORE_MODELS": "",
            "CHARONIA_GATEWAY_MODELS_FILE": "",
            "CHARONIA_GATEWAY_SHUTDOWN_TIMEOUT_S": "0",
        }
        check = Child("the gateway's check", [sys.executable, "-m", "charonia_gateway.check"], env, None)
        try:
            if not check.wait(_CHECK_S, lambda: self._signals.count > 0):
                return self._signals.count == 0  # a slow machine: the gateway reports errors when it starts
            if check.exit_code:
                raise ServeError(
                    "\n".join(check.tail()) or f"the gateway cannot start: its check {check.exit_status()}"
                )
        finally:
            check.kill_group()
        return True

    def _log_file(self, folder: Path, name: str) -> Path | None:
        return folder / f"{name}.log" if self._settings.logs == "files" else None

    def _spawn(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        log_file: Path | None,
        inherits: Sequence[int] = (),
    ) -> Child:
        render = logs.renderer(self._settings.log_format, "gateway" if name == "the gateway" else "triton")

        repeats = logs.Repeats()

        def show(line: str) -> None:
            self._device += triton.device_of(line)
            self._control.see(line)
            if adapter := triton.adapter_of(line):
                (self._adapters.add if adapter[1] else self._adapters.discard)(adapter[0])
            if log_file is None:
                if not triton.is_noise(line) and (shown := render(line)) is not None:
                    logs.show(shown)
                return
            level, text = triton.worth_showing(line) or ("", "")
            if any(map(text.endswith, self._warnings)):
                return  # it was printed before the start
            # Errors during the start are shown together if it fails.
            shows = level == "warning" or (level and self._ready)
            if shows and not self._hurries() and (passed := repeats.passed(text)) is not None:
                self._say(passed, level, of=name)

        return Child(name, command, env, log_file, show, render, lambda text: self._say(text, "warning"), inherits)

    def _is_ready(self) -> None:
        self._ready, self._ready_at = True, time.monotonic()
        if self._settings.hang_timeout_s:
            from charonia.serve.liveness import Liveness  # with grpcio, which takes long to import

            self._liveness = Liveness(
                self._settings, lambda: [drain.part_of(drain.ENSEMBLE, label) for label in self._models.labels()]
            )

    def _is_not_ready(self) -> None:
        self._ready = False
        if self._liveness:
            self._liveness.stop()
            self._liveness = None

    def _restart(self) -> bool:
        """Starts a Triton that has ended again. Returns False if that has failed too often. After it returns True,
        Triton may have ended again, or a signal may have arrived. The gateway answers 503 meanwhile. Raises ServeError
        if the gateway has ended, too."""
        self._check_alive(self._children[1:])
        if self._ready and time.monotonic() - self._ready_at >= _STABLE_S:
            self._num_restarts = 0
        if self._num_restarts >= self._settings.max_restarts:
            if self._num_restarts:
                self._say(f"Triton was started again {self._num_restarts} times in a row and has ended again", "error")
            return False
        self._is_not_ready()
        delay = min(2**self._num_restarts, _MAX_DELAY_S)
        self._num_restarts += 1
        self._say(
            f"{self._death_of(self._children[0])}\n"
            f"Triton is started again in {delay} s (restart {self._num_restarts} of at most "
            f"{self._settings.max_restarts} in a row)",
            "error",
        )
        self._kill_server()
        self._control.restarted()
        if self._signals.wait(delay):
            return True
        self._update_manifests()
        if self._signals.wait(0):
            return True
        began = time.monotonic()
        self._device.clear()
        self._children[0] = self._start_server()
        try:
            if self._until_server_ready():
                self._models.restarted()
                self._is_ready()
                self._say(f"Triton is ready again after {time.monotonic() - began:.1f} s")
                self._warn_of_lost_adapters()
        except ServeError as error:
            self._check_alive(self._children[1:])
            if self._children[0].exit_status() is None:
                self._say(str(error), "error")
                self._kill_server("was not ready in time and was killed")
        return True

    def _update_manifests(self) -> None:
        """Weight files that workspaces link to may have changed."""
        try:
            from charonia.weights.quality_record import update_manifest  # with tables of Rich, which no start needs

            for one in self._models.served():
                if not self._signals.wait(0):
                    update_manifest(one.workspace / WEIGHTS)
        except Exception as error:  # an upgraded package or a damaged manifest, which must not end this server
            self._say(f"system_fingerprint may be that of older weights: {error!r}", "warning")

    def _warn_of_lost_adapters(self) -> None:
        if lost := sorted(self._adapters - set(adapter_names(self._inference.get("lora_adapters", "")))):
            self._say(
                f"LoRA adapters are lost, because they were loaded while Triton ran: {', '.join(lost)}. Load them "
                "again with charonia models load-adapter; those of --lora are loaded at each start",
                "warning",
            )
        self._adapters.clear()

    def _until_server_ready(self) -> bool:
        http = f"{self._triton_url(self._settings.http_port)}/v2"
        parts = [part for one in self._models.wanted() for part in one.parts]
        urls = [f"{http}/health/ready", *(f"{http}/models/{part}/ready" for part in parts)]
        return self._until_ready(self._children[0], urls)

    def _until_ready(self, child: Child, urls: list[str]) -> bool:
        """Returns True when every URL answers 200, and False if a signal arrived."""
        return self._until(child, {url: partial(answers, url) for url in urls})

    def _until(self, child: Child, checks: Mapping[str, Callable[[], bool]]) -> bool:
        """Returns True when every check has held once, and False if a signal arrived."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        waiting = list(checks)
        while waiting:
            self._check_alive(self._children, starting=child)
            waiting = [name for name in waiting if not checks[name]()]
            if waiting and time.monotonic() > deadline:
                raise ServeError(
                    f"{child.name} is not ready after {self._settings.start_timeout_s:g} s ({waiting[0]} does not "
                    f"answer): see {child.log_file or 'its log'}, or wait longer with CHARONIA_START_TIMEOUT_S"
                )
            if self._signals.wait(_POLL_S if waiting else 0):
                return False
        return True

    def _check_alive(self, children: Sequence[Child], starting: Child | None = None) -> None:
        for child in children:
            if child.exit_status() is not None:
                raise self._death_of(child, starting=child is starting)

    def _death_of(self, child: Child, *, starting: bool = False) -> ServeError:
        """starting: the process never became ready."""
        status = f"{child.exit_status()}{self._hint_at(child)}"
        # Triton 24.10 may crash when it ends because a model could not be loaded: the reason is in earlier output.
        killed = (child.exit_code or 0) < 0 and not starting
        errors = triton.explain_failure(child.tail(_LAST_OUTPUT_S) if killed else child.tail())
        log = f"its log is {child.log_file}, and says" if child.log_file else "its log says"
        lines = "\n".join(f"  {text}" for text in errors or ["nothing of it"])
        return ServeError(f"{child.name} {status}; {log}:\n{lines}")

    def _hint_at(self, child: Child) -> str:
        """A frequent cause of this kind of death; empty if none is known."""
        if child.exit_status() == "was killed by SIGKILL":
            return " (often the kernel's out-of-memory killer: see dmesg)"
        if child.exit_code == -signal.SIGSEGV and child is self._children[0] and self._settings.http_inference:
            opened = env_name("http_inference")
            return f" (one deeply nested body to its HTTP port can do that, which {opened} opens: docs/security.md)"
        return ""

    def _stop(self) -> None:
        """Ends the gateway first, which is a caller of Triton; then the calls of other clients; then Triton."""
        if self._liveness:
            self._liveness.stop()
        if self._ready:
            self._models.end()
        if self._signals.count and self._children and not self._hurries():
            self._say("Stopping; Ctrl-C again does not wait for running requests")
        ended = [child for child in self._children if child.exit_status() is not None]
        if 0 < len(ended) < len(self._children):  # to end the others may take a while
            others = " and ".join(child.name for child in self._children if child not in ended)
            self._say(f"{ended[0].name} {ended[0].exit_status()}; stopping {others}", "error")

        told = False

        def hurry() -> bool:
            nonlocal told
            if self._hurries() and not told:
                told = True
                self._say("Ending without waiting for running requests")
            return told

        if not self._children:
            return
        server, *gateways = self._children
        for gateway in gateways:
            gateway.terminate()
            if not gateway.wait(self._drain_s + _KILL_AFTER_S, hurry) and hurry():
                gateway.terminate()
                gateway.wait(_HURRIED_EXIT_S)
            self._kill(gateway)
        if self._ready:  # a model that is being loaded has no calls
            self._control.drain(
                self._metrics_url(),
                self._drain_s,
                lambda: hurry() or server.exit_status() is not None,
                self._models.labels(),
            )
        self._end_server(server, hurry)
        shared_memory.remove(self._shared_memory)

    def _hurries(self) -> bool:
        """Whether a second signal has arrived."""
        return self._signals.count > 1

    def _end_server(self, server: Child, hurry: Callable[[], bool]) -> None:
        """Kills Triton when its engines are unloaded and no client is connected, who may still read. It would then wait
        for its Python models, one process after the other, more than a second for each. With tracing it may have spans
        to send, so it ends by itself."""
        settings, deadline = self._settings, time.monotonic() + _KILL_AFTER_S
        server.terminate()
        unloaded = (
            self._ready
            and not settings.tracing_endpoint
            and self._control.wait_unloaded(
                self._models.engines(), _KILL_AFTER_S, lambda: server.exit_status() is None and not hurry()
            )
        )

        done = False

        def is_done() -> bool:
            nonlocal done
            done = unloaded and not hurry() and not access.has_clients((settings.grpc_port, settings.http_port))
            return done

        server.wait(deadline - time.monotonic(), lambda: hurry() or is_done())
        if done:
            server.kill_group()
        else:
            self._kill(server)

    def _kill(self, child: Child) -> None:
        if child.exit_status() is None and not self._hurries():
            self._say(f"{child.name} has not ended by itself and is killed")
        child.kill_group()

    def _kill_server(self, why: str = "") -> None:
        """Ends Triton and its Python models, and removes their shared memory."""
        self._children[0].kill_group(why)
        shared_memory.remove(self._shared_memory)

    def _triton_url(self, port: int) -> str:
        return f"http://{access.bracketed(access.loopback(self._settings.triton_address))}:{port}"

    def _metrics_url(self) -> str:
        return f"{self._triton_url(self._settings.metrics_port)}/metrics"

    def _announce(self, served: Sequence[Served], seconds: float, later: Sequence[str] = ()) -> None:
        """later: the names of models that a request loads."""
        settings, url = self._settings, access.gateway_url(self._settings)
        names = " and ".join(one.name for one in served)
        for text in access.warnings(settings):
            self._say(text, "warning")
        devices = triton.with_names(self._device, served)
        ready = f"{names} {'is' if len(served) == 1 else 'are'} ready after {seconds:.1f} s"
        if later:
            ready += f", and a request loads {' or '.join(later)}"
        if not settings.gateway:
            self._say(
                f"{ready}: HTTP {settings.http_port}, gRPC {settings.grpc_port}, metrics {settings.metrics_port}. "
                f"Runs on {', '.join(devices)}"
            )
            return
        if settings.log_format == "json":
            self._say(f"{ready}: {url}/v1, runs on {', '.join(devices)}")
            return
        chatting = [one for one in served if one.task == "generate"]
        lines = [("Chat page", access.page_lines(url, settings.host))] if chatting and self._serves_page() else []
        lines.append(("Runs on", devices))
        adapters: dict[str, None] = {}
        for one in served:
            config = _engine.read_config_ini(one.workspace / WEIGHTS / "config.ini")
            setting = {**config, **self._inference, **one.settings}.get("lora_adapters", "")
            adapters |= dict.fromkeys(adapter_names(setting))
        if adapters:
            lines.append(("Adapters", [f"{', '.join(adapters)}   (each is a `model` of requests)"]))
        asked: dict[str, Served] = {}  # the first model of each task
        for one in served:
            asked.setdefault(one.task, one)
        lines += [("Ask it", access.curl_lines(settings, *first_request(one))) for one in asked.values()]
        lines += [("Chat", [self._chat_command(one) for one in chatting])] if chatting else []
        lines += [("API docs", [f"{url}/docs"]), ("Metrics", [f"{url}/metrics   {self._metrics_url()}"])]
        shown = "\n".join(f"  {head:<12}{_INDENT.join(texts)}" for head, texts in lines)
        self._say(f"\n{ready}. Ctrl-C ends it.\n\n{shown}\n")

    def _chat_command(self, one: Served) -> str:
        settings = self._settings
        command = f"triton_client {access.grpc_target(settings)}{' --tls' if settings.grpc_tls_cert else ''}"
        if one.label:
            return f"{command} --model {one.part(drain.ENSEMBLE)}"
        changed = settings.grpc_port != ServeSettings.model_fields["grpc_port"].default
        port = f"{env_name('grpc_port')}={settings.grpc_port} " if changed else ""
        return f"{command}   (in a checkout: {port}make chat)"

    @staticmethod
    def _serves_page() -> bool:
        return environment().get("CHARONIA_GATEWAY_PAGE", "1").lower() in ("1", "true", "t", "yes", "y", "on")

    def _say(self, text: str, level: str = "info", *, of: str = "") -> None:
        """of: the process that logged the text. Ignores a terminal that is gone."""
        with contextlib.suppress(OSError, SystemExit):  # rich ends the program where a pipe is broken
            if self._settings.log_format == "json":
                logs.write(level, f"{of}: {text}" if of else text)
                return
            whose = f"{level} of {of}: " if of else "" if level == "info" else f"{level}: "
            self._console.print(escape(whose + text))
