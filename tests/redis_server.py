"""A Redis or Valkey server for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from free_ports import free_ports
from missing_tools import missing_tool

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 120


@contextlib.contextmanager
def redis_server(folder: Path, port: int | None = None) -> Iterator[str]:
    """Its URL, until the block ends. It keeps nothing on disk."""
    found = subprocess.run([ROOT / "scripts" / "get_redis.sh"], capture_output=True, text=True)
    if found.returncode:
        missing_tool(found.stderr.removeprefix("skipped: "))
    port = port or free_ports(1)[0]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([found.stdout.strip(), *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + HANG_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(HANG_S)
