"""The pages with responses that a test defines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HANG_S = 120


@dataclass
class Scripted:
    """scripted_server.py in a process."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, Path(__file__).parent / "scripted_server.py", str(self.port)])
        deadline = time.monotonic() + HANG_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health/ready", timeout=HANG_S).status_code:
                    return
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()

    def script(self, *replies: dict[str, Any] | list[Any] | str, **conditions: Any) -> None:
        """Set the next responses. A list contains the pieces of one response. A text has pieces of 5 characters."""
        body = {"replies": [_reply(one) for one in replies], **conditions}
        httpx.post(f"{self.url}/_script", json=body, timeout=HANG_S)

    def release(self) -> None:
        """Continue after {"wait": True}."""
        with contextlib.suppress(httpx.TransportError):  # the next piece may end the server
            httpx.post(f"{self.url}/_release", timeout=HANG_S)

    def requests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{self.url}/_requests", timeout=HANG_S).json()
        return found

    def health_asked(self) -> int:
        """Return the number of requests for /health/ready."""
        found: int = httpx.get(f"{self.url}/_health_asked", timeout=HANG_S).json()
        return found


def _reply(given: dict[str, Any] | list[Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        given = [given[index : index + 5] for index in range(0, len(given), 5)]
    return {"pieces": given} if isinstance(given, list) else given
