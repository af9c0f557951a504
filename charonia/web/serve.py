"""Runs the gateway with its page in this process, with engines in this process or with a Triton server elsewhere."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from charonia.errors import InvalidRequestError
from charonia.serve import access, checks, shares
from charonia.serve.model import prepare_all, prepare_draft
from charonia.serve.models import Served, option_values
from charonia.settings import ServeSettings, env_name, environment, inference_settings, misspelled, of_answers
from charonia.weights import workspace

if TYPE_CHECKING:
    from charonia_gateway.endpoints.pool import Pool
    from charonia_gateway.settings import Settings
    from fastapi import FastAPI

    from charonia.web.engine_server import EngineServer

_END_VARIABLE = "CHARONIA_GATEWAY_SHUTDOWN_TIMEOUT_S"


def serve_engine(settings: ServeSettings, inference: Mapping[str, str], *, open_browser: bool = False) -> None:
    """Serve until Ctrl-C or SIGTERM. inference: parameters that override the environment. Raises CharoniaError for an
    unusable model or setting, and for a port that is in use."""
    chosen = inference_settings(inference)
    of_end = {"shutdown_timeout_s": inference["drain_timeout_s"]} if "drain_timeout_s" in inference else {}
    _check_before_start(settings)
    _check_files(gateway_settings(settings, more_models="", **of_end))  # before a model is loaded
    began = time.monotonic()
    with ExitStack() as loaded:
        run_dir = settings.run_dir.expanduser().absolute()
        chosen = prepare_draft(chosen, run_dir, say, loaded)
        served = prepare_all(settings, run_dir, chosen, say, loaded)
        given = gateway_settings(settings, model_name=served[0].name, more_models=option_values(served), **of_end)
        if len(served) > 1:  # each has its own
            chosen = {key: value for key, value in chosen.items() if key not in shares.KEYS}
        servers: dict[str, EngineServer] = {}
        for one in served:
            server = load_server(one, chosen, settings)
            loaded.callback(server.shutdown)
            servers[one.names[0]] = server
            for warning in server.info.warnings:
                say(f"warning: {f'{one.name}: ' if len(served) > 1 else ''}{warning}")
        info = servers[served[0].names[0]].info
        names = f"{' and '.join(servers)} {'is' if len(servers) == 1 else 'are'}"
        ready = f"{names} ready after {time.monotonic() - began:.1f} s, on {_device(info)}. "
        chats = any(one.task == "generate" for one in served)
        _run(given, ready, open_browser, servers=servers, chats=chats)


def load_server(model: Served, inference: Mapping[str, str], settings: ServeSettings) -> EngineServer:
    from charonia.web.engine_server import EngineServer

    say(f"Loading {model.name}")
    with _default_sigint():
        location = workspace.locate(model.workspace)
        return EngineServer(
            model.name, location, {**inference, **model.settings}, {**environment(), **of_answers(settings)}
        )


def serve_elsewhere(
    settings: ServeSettings, triton: str, more_models: str | None = None, *, open_browser: bool = False
) -> None:
    """Serve with the Triton servers at `triton` (format of CHARONIA_TRITON_ENDPOINTS). more_models: further models in
    the format of CHARONIA_GATEWAY_MORE_MODELS; None: use that variable. The servers may start later."""
    if not triton.strip(" ,\n"):
        raise InvalidRequestError("--triton is empty: name the gRPC port of a Triton server, HOST:PORT")
    _check_before_start(settings)
    more = {} if more_models is None else {"more_models": more_models}
    given = gateway_settings(settings, triton_endpoints=triton, **more)

    async def tell(app: FastAPI) -> None:
        pools = {name: engine.pool for name, engine in app.state.gateway.engines.items()}
        await asyncio.gather(*(wait_for(name, pool) for name, pool in pools.items()))

    async def wait_for(name: str, pool: Pool) -> None:
        if reason := await pool.why_not_ready():
            say(f"{name} is not ready: {reason}. The page shows this too, and works as soon as Triton is ready")
            while await pool.why_not_ready():
                await asyncio.sleep(given.endpoint_check_interval_s)
        say(f"{name} at {triton} is ready")

    _run(given, f"A gateway before Triton at {triton}. ", open_browser, then=tell)


def _check_before_start(settings: ServeSettings) -> None:
    for warning in misspelled():
        say(f"warning: {warning}")
    checks.check_packages(own_triton=False, gateway=True, liveness=False)
    for warning in access.warnings(settings):
        say(f"warning: {warning}")
    name, port = env_name("host"), env_name("gateway_port")
    checks.check_ports([access.Port(settings.host, settings.gateway_port, name, port)])


def gateway_settings(settings: ServeSettings, **more: Any) -> Settings:
    """Return the gateway settings: environment and `.env`, overridden by the options of this command."""
    from charonia_gateway.check import explained
    from charonia_gateway.settings import Settings
    from pydantic import ValidationError

    options: dict[str, Any] = {"host": settings.host, "port": settings.gateway_port, "page": True}
    if settings.model_name:
        options["model_name"] = settings.model_name
    if _END_VARIABLE not in environment():  # else the gateway would use CHARONIA_DRAIN_TIMEOUT_S of the service
        options["shutdown_timeout_s"] = 0.0
    options |= more
    try:
        given = Settings(**options)
    except ValidationError as error:
        raise InvalidRequestError("\n".join(explained(error))) from None
    # A person reads the output, so successful requests are not logged.
    if "log_level" not in given.model_fields_set:
        given = given.model_copy(update={"log_level": "warning"})
    return given


def _check_files(settings: Settings) -> None:
    """Check the files that the gateway reads at its start. Raises InvalidRequestError if one cannot be used."""
    from charonia_gateway.check import SettingsError, check_files

    try:
        check_files(settings)
    except SettingsError as error:
        raise InvalidRequestError(str(error)) from None


def _run(
    settings: Settings,
    head: str,
    open_browser: bool,
    *,
    servers: Mapping[str, EngineServer] | None = None,
    then: Callable[[FastAPI], Any] | None = None,
    chats: bool = True,
) -> None:
    """head: text printed before the address. servers: engines instead of Triton, by model. then: coroutine that runs
    next to the gateway. chats: a model gives text."""
    from charonia_gateway.logs import configure_logging
    from charonia_gateway.port import PortError
    from charonia_gateway.process import serve

    scheme = "https" if settings.tls_cert else "http"
    url = f"{scheme}://{access.bracketed(access.loopback(settings.host))}:{settings.port}"
    tasks: list[asyncio.Task[None]] = []

    def started(app: FastAPI) -> None:
        wait = settings.shutdown_timeout_s
        ends = (
            f"Ctrl-C lets running responses finish, for at most {wait:g} s; a second Ctrl-C does not."
            if wait
            else "Ctrl-C ends it."
        )
        lines = access.page_lines(url, settings.host)
        page = "  Chat        " + "\n              ".join(lines) + "\n" if chats else ""
        say(f"{head}{ends}\n\n{page}  API         {url}/v1   ({url}/docs)\n")
        if then:
            tasks.append(asyncio.get_running_loop().create_task(then(app)))
        if open_browser:
            threading.Thread(target=_open, args=(url,), daemon=True).start()

    configure_logging(settings)
    try:
        serve(settings, servers, started)
    except (ValueError, PortError) as error:  # an unusable file, or a port that was taken in the meantime
        raise InvalidRequestError(str(error)) from error


def _open(url: str) -> None:
    if not webbrowser.open(url):
        say(f"no browser was found: open {url} in one")


def _device(info: Any) -> str:
    if info.device == "null":
        return "no device: it computes nothing"
    return f"the CPU ({info.instruction_set})" if info.device == "cpu" else f"GPU {info.device_ids}"


@contextmanager
def _default_sigint() -> Iterator[None]:
    """Let Ctrl-C end the process immediately. Python would handle it only after the engine has loaded the model."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
