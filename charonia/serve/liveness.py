"""Notices a Triton that runs but does not answer, by requests of one token through each ensemble."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # otherwise gRPC prints that a server has ended
# `charonia serve` starts processes while gRPC's threads run. gRPC's own handlers of a fork can abort the new process.
# The import of gRPC reads this variable.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc  # type: ignore[import-untyped]

from charonia.serve import access
from charonia.settings import ServeSettings

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PAUSE_S = 15.0  # between two probes
_MISSES = 2  # in a row: after the machine was suspended, one late answer proves nothing


class Liveness:
    """Sends the requests in a thread until stop() is called. `ensembles` returns the names of the loaded ensembles.

    Every answer counts, also an error. The engine ends a request of this probe by itself if it waits too long, so a
    long queue is no hang. Without answers for settings.hang_timeout_s, `hung` becomes true.
    """

    def __init__(self, settings: ServeSettings, ensembles: Callable[[], Collection[str]]) -> None:
        self.hung = False
        self._settings = settings
        self._ensembles = ensembles
        self._timeout_s = settings.hang_timeout_s / _MISSES
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="liveness", daemon=True).start()

    def stop(self) -> None:
        """Returns immediately. Later results have no effect."""
        self._stopped.set()

    def _run(self) -> None:
        misses = 0
        while misses < _MISSES:
            if self._stopped.wait(0 if misses else min(_PAUSE_S, self._timeout_s / 2)):
                return
            began = time.monotonic()
            if all(self._answers(name) for name in self._ensembles()):
                misses = 0
                continue
            misses += 1
            # An error may come immediately. It is no reason to end a server that can answer within the time.
            if self._stopped.wait(max(0.0, began + self._timeout_s - time.monotonic())):
                return
        self.hung = True

    def _answers(self, ensemble: str) -> bool:
        message = probe_request(ensemble, int(self._timeout_s * 500))
        try:
            # Each probe has its own channel: a channel that has seen a failure waits before it connects again.
            with _channel(self._settings) as channel:
                # A call of an ensemble must be read to its end (docs/contracts.md).
                return bool(list(channel.stream_stream(_METHOD)(iter([message]), timeout=self._timeout_s)))
        except grpc.RpcError:
            return False
        except Exception as error:  # such as a certificate that cannot be read: the thread must go on
            print(f"charonia serve: the liveness probe of {ensemble} failed: {error}", file=sys.stderr, flush=True)
            return False


def _channel(settings: ServeSettings) -> Any:
    target = access.grpc_target(settings)
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if not settings.grpc_tls_cert:
        return grpc.insecure_channel(target, options=options)
    if settings.triton_tls_name:
        options.append(("grpc.ssl_target_name_override", settings.triton_tls_name))
    files = (settings.triton_tls_ca, settings.triton_tls_key, settings.triton_tls_cert)
    ca, key, cert = (file.read_bytes() if file else None for file in files)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def probe_request(ensemble: str, timeout_ms: int) -> bytes:
    """A serialized ModelInferRequest. The server's image has no package with this message type."""
    text = b"a"
    inputs = {
        b"text_input": (b"BYTES", len(text).to_bytes(4, "little") + text),
        b"max_tokens": (b"INT32", (1).to_bytes(4, "little")),
        b"timeout_ms": (b"INT32", timeout_ms.to_bytes(4, "little")),
        b"pooling": (b"BYTES", b"\x03\0\0\0any"),  # also an embedding model computes the text
    }
    message = _field(1, ensemble.encode()) + _field(3, b"charonia-liveness")
    for name, (datatype, _) in inputs.items():
        message += _field(5, _field(1, name) + _field(2, datatype) + _field(3, b"\x01"))  # shape [1]
    return message + b"".join(_field(7, value) for _, value in inputs.values())


def _field(number: int, value: bytes) -> bytes:
    """A field of a protobuf message, of at most 127 bytes."""
    return bytes([number << 3 | 2, len(value)]) + value
