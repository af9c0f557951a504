"""A running stack (`charonia serve`) on free ports, for the tests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from free_ports import free_ports

DEMO_MODEL = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
START_LIMIT_S = 600
# Limit of every wait. Only a hang reaches it, even on a slow and busy machine.
HANG_S = 120
CHARONIA = Path(sys.executable).parent / "charonia"
# Each token takes at least 10 ms and no computation.
SLOW = {"CHARONIA_DEVICE": "null", "CHARONIA_NULL_STEP_MS": "10", "CHARONIA_STREAM_INTERVAL_MS": "0"}
# A max_tokens that takes a SLOW stack longer than HANG_S, so that the request still runs when a test ends it.
ENDLESS = 16_000


def processes_with(marker: str) -> list[int]:
    """The running processes whose environment contains `marker`, also if they have another parent now."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                dead = (folder / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if not dead and marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


@dataclass
class Stack:
    """The processes of a `charonia serve` with one model."""

    # A shared folder for the linked workspaces of all stacks, by model: creating one takes a second.
    workspaces: ClassVar[Path | None] = None

    model: Path | str
    run_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=lambda: free_ports(4))
    process: subprocess.Popen[bytes] | None = None
    command: Sequence[str | Path] = (CHARONIA, "serve")

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports[1]}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.ports[2]}/metrics"

    @property
    def gateway(self) -> str:
        scheme = "https" if "CHARONIA_GATEWAY_TLS_CERT" in self.env else "http"
        return f"{scheme}://127.0.0.1:{self.ports[3]}"

    @property
    def marker(self) -> str:
        """A text in the environment of every process of this stack and of no other process."""
        return f"CHARONIA_RUN_DIR={self.run_dir}"

    @property
    def log_file(self) -> Path:
        return self.run_dir / "serve.log"

    def launch(self) -> None:
        """Start `charonia serve` without waiting."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        own = self.run_dir / "workspaces"
        if self.workspaces and not own.exists():
            shared = self.workspaces / hashlib.sha256(os.fsencode(self.model)).hexdigest()[:16]
            shared.mkdir(exist_ok=True)
            own.symlink_to(shared)
        names = ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT", "GATEWAY_PORT")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CHARONIA_")}
        env = {
            **inherited,
            "MODEL": str(self.model),
            "CHARONIA_HOST": "127.0.0.1",
            "CHARONIA_RUN_DIR": str(self.run_dir),
            "CHARONIA_THREADS": "2",
            "CHARONIA_CACHE_MAX_ENTRY_COUNT": "512",
            "CHARONIA_DRAIN_TIMEOUT_S": "2",
            "CHARONIA_HANG_TIMEOUT_S": "0",  # its requests would be counted in the metrics
            "CHARONIA_MAX_RESTARTS": "0",  # a Triton that dies unexpectedly must fail the test
            "CHARONIA_TEXT_INSTANCES": "1",  # each instance loads the tokenizer again, which is slow
            **{f"CHARONIA_{name}": str(port) for name, port in zip(names, self.ports, strict=True)},
            **self.env,
        }
        with self.log_file.open("wb") as log:
            # In a folder without a .env.
            self.process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.run_dir
            )

    def start(self) -> Stack:
        """Start the stack, and return when all parts are ready."""
        self.launch()
        return self.until_ready()

    def until_ready(self) -> Stack:
        """Return when all parts are ready."""
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(f"{self.gateway}/health/ready"):
            assert self.process is not None
            assert self.process.poll() is None, f"charonia serve ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"not ready after {START_LIMIT_S} s:\n{self.log()}"
            time.sleep(0.1)
        return self

    def log(self) -> str:
        """The output of charonia serve, and the ends of the logs."""
        parts = [self.log_file.read_text(errors="replace")]
        for file in sorted(self.run_dir.glob("port-*/*.log")):
            parts.append(f"--- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-60:]))
        return "\n".join(parts)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of charonia serve, and return its exit code."""
        assert self.process is not None
        return self.process.wait(HANG_S)

    def processes(self) -> list[int]:
        return processes_with(self.marker)

    def pid_of(self, name: str) -> int:
        """The only process of the stack whose program is `name`."""
        found = [pid for pid in self.processes() if Path(f"/proc/{pid}/exe").resolve().name == name]
        assert len(found) == 1, found
        return found[0]

    def memory_mib(self, what: str = "VmRSS") -> dict[str, int]:
        """Memory of the processes that handle requests: resident memory, or with VmHWM its peak."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                name = re.search(r"preprocessing|postprocessing|tritonserver|charonia_gateway", command)
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                size = next((line.split()[1] for line in lines if line.startswith(f"{what}:")), None)
                if name and size:
                    found[f"{name.group()} {pid}"] = int(size) >> 10
        return found

    def forget_peaks(self) -> None:
        """Reset the peaks of memory_mib("VmHWM")."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def stop(self) -> None:
        """End the stack without waiting for requests. Kill the remaining processes, so that a failed test leaves no
        process."""
        deadline = time.monotonic() + HANG_S
        while self.process is not None and self.process.poll() is None and time.monotonic() < deadline:
            self.process.terminate()  # a second signal ends the wait for requests
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(HANG_S)


@contextlib.contextmanager
def running(stack: Stack) -> Iterator[Stack]:
    try:
        yield stack.start()
    finally:
        stack.stop()


@functools.cache
def any_certificate() -> ssl.SSLContext:
    """A TLS context, created once and without the system's certificates: reading them again and again used a third of a
    core during the start of a stack."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HANG_S, context=any_certificate()) as response:
            return bool(response.status == 200)
    except (http.client.HTTPException, OSError):
        return False


def curl(url: str, body: dict[str, Any]) -> tuple[int, str]:
    """Post JSON like the curl commands of the README. Returns the status and text of the response."""
    program = shutil.which("curl")
    assert program is not None, "the tests of the HTTP endpoints need curl: sudo apt-get install curl"
    command = [program, "--silent", "--no-buffer", "--noproxy", "*", "--write-out", "\n%{http_code}", url]
    done = subprocess.run(
        [*command, "--data", json.dumps(body)], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    text, _, status = done.stdout.rpartition("\n")
    return int(status), text
