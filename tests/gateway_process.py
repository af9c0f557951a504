"""A separate gateway (`python -m charonia_gateway`) in front of a Triton server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from free_ports import free_ports

HANG_S = 120


@dataclass
class GatewayProcess:
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> list[int]:
        """The ids of the workers, if there are several."""
        return sorted(child.pid for child in psutil.Process(self.process.pid).children())

    def _is_live(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health/live", timeout=HANG_S, trust_env=False).status_code == 200
        return False


@contextlib.contextmanager
def gateway(grpc_target: str, log: Path, **env: str) -> Iterator[GatewayProcess]:
    """A gateway on a free port. It is live, but may not be ready."""
    host, _, triton_port = grpc_target.rpartition(":")
    (port,) = free_ports(1)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    settings = {
        "CHARONIA_HOST": "127.0.0.1",
        "CHARONIA_GATEWAY_PORT": str(port),
        "CHARONIA_TRITON_HOST": host,
        "CHARONIA_GRPC_PORT": triton_port,
        "CHARONIA_MODEL_NAME": "model",
        "CHARONIA_GATEWAY_WORKERS": "1",
        "CHARONIA_ENDPOINT_CHECK_TIMEOUT_S": str(HANG_S),  # a busy server is not down
        **env,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "charonia_gateway"], env={**inherited, **settings}, stdout=output, stderr=output
        )
    made = GatewayProcess(port, process, log)
    try:
        deadline = time.monotonic() + HANG_S
        while not made._is_live():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield made
    finally:
        left = [psutil.Process(pid) for pid in made.pids()] if process.poll() is None else []
        process.kill()
        process.wait()
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, HANG_S)
