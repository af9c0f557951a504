"""Results of a comparison: what was measured, the bars it is held against, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

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

    def prefill_rate(self, engine: EngineResult) -> float | None:
        return self.prompt_tokens / median(engine.prefill_s) if engine.prefill_s else None

    def decode_rate(self, engine: EngineResult, batch: int) -> float | None:
        """Tokens per second over the steps after the first token."""
        seconds = engine.decode_1_s if batch == 1 else engine.decode_8_s
        return batch * (self.decode_tokens - 1) / median(seconds) if seconds else None

    def share(self, engine: EngineResult, batch: int) -> float | None:
        """Bytes of bf16 weights that the steps have to read per second, of the read limit."""
        rate = self.decode_rate(engine, batch)
        return rate / batch * self.weight_bytes / self.limit() if rate else None

    def best_peer(self, rates: Sequence[float | None]) -> float | None:
        """Of the rates of the engines, in their order: the best of all but the first, which is Charonia."""
        return max((rate for rate in rates[1:] if rate), default=None)


@dataclass
class Report:
    machine: dict[str, Any]
    threads: int
    rounds: int
    quick: bool
    shapes: list[ShapeResult]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Report:
        data = json.loads(text)
        for shape in data["shapes"]:
            shape["engines"] = [EngineResult(**engine) for engine in shape["engines"]]
        data["shapes"] = [ShapeResult(**shape) for shape in data["shapes"]]
        return Report(**data)


@dataclass(frozen=True)
class Bar:
    """A promise: what was asked, what was measured; met is None where it could not be measured."""

    what: str
    asked: str
    measured: str
    met: bool | None


def bars(shape: ShapeResult) -> list[Bar]:
    """Of the first engine, which is Charonia."""
    ours = shape.engines[0]
    share_1, share_8 = shape.share(ours, 1), shape.share(ours, shape.batch)
    decodes = [shape.decode_rate(engine, shape.batch) for engine in shape.engines]
    prefills = [shape.prefill_rate(engine) for engine in shape.engines]
    out = [
        _bar("decode, batch 1, share of the read limit", share_1, DECODE_SHARE_1, _percent),
        _bar(f"decode, batch {shape.batch}, share of the read limit", share_8, DECODE_SHARE_8, _percent),
        _bar(f"decode, batch {shape.batch}, times the best peer", _ratio(shape, decodes), DECODE_RATIO_8, _times),
        _bar(f"prefill of {shape.prompt_tokens}, times the best peer", _ratio(shape, prefills), PREFILL_RATIO, _times),
    ]
    if ours.peak_mb:
        above = ours.peak_mb - ours.info["weight_mb"] - ours.info["kv_mb"]
        engine_alone = above - ours.imports_mb
        out.append(
            Bar(
                "peak memory above weights and KV cache, of the engine",
                f"{MEMORY_ABOVE_MB:.0f} MB",
                f"{engine_alone:.0f} MB",
                engine_alone <= MEMORY_ABOVE_MB,
            )
        )
        out.append(
            Bar(
                "the same, of the process with Python and its libraries",
                f"{MEMORY_ABOVE_MB:.0f} MB",
                f"{above:.0f} MB",
                above <= MEMORY_ABOVE_MB,
            )
        )
    return out


def _ratio(shape: ShapeResult, rates: Sequence[float | None]) -> float | None:
    best = shape.best_peer(rates)
    return rates[0] / best if rates[0] and best else None


def _bar(what: str, value: float | None, asked: float, spell: Any) -> Bar:
    return Bar(what, spell(asked), spell(value), None if value is None else value >= asked)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "-" if not value else f"{value:.1f}"


def markdown(report: Report) -> str:
    """The page: one table for each shape, then the bars. Engines that were not measured are named with the reason."""
    lines = ["# Charonia and its peers on the CPU", ""]
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    lines += [
        f"Machine: {machine}. {report.threads} threads; medians of {report.rounds} rounds in which the engines took "
        "turns."
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
            "| engine | prefill, tokens/s | decode, batch 1 | share of the limit "
            f"| decode, batch {shape.batch} | share of the limit | peak memory, MB | before the model, MB |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for engine in shape.engines:
            if engine.missing:
                lines.append(f"| {engine.label} | not measured: {_cell(engine.missing)} | | | | | | |")
                continue
            cells = [
                _number(shape.prefill_rate(engine)),
                _number(shape.decode_rate(engine, 1)),
                _percent(shape.share(engine, 1)),
                _number(shape.decode_rate(engine, shape.batch)),
                _percent(shape.share(engine, shape.batch)),
                f"{engine.peak_mb:.0f}",
                f"{engine.imports_mb:.0f}",
            ]
            lines.append(f"| {_with_versions(engine)} | {' | '.join(cells)} |")
        lines += ["", "| bar | asked | measured | met |", "|---|---:|---:|---|"]
        for bar in bars(shape):
            met = "not measured" if bar.met is None else "yes" if bar.met else "**no**"
            lines.append(f"| {bar.what} | {bar.asked} | {bar.measured} | {met} |")
    return "\n".join(lines) + "\n"


def _with_versions(engine: EngineResult) -> str:
    details = [f"{name} {version}" for name, version in engine.versions.items()]
    if "instruction_set" in engine.info:
        details.append(engine.info["instruction_set"])
    return f"{engine.label} ({', '.join(details)})" if details else engine.label


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
