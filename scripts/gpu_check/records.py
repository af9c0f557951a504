"""What stages found, and the file that keeps it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from charonia.bench import machine
from charonia.bench.records import BAR, Record, read, write
from charonia.errors import InvalidRequestError
from gpu_check.context import ROOT
from gpu_check.plan import BY_NAME

# What the compiled programs are made of, and what else decides about tests and figures.
_ENGINE = ("CMakeLists.txt", "engine")
_ALL = (
    *_ENGINE, "charonia", "client/charonia_answers",
    "client/charonia_client", "gateway/charonia_gateway", "preprocessing", "postprocessing",
    "model_repository", "tests/parity", "tests/gpu",
)  # fmt: skip


def bar(number: str, what: str, value: float, unit: str, asked: float | None = None) -> Record:
    """number: of the list of bars in benchmarks/README.md: "1", "6.1"."""
    return Record.of(f"{BAR} {number}", what, unit, value, asked=asked)


TABLE_RATE = "output in all"  # of the static benchmark, which peers are compared with
_PEERS = ("peer", "peer-compiled", "peer-llama")
# Bar 2: transformers at batch 32, of which we want five times the rate.
_PEER_TIMES = 5.0


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
    """The results file, which is written after every stage: of charonia.bench.records, with the outcomes of stages in
    its run. A record's case says of which stage it is; those of no stage follow from several."""

    def __init__(self, file: Path, command: Iterable[str] = ()) -> None:
        self.file = file
        self.machine: dict[str, Any] = {}
        self.commit = ""
        self.command = ["scripts/gpu_check.sh", *command]
        self.records: dict[str, StageRecord] = {}
        if file.is_file():
            try:
                run, records = read(file)
                self.machine, self.commit = run["machine"], run["commit"]
                for name, values in run["stages"].items():
                    self.records[name] = _stage(values, _of_stage(records, name))
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{error}: move it away, or say --results FILE") from error
            except (KeyError, TypeError) as error:
                raise InvalidRequestError(
                    f"{file} is no results file of this version ({error!r}): move it away, or say --results FILE"
                ) from error

    def run(self) -> dict[str, Any]:
        """The file's first line."""
        gpu = self.machine.get("gpu")
        last = max((record.at for record in self.records.values()), default="")
        return {
            "title": gpu or "Rehearsal without a GPU",
            "command": self.command,
            "machine": self.machine,
            "commit": self.commit,
            "at": last and f"{last.replace(' ', 'T')}+00:00",
            "rehearsal": not gpu,
            "notes": [note for name, record in self.records.items() for note in _limits(name, record.outcome.figures)],
            "stages": {name: _to_json(self.records[name]) for name in sorted(self.records, key=_place)},
        }

    def all_records(self) -> list[Record]:
        found = [
            replace(record, case={_STAGE: name, **record.case})
            for name, stage in self.records.items()
            for record in stage.outcome.records
        ]
        return [*found, *self._beside_peers()]

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write(self.file, self.run(), self.all_records())

    def _beside_peers(self) -> Iterator[Record]:
        table = self.records.get("bench2")
        rates = {
            record.case["batch"]: record.value
            for record in (table.outcome.records if table else ())
            if record.name == TABLE_RATE
        }
        for name in _PEERS:
            peer = self.records.get(name)
            if peer and peer.outcome.status == "passed" and peer.outcome.figures["batch"] in rates:
                figures = peer.outcome.figures
                times = rates[figures["batch"]] / figures["output_tokens_per_s"]
                what = f"Llama-2-7B, batch {figures['batch']}: times {figures['what']}"
                yield bar("2", what, times, "times", _PEER_TIMES if name == "peer" else None)


_STAGE = "stage"


def _place(stage: str) -> int:
    """Those of another version last."""
    return list(BY_NAME).index(stage) if stage in BY_NAME else len(BY_NAME)


def _to_json(stage: StageRecord) -> dict[str, Any]:
    outcome = asdict(stage.outcome)
    del outcome["records"]
    return {**outcome, "sources": stage.sources, "seconds": stage.seconds, "at": stage.at}


def _stage(values: dict[str, Any], records: list[Record]) -> StageRecord:
    outcome = Outcome.from_json({**values, "records": map(asdict, records)})
    return StageRecord(outcome, values["sources"], values["seconds"], values["at"])


def _of_stage(records: Iterable[Record], stage: str) -> list[Record]:
    return [
        replace(record, case={name: value for name, value in record.case.items() if name != _STAGE})
        for record in records
        if record.case.get(_STAGE) == stage
    ]


def _limits(stage: str, figures: dict[str, Any]) -> list[str]:
    parts = []
    bandwidth, gemm = figures.get("bandwidth"), figures.get("gemm_flops")
    if isinstance(bandwidth, float):
        parts.append(f"bandwidth {bandwidth / 1e9:.0f} GB/s")
    if isinstance(gemm, float):
        parts.append(f"bf16 GEMM {gemm / 1e12:.0f} TFLOP/s")
    return [f"Measured in the run of {stage}: {', '.join(parts)}."] if parts else []


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
