"""Results of a comparison: what was measured, and the bars it is held against, as records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from charonia.bench.records import BAR, Record

LONG_PROMPT = 2048  # tokens, from which on decode is measured behind the prompt too
MEMORY_ABOVE_MB = 150.0  # weights and KV cache


@dataclass(frozen=True)
class Bars:
    """What is asked: shares of the read limit at batch 1 and 8, and how many times as fast as the best peer with as
    many bits; 0: nothing. prefill: of prompts of less than LONG_PROMPT tokens; of longer ones prefill_long."""

    share_1: float
    share_8: float
    ratio_1: float
    ratio_8: float
    prefill: float
    prefill_long: float = 1.2


_BARS = {16: Bars(0.85, 0.80, 0, 1.15, 1.30), 8: Bars(0.85, 0.70, 1.5, 2, 1.3), 4: Bars(0.75, 0.50, 1.35, 2, 1.3)}
BITS = tuple(_BARS)  # of weights
# With AMX peers are faster, and memory is the limit of all.
_BARS_AMX = {**_BARS, 8: Bars(0.85, 0.70, 1.1, 1.3, 1.3), 4: Bars(0.75, 0.50, 1.2, 1.3, 1.3)}


def bars_for(bits: int, machine: dict[str, Any]) -> Bars:
    return (_BARS_AMX if "amx" in str(machine.get("instructions")) else _BARS)[bits]


@dataclass
class EngineResult:
    """One engine on one shape. Seconds of every round: prefill_s to the first token, by the prompt's length; decode_s
    of all steps after it, by the batch; after_s of the steps after a long prompt, by its length.

    missing: why there is nothing. versions: of packages. imports_mb: resident before the model was loaded.
    """

    name: str
    label: str
    missing: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    prefill_s: dict[int, list[float]] = field(default_factory=dict)
    decode_s: dict[int, list[float]] = field(default_factory=dict)
    after_s: dict[int, list[float]] = field(default_factory=dict)
    imports_mb: float = 0.0
    peak_mb: float = 0.0


@dataclass
class ShapeResult:
    """One shape. prompts and batches: what was measured, in the order of the tables; decode_tokens after a prompt of
    32, after_tokens after a long one. limits: bytes per second of every measurement of the memory; weight_bytes: read
    per step by the first engine, which is Charonia; what is asked of it."""

    shape: str
    weight_bytes: float
    prompts: list[int]
    batches: list[int]
    decode_tokens: int
    after_tokens: int
    limits: list[float]
    engines: list[EngineResult]
    asked: Bars = _BARS[16]

    def limit(self) -> float:
        """The best: other load can only have made one worse."""
        return max(self.limits)

    def prefill_rates(self, engine: EngineResult, prompt: int) -> list[float]:
        return [prompt / seconds for seconds in engine.prefill_s.get(prompt, [])]

    def decode_rates(self, engine: EngineResult, batch: int) -> list[float]:
        """Tokens per second over the steps after the first token."""
        return [batch * (self.decode_tokens - 1) / seconds for seconds in engine.decode_s.get(batch, [])]

    def after_rates(self, engine: EngineResult, prompt: int) -> list[float]:
        """Tokens per second after a long prompt."""
        return [(self.after_tokens - 1) / seconds for seconds in engine.after_s.get(prompt, [])]

    def shares(self, engine: EngineResult, batch: int) -> list[float]:
        """Bytes of weights that the steps have to read per second, in percent of the read limit. Engines that do not
        say how many they read are taken to read as many as the first one."""
        weight_bytes = 1e6 * engine.info.get("weight_mb_per_step", self.weight_bytes / 1e6)
        return [100 * rate / batch * weight_bytes / self.limit() for rate in self.decode_rates(engine, batch)]

    def records(self) -> list[Record]:
        """Of every engine that was measured."""
        found = []
        for engine in self.engines:
            case = {"engine": _with_versions(engine)}
            figures = []
            for prompt in self.prompts:
                figures.append((f"prefill of {prompt}", "tokens/s", self.prefill_rates(engine, prompt)))
                figures.append((f"decode after {prompt}", "tokens/s", self.after_rates(engine, prompt)))
            for batch in self.batches:
                figures.append((f"decode, batch {batch}", "tokens/s", self.decode_rates(engine, batch)))
                figures.append((f"batch {batch}", "% of the limit", self.shares(engine, batch)))
            if engine.peak_mb:
                figures += [("peak memory", "MB", [engine.peak_mb]), ("before the model", "MB", [engine.imports_mb])]
            found += [
                Record.of(f"peers, {self.shape}", name, unit, values, case=case)
                for name, unit, values in figures
                if values and not engine.missing
            ]
        return found

    def ours(self) -> list[EngineResult]:
        return [engine for engine in self.engines if engine.name.startswith("charonia")]

    def bars(self) -> list[Record]:
        """What was asked of Charonia, for each form of it; those that could be measured."""
        return [bar for engine in self.ours() if not engine.missing for bar in self._bars_of(engine)]

    def _bars_of(self, ours: EngineResult) -> list[Record]:
        peers = [engine for engine in self.engines if engine not in self.ours() and not engine.missing]
        case = {"model": self.shape, "engine": ours.label}
        found = []

        def bar(name: str, unit: str, values: Sequence[float], asked: float, at_most: bool = False) -> None:
            if values and asked:
                found.append(Record.of(f"{BAR} peers", name, unit, values, case=case, asked=asked, at_most=at_most))

        def times_the_best(rates: Callable[[EngineResult], list[float]]) -> list[float]:
            theirs = [median(some) for peer in peers if (some := rates(peer))]
            return [median(rates(ours)) / max(theirs)] if theirs and rates(ours) else []

        for batch, share, ratio in (
            (1, self.asked.share_1, self.asked.ratio_1),
            (8, self.asked.share_8, self.asked.ratio_8),
        ):
            times = times_the_best(lambda engine, batch=batch: self.decode_rates(engine, batch))  # type: ignore[misc]
            bar(f"decode, batch {batch}", "% of the read limit", self.shares(ours, batch), 100 * share)
            bar(f"decode, batch {batch}", "times the best peer", times, ratio)
        for prompt in self.prompts:
            times = times_the_best(lambda engine, prompt=prompt: self.prefill_rates(engine, prompt))  # type: ignore[misc]
            asked = self.asked.prefill if prompt < LONG_PROMPT else self.asked.prefill_long
            bar(f"prefill of {prompt}", "times the best peer", times, asked)
            times = times_the_best(lambda engine, prompt=prompt: self.after_rates(engine, prompt))  # type: ignore[misc]
            bar(f"decode after {prompt}", "times the best peer", times, 1.0)
        if ours.peak_mb:
            above = ours.peak_mb - ours.info["weight_mb"] - ours.info["kv_mb"]
            what = "peak memory above weights and KV cache"
            bar(f"{what}, of the engine", "MB", [above - ours.imports_mb], MEMORY_ABOVE_MB, at_most=True)
            bar(f"{what}, of the process with Python and its libraries", "MB", [above], MEMORY_ABOVE_MB, at_most=True)
        return found


@dataclass
class Report:
    threads: int
    rounds: int
    quick: bool
    shapes: list[ShapeResult]

    def records(self) -> list[Record]:
        return [record for shape in self.shapes for record in (*shape.records(), *shape.bars())]

    def settings(self) -> dict[str, Any]:
        """For the file's first line: what is no figure."""
        shapes = {
            shape.shape: {
                "weight_bytes": shape.weight_bytes,
                "bytes_per_s_of_each_measurement": shape.limits,
                "engines": {engine.name: {**engine.info, **engine.versions} for engine in shape.engines},
                "missing": {engine.name: engine.missing for engine in shape.engines if engine.missing},
            }
            for shape in self.shapes
        }
        return {"threads": self.threads, "rounds": self.rounds, "quick": self.quick, "shapes": shapes}

    def for_report(self) -> dict[str, Any]:
        """What describe_run() takes for it."""
        rounds = "one round" if self.rounds == 1 else f"medians of {self.rounds} rounds"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        notes = [f"{threads}; {rounds} in which the engines took turns."]
        return {
            "title": "Charonia and its peers on the CPU",
            "rehearsal": self.quick,
            "notes": [*notes, *(note for shape in self.shapes for note in _notes(shape))],
        }


def _notes(shape: ShapeResult) -> list[str]:
    """Of the limit, and of engines that were not measured."""
    after_long = f", of {shape.after_tokens} after a long one" if max(shape.prompts) >= LONG_PROMPT else ""
    reads = f"{min(shape.limits) / 1e9:.1f} to {max(shape.limits) / 1e9:.1f}"
    return [
        f"{shape.shape}: a step of {shape.engines[0].label} reads {shape.weight_bytes / 1e6:.0f} MB of weights; memory "
        f"reads {reads} GB/s over the rounds, of which the best is the limit: "
        f"{shape.limit() / shape.weight_bytes:.1f} steps/s. Decode of {shape.decode_tokens} tokens after a prompt of "
        f"32{after_long}.",
        *(
            f"{shape.shape}: {engine.label} was not measured: {' '.join(engine.missing.split())}"
            for engine in shape.engines
            if engine.missing
        ),
    ]


def _with_versions(engine: EngineResult) -> str:
    details = [f"{name} {version}" for name, version in engine.versions.items()]
    if "instruction_set" in engine.info:
        details.append(engine.info["instruction_set"])
    return f"{engine.label} ({', '.join(details)})" if details else engine.label
