"""An engine in a process of its own that answers one measurement after the other.

A worker is called as `worker.py MODEL THREADS LONGEST BATCH OPTION` (the longest sequence, the most sequences at once,
EngineSpec.option).
It prints lines of JSON: {"imports_mb"} once its libraries are loaded and before the model is; {...} with what it has to
say of the model when that is loaded; then for every line {"batch", "prompt", "new"} that it reads a line
{"first_s", "rest_s"}: seconds until the last sequence's first token, and from there until all `new` tokens of all
sequences are there.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.cpu_peers.engines import WORKERS


class WorkerError(Exception):
    """A worker ended; says what it said last."""


@dataclass(frozen=True)
class Run:
    first_s: float
    rest_s: float


class Worker:
    """Ends with close(), or as a context manager."""

    def __init__(
        self,
        python: Path,
        script: str,
        model: Path,
        threads: int,
        longest: int,
        batch: int,
        log: Path,
        option: str = "",
    ):
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), str(WORKERS / script), str(model), str(threads), str(longest), str(batch), option],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=_environment(threads),
            )
        self.imports_mb = float(self._answer()["imports_mb"])
        self.info = self._answer()

    def run(self, batch: int, prompt: int, new: int) -> Run:
        stdin = self._pipe(self._process.stdin)
        try:
            stdin.write(json.dumps({"batch": batch, "prompt": prompt, "new": new}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the answer says why
        answer = self._answer()
        return Run(float(answer["first_s"]), float(answer["rest_s"]))

    def peak_mb(self) -> float:
        """The most memory that was resident so far, in 10^6 bytes."""
        return peak_mb(self._process.pid)

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._pipe(self._process.stdout).close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        """The next line of JSON; libraries may print others."""
        for line in self._pipe(self._process.stdout):
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        raise WorkerError(f"it ended with status {self._process.returncode}: {lines[-1]}")

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def peak_mb(pid: int | str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024 / 1e6
    raise WorkerError(f"process {pid} has no peak of its memory: it has ended")


def _environment(threads: int) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Idle threads of one engine must not spin while another one is measured.
    return {**os.environ, **offline, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
