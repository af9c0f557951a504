"""A separate gateway in front of a Triton server, for tests that must not use the stack's gateway."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stack import HANG_S, answers, free_ports


@dataclass
class GatewayProcess:
    url: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def gateway(grpc_target: str, log_file: Path, **env: str) -> Iterator[GatewayProcess]:
    """`python -m charonia_gateway` on a free port. It is live, but may not be ready."""
    host, _, port = grpc_target.rpartition(":")
    (own_port,) = free_ports(1)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
    settings = {
        "CHARONIA_HOST": "127.0.0.1",
        "CHARONIA_GATEWAY_PORT": str(own_port),
        "CHARONIA_TRITON_HOST": host,
        "CHARONIA_GRPC_PORT": port,
        "CHARONIA_MODEL_NAME": "model",
        "CHARONIA_GATEWAY_WORKERS": "1",
        **env,
    }
    url = f"http://127.0.0.1:{own_port}"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "charonia_gateway"], env={**inherited, **settings}, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + HANG_S
        while not answers(f"{url}/health/live"):
            assert process.poll() is None and time.monotonic() < deadline, log_file.read_text()
            time.sleep(0.1)
        yield GatewayProcess(url, process)
    finally:
        process.kill()
        process.wait()
