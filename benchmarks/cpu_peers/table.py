"""Results of a comparison: what was measured, the bars it is held against, as records and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from charonia.bench.records import Record, make_table, markdown_table, number, tables

DECODE_SHARE_1, DECODE_SHARE_8 = 0.85, 0.80  # of the read limit
DECODE_RATIO_8, PREFILL_RATIO = 1.15, 1.30  # times the best peer
MEMORY_ABOVE_MB = 150.0  # weights and KV cache


@dataclass
class EngineResult:
    """One engine on one shape. Seconds of every round: prefill to the first token, decode of all steps after it.

    missing: why there is nothing. versions: of packages. imports_mb: resident before the model was loaded.
    """

    name: str
    label: str
    missing: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    prefill_s: list[float] = field(default_factory=list)
    decode_1_s: list[float] = field(default_factory=list)
    decode_8_s: list[float] = field(default_factory=list)
    imports_mb: float = 0.0
    peak_mb: float = 0.0


@dataclass
class ShapeResult:
    """One shape. limits: bytes per second of every measurement of the memory; weight_bytes: read per step."""

    shape: str
    weight_bytes: float
    prompt_tokens: int
    decode_tokens: int
    batch: int
    limits: list[float]
    engines: list[EngineResult]

    def limit(self) -> float:
        """The best: other load can only have made one worse."""
        return max(self.limits)

    def prefill_rates(self, engine: EngineResult) -> list[float]:
        return [self.prompt_tokens / seconds for seconds in engine.prefill_s]

    def decode_rates(self, engine: EngineResult, batch: int) -> list[float]:
        """Tokens per second over the steps after the first token."""
        rounds = engine.decode_1_s if batch == 1 else engine.decode_8_s
        return [batch * (self.decode_tokens - 1) / seconds for seconds in rounds]

    def shares(self, engine: EngineResult, batch: int) -> list[float]:
        """Bytes of bf16 weights that the steps have to read per second, in percent of the read limit."""
        return [100 * rate / batch * self.weight_bytes / self.limit() for rate in self.decode_rates(engine, batch)]

    def records(self) -> list[Record]:
        """Of every engine that was measured."""
        found = []
        for engine in self.engines:
            case = {"model": self.shape, "engine": _with_versions(engine)}
            figures = [("prefill", "tokens/s", self.prefill_rates(engine))]
            for batch in (1, self.batch):
                figures.append((f"decode, batch {batch}", "tokens/s", self.decode_rates(engine, batch)))
                figures.append((f"batch {batch}", "% of the limit", self.shares(engine, batch)))
            if engine.peak_mb:
                figures += [("peak memory", "MB", [engine.peak_mb]), ("before the model", "MB", [engine.imports_mb])]
            found += [
                Record.of("cpu_peers", name, unit, values, case=case)
                for name, unit, values in figures
                if values and not engine.missing
            ]
        return found

    def bars(self) -> list[Record]:
        """What was asked of the first engine, which is Charonia; those that could be measured."""
        ours, peers = self.engines[0], self.engines[1:]
        found = []

        def bar(name: str, unit: str, values: Sequence[float], asked: float, at_most: bool = False) -> None:
            if values:
                case = {"model": self.shape}
                found.append(Record.of("cpu_peers bars", name, unit, values, case=case, asked=asked, at_most=at_most))

        def times_the_best(rates: Callable[[EngineResult], list[float]]) -> list[float]:
            theirs = [median(some) for peer in peers if (some := rates(peer)) and not peer.missing]
            return [median(rates(ours)) / max(theirs)] if theirs and rates(ours) else []

        bar("decode, batch 1", "% of the read limit", self.shares(ours, 1), 100 * DECODE_SHARE_1)
        bar(f"decode, batch {self.batch}", "% of the read limit", self.shares(ours, self.batch), 100 * DECODE_SHARE_8)
        decodes = times_the_best(lambda engine: self.decode_rates(engine, self.batch))
        bar(f"decode, batch {self.batch}", "times the best peer", decodes, DECODE_RATIO_8)
        bar(
            f"prefill of {self.prompt_tokens}", "times the best peer", times_the_best(self.prefill_rates), PREFILL_RATIO
        )
        if ours.peak_mb:
            above = ours.peak_mb - ours.info["weight_mb"] - ours.info["kv_mb"]
            what = "peak memory above weights and KV cache"
            bar(f"{what}, of the engine", "MB", [above - ours.imports_mb], MEMORY_ABOVE_MB, at_most=True)
            bar(f"{what}, of the process with Python and its libraries", "MB", [above], MEMORY_ABOVE_MB, at_most=True)
        return found


@dataclass
class Report:
    machine: dict[str, Any]
    threads: int
    rounds: int
    quick: bool
    shapes: list[ShapeResult]

    def records(self) -> list[Record]:
        return [record for shape in self.shapes for record in (*shape.records(), *shape.bars())]

    def about(self) -> dict[str, Any]:
        """For the file's first line: what is no figure."""
        shapes = {
            shape.shape: {
                "weight_bytes": shape.weight_bytes,
                "bytes_per_s_of_each_measurement": shape.limits,
                "missing": {engine.name: engine.missing for engine in shape.engines if engine.missing},
            }
            for shape in self.shapes
        }
        return {"threads": self.threads, "rounds": self.rounds, "quick": self.quick, "shapes": shapes}


def markdown(report: Report) -> str:
    """The page: one table for each shape, then the bars. Engines that were not measured are named with the reason."""
    lines = ["# Charonia and its peers on the CPU", ""]
    machine = report.machine
    lines += [
        f"Machine: {machine.get('processor')}, {machine.get('processors')} processors, {machine.get('instructions')}, "
        f"{machine.get('memory_gb')} GB. {report.threads} threads; medians of {report.rounds} rounds in which the "
        "engines took turns."
    ]
    if report.quick:
        lines += ["", "**Quick: tiny models and few tokens, to see that it works. The figures say nothing of speed.**"]
    for shape in report.shapes:
        lines += ["", f"## {shape.shape}", ""]
        lows = f"{min(shape.limits) / 1e9:.1f} to {max(shape.limits) / 1e9:.1f}"
        lines += [
            f"A step reads {shape.weight_bytes / 1e6:.0f} MB of bf16 weights; memory reads {lows} GB/s over the "
            f"rounds, of which the best is the limit: {shape.limit() / shape.weight_bytes:.1f} steps/s. "
            f"Prefill of {shape.prompt_tokens} tokens; decode of {shape.decode_tokens} tokens after a prompt of 32.",
            "",
        ]
        for table in tables(shape.records()):
            lines += markdown_table(table)
        missing = [f"- {engine.label}: not measured: {engine.missing}" for engine in shape.engines if engine.missing]
        lines += ["", *(line.replace("\n", " ") for line in missing)] if missing else []
        rows = [
            (bar.name, bar.unit, number(bar.asked or 0), number(bar.value), "yes" if bar.met else "no")
            for bar in shape.bars()
        ]
        lines += ["", *markdown_table(make_table(("bar", "unit", "asked", "measured", "met"), rows))]
    return "\n".join(lines) + "\n"


def _with_versions(engine: EngineResult) -> str:
    details = [f"{name} {version}" for name, version in engine.versions.items()]
    if "instruction_set" in engine.info:
        details.append(engine.info["instruction_set"])
    return f"{engine.label} ({', '.join(details)})" if details else engine.label
