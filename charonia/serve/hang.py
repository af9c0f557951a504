"""Notices a Triton that lives and does no work any more.

Three things are looked at:

- Its HTTP port answers. That of a process that is stopped, or whose threads all wait for each other, does not.
- Its gRPC port takes streams. One thread serves all of them. It can wait for ever for a thread that waits for it (where
  a client cancels while a response is sent), and everything else goes on answering. Without the package grpcio this is
  not looked at; the container image has it.
- Its Python models end what waits for them. Where requests wait, none ends and the engine has nothing to do, calls of
  the ensemble are stuck.

Neither load nor long prompts look like that: one look that finds a thing well forgets what earlier ones found wrong
with it, and requests may wait for Python models as long as the engine works.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from charonia.serve import drain
from charonia.serve.fetch import Silence, fetch

_MODELS = ("preprocessing", "postprocessing", "parsing")
_SAMPLE = re.compile(rb'^nv_inference_(\w+)\{[^}]*\bmodel="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE)
_WAITING = b"pending_request_count"
# They change with each request that a model begins or ends.
_DONE = (b"request_success", b"request_failure", b"count", b"exec_count")
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# In a row: after a time in which this process, or the machine, was stopped itself, one look proves nothing.
_LOOKS = 5
_MAX_PAUSE_S = 2.0  # between two looks
_MAX_ANSWER_S = 5.0  # that an answer may take


class GrpcTls(NamedTuple):
    """What a client of a gRPC port with TLS needs: PEM files, and whom the server's certificate is for."""

    ca: Path | None
    cert: Path | None
    key: Path | None
    name: str


class Server(NamedTuple):
    """Where a Triton is found."""

    pid: int
    http: str  # HOST:PORT
    grpc: str
    metrics: str
    tls: GrpcTls | None = None  # of its gRPC port


class Suspicion:
    """Remembers for how long each thing has been wrong."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._found: dict[str, tuple[float, int]] = {}  # since when, and by how many looks

    def look(self, wrong: Iterable[str], now: float) -> str:
        """`wrong`: what is wrong at `now`, in words. Returns what has been, at _LOOKS looks or more, for the time limit
        or longer; empty where nothing has."""
        before = self._found
        self._found = {text: (before.get(text, (now, 0))[0], before.get(text, (now, 0))[1] + 1) for text in wrong}
        lasting = [
            text for text, (since, looks) in self._found.items() if now - since >= self._limit_s and looks >= _LOOKS
        ]
        return " and ".join(sorted(lasting))


class Progress:
    """Compares what Triton counts of its Python models with what it counted at the look before."""

    def __init__(self) -> None:
        self._done: dict[str, float] = {}

    def stuck(self, metrics: bytes, labels: Collection[str] = ("",)) -> list[str]:
        """The models for which requests wait while none ends and their engine is idle, in words. `metrics`: as Triton
        writes them, with the engines'; labels: of what is loaded."""
        engines = {
            drain.part_of(model, label): drain.part_of(drain.ENGINE, label) for model in _MODELS for label in labels
        }
        waiting = dict.fromkeys(engines, 0.0)
        done = dict.fromkeys(engines, 0.0)
        for name, label, value in _SAMPLE.findall(metrics):
            if (model := label.decode()) in waiting:
                waiting[model] += float(value) if name == _WAITING else 0
                done[model] += float(value) if name in _DONE else 0
        before, self._done = self._done, done
        idle = {engine: drain.says_idle(metrics, engine) for engine in set(engines.values())}
        return [
            f"requests wait for {model}, none ends, and the engine has nothing to do"
            for model, engine in engines.items()
            if idle[engine] and waiting[model] > 0 and done[model] == before.get(model)
        ]


class Watch:
    """Looks at one Triton in a thread of its own, until stop(). `limit_s`: for how long something has to be wrong.
    `labels`: of the models that are loaded at the time."""

    def __init__(self, server: Server, limit_s: float, labels: Callable[[], Collection[str]] = lambda: ("",)) -> None:
        self.found = ""  # why the server is taken for one that hangs, in words
        self._server = server
        self._labels = labels
        self._suspicion = Suspicion(limit_s)
        self._progress = Progress()
        self._takes_streams = _stream_probe(server.grpc, server.tls)
        # So that a short limit leaves time for enough looks, too.
        self._answer_s = min(_MAX_ANSWER_S, limit_s / 4)
        self._pause_s = min(_MAX_PAUSE_S, limit_s / 8)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; what is found from now on means nothing."""
        self._ended.set()

    def _run(self) -> None:
        while not self.found and not self._ended.wait(self._pause_s):
            wrong = [] if _is_traced(self._server.pid) else self._wrong()
            self.found = self._suspicion.look(wrong, time.monotonic())

    def _wrong(self) -> list[str]:
        try:
            fetch(f"http://{self._server.http}/v2/health/live", self._answer_s)
        except Silence:
            return ["its HTTP port does not answer"]
        wrong = [] if self._takes_streams(self._answer_s) else ["its gRPC port takes no streams"]
        try:
            metrics = fetch(f"http://{self._server.metrics}/metrics", self._answer_s)
        except Silence:
            return [*wrong, "its metrics port does not answer"]
        return wrong + self._progress.stuck(metrics or b"", self._labels())


def _is_traced(pid: int) -> bool:
    """Whether somebody has it in a debugger, and may have stopped it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return re.search(r"^TracerPid:\s+[1-9]", status, re.MULTILINE) is not None


def _stream_probe(target: str, tls: GrpcTls | None) -> Callable[[float], bool]:
    """A function that opens a stream to the server, sends nothing, and says whether the server has ended it, or refused
    it, within so many seconds."""
    if importlib.util.find_spec("grpc") is None:
        return lambda _: True
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it writes to the terminal that a server has ended
    import grpc  # type: ignore[import-untyped]

    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    connect = partial(grpc.insecure_channel, target, options=options)
    if tls:
        if tls.name:
            options.append(("grpc.ssl_target_name_override", tls.name))
        ca, key, cert = (file.read_bytes() if file else None for file in (tls.ca, tls.key, tls.cert))
        connect = partial(grpc.secure_channel, target, grpc.ssl_channel_credentials(ca, key, cert), options=options)

    def take(timeout_s: float) -> bool:
        # A channel of its own: one that has seen the server fail waits before it tries again.
        with connect() as channel:
            try:
                list(channel.stream_stream(_STREAM)(iter(()), timeout=timeout_s))
            except grpc.RpcError as error:
                return bool(error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED)
            return True

    return take
