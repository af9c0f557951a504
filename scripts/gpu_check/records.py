"""What stages found, and the file that keeps it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu_check.context import ROOT

# What the compiled programs are made of, and what else decides about tests and figures.
_ENGINE = ("CMakeLists.txt", "engine")
_ALL = (
    *_ENGINE, "charonia", "client/charonia_client", "gateway/charonia_gateway", "preprocessing", "postprocessing",
    "model_repository", "tests/parity", "tests/gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Bar:
    """A figure that was asked for. asked None: a figure without a bar."""

    number: str  # of the list in benchmarks/README.md: "1", "6.1"
    what: str
    measured: float
    unit: str
    asked: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.asked is None else self.measured >= self.asked


@dataclass(frozen=True)
class Failure:
    """weight: how much it explains, the more the later in the report. See report.py."""

    where: str
    text: str
    weight: int = 0


EXPLAINED, COMPILER, DEVICE, CRASH, ASSERTION, OTHER = 95, 90, 80, 70, 60, 20


@dataclass
class Outcome:
    """status: passed | failed | skipped. summary: one line. figures: anything JSON has."""

    status: str
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        return cls(
            values["status"],
            values["summary"],
            values["figures"],
            [Bar(**bar) for bar in values["bars"]],
            [Failure(**failure) for failure in values["failures"]],
        )


def skipped(why: str) -> Outcome:
    return Outcome("skipped", why)


@dataclass
class Record:
    """An outcome, of which sources (a hash) and when, and how long it took."""

    outcome: Outcome
    sources: str
    seconds: float
    at: str  # UTC


class Results:
    """The results file. It is written after every stage."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.machine: dict[str, Any] = {}
        self.commit = ""
        self.records: dict[str, Record] = {}
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            self.machine, self.commit = content["machine"], content["commit"]
            for name, values in content.get("stages", {}).items():
                outcome = Outcome.from_json(values.pop("outcome"))
                self.records[name] = Record(outcome, **values)

    def save(self) -> None:
        content = {
            "machine": self.machine,
            "commit": self.commit,
            "stages": {name: asdict(record) for name, record in self.records.items()},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(self.file)


def engine_sources() -> str:
    """A hash of what the engine and the benchmark of its kernels are compiled from."""
    return _hash((*_ENGINE, *sorted(f"benchmarks/{file.name}" for file in (ROOT / "benchmarks").glob("cuda_*.[ch]*"))))


def all_sources() -> str:
    """A hash of all that tests and figures depend on. It needs no git: the sources may have come without it."""
    return _hash(_ALL)


def _hash(paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        top = ROOT / path
        files = [top] if top.is_file() else sorted(file for file in top.rglob("*") if _counts(file))
        for file in files:
            digest.update(f"{file.relative_to(ROOT)}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _counts(file: Path) -> bool:
    return file.is_file() and file.suffix not in (".pyc", ".so") and "__pycache__" not in file.parts


def commit() -> str:
    """The commit, with + where the working tree differs from it."""
    told = os.environ.get("GPU_CHECK_COMMIT", "")
    if told or not (ROOT / ".git").exists():
        return told or "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD") or "unknown"
    return head + ("+" if git("status", "--porcelain", "--", *_ALL) else "")
