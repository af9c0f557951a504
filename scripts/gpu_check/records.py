"""What stages found, and the file that keeps it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from charonia.bench import machine
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError
from gpu_check.context import ROOT

# What the compiled programs are made of, and what else decides about tests and figures.
_ENGINE = ("CMakeLists.txt", "engine")
_ALL = (
    *_ENGINE, "charonia", "client/charonia_client", "gateway/charonia_gateway", "preprocessing", "postprocessing",
    "model_repository", "tests/parity", "tests/gpu",
)  # fmt: skip


def bar(number: str, what: str, value: float, unit: str, asked: float | None = None) -> Record:
    """number: of the list of bars in benchmarks/README.md: "1", "6.1"."""
    return Record.of(_BAR + number, what, unit, value, asked=asked)


def bar_number(record: Record) -> str:
    """Empty where it is a figure of no bar."""
    return record.benchmark.removeprefix(_BAR) if record.benchmark.startswith(_BAR) else ""


_BAR = "bar "


@dataclass(frozen=True)
class Failure:
    """weight: how much it explains, the more the later in the report. See report.py."""

    where: str
    text: str
    weight: int = 0


EXPLAINED, COMPILER, DEVICE, CRASH, ASSERTION, OTHER = 95, 90, 80, 70, 60, 20


@dataclass
class Outcome:
    """status: passed | failed | skipped. summary: one line. records: all figures, those of bar() among them.
    figures: what else belongs to them, anything JSON has."""

    status: str
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Outcome:
        return cls(
            values["status"],
            values["summary"],
            values["figures"],
            [Record(**record) for record in values["records"]],
            [Failure(**failure) for failure in values["failures"]],
        )


def skipped(why: str) -> Outcome:
    return Outcome("skipped", why)


@dataclass
class StageRecord:
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
        self.records: dict[str, StageRecord] = {}
        if file.is_file():
            try:
                content = json.loads(file.read_text(encoding="utf-8"))
                self.machine, self.commit = content["machine"], content["commit"]
                for name, values in content.get("stages", {}).items():
                    outcome = Outcome.from_json(values.pop("outcome"))
                    self.records[name] = StageRecord(outcome, **values)
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidRequestError(
                    f"{file} is no results file of this version ({error!r}): move it away, or say --results FILE"
                ) from error

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
    return os.environ.get("GPU_CHECK_COMMIT") or machine.commit(*_ALL)
