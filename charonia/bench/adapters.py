"""The cost of LoRA adapters: batches in which every sequence has another adapter, compared with the model alone."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from charonia.api.engine import Engine
from charonia.api.results import SamplingParams
from charonia.bench.records import Record, report_progress
from charonia.bench.static import ALL_AT_ONCE, phases, run_batch
from charonia.bench.targets import GREEDY
from charonia.engine_settings import Setting
from charonia.errors import InternalError, InvalidRequestError
from charonia.weights import workspace
from charonia.weights.adapted_modules import module_places
from charonia.weights.convert import read_source
from charonia.weights.safetensors_writer import write_safetensors
from charonia.weights.tensor_parallel import split

_WARMUP_TOKENS = 8
_BY_CPU_TIME = ", by CPU time"


def run_adapters(
    model: str,
    *,
    batch: int,
    rank: int,
    prompt: int,
    output: int,
    runs: int,
    settings: dict[str, Setting],
    console: Console,
) -> Iterator[Record]:
    """Measure the model alone and with an adapter for each sequence, alternately. An adapter changes all modules that
    adapters can change. Yields the records after each run, with the medians of the runs so far. The records have tokens
    per second of both, and the second as a share of the first, in percent: by the clock, and after the last run on a
    CPU by the CPU time of this process, which other processes change less. The CPU time of decode is left out if it is
    less than the CPU time of prefill: it is a difference, so the noise of prefill is in it."""
    if min(batch, rank, prompt, runs) < 1 or output < 2:
        raise InvalidRequestError("batch size, rank, prompt length and runs must be at least 1, the output at least 2")
    names = [f"adapter-{index}" for index in range(batch)]
    found: dict[str, list[_Seconds]] = {"none": [], "adapters": []}
    case = {"batch": batch, "rank": rank, "prompt": prompt, "output": output}
    counts = {"prefill": batch * prompt, "decode": batch * (output - 1)}
    with _engine(model, batch, rank, prompt + output, settings) as engine:
        on_cpu = engine.info.device == "cpu"  # on a GPU the CPU's time says nothing
        generator = np.random.default_rng(0)

        def draw() -> list[list[int]]:
            prompts: list[list[int]] = generator.integers(3, engine.info.vocab_size, (batch, prompt)).tolist()
            return prompts

        for run in range(runs + 1):  # the first one is a warm-up
            for kind, measured in found.items():
                tokens = output if run else min(output, _WARMUP_TOKENS)
                sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **GREEDY)
                with console.status(f"run {run} of {runs}: {kind}"):
                    seconds = _measure(engine, draw, sampling, names if kind == "adapters" else "")
                report_progress(f"run {run} of {runs}: {kind}")
                if run:
                    measured.append(seconds)
            if run:
                for phase, count in counts.items():
                    for name, unit, values in _figures(phase, count, found["none"], found["adapters"]):
                        if (on_cpu and run == runs) or not name.endswith(_BY_CPU_TIME):
                            yield Record.of("adapters", name, unit, values, case=case)
    if on_cpu and not _has_cpu_time("decode", [*found["none"], *found["adapters"]]):
        console.print("the CPU time of decode is too short to measure: take more output tokens or shorter prompts")


def check_tokens(model: str, *, batch: int, rank: int, prompt: int, output: int, settings: dict[str, Setting]) -> None:
    """Raise InternalError if tokens with adapters depend on the batch. If the batch has several sequences, it has more
    adapters than slots."""
    fewer: dict[str, Setting] = {**settings, "reproducible": True, "lora_device_adapters": max(1, batch - 1)}
    if not tokens_are_equal_in_a_batch(model, batch=batch, rank=rank, prompt=prompt, output=output, settings=fewer):
        raise InternalError("tokens with adapters differ alone and in a batch, or two adapters have the same tokens")


def tokens_are_equal_in_a_batch(
    model: str, *, batch: int, rank: int, prompt: int, output: int, settings: dict[str, Setting]
) -> bool:
    """Return whether requests with different adapters have the same tokens and log probabilities alone and in a batch,
    and others than each other and than the model alone."""
    names = [f"adapter-{index}" for index in range(batch)]
    sampling = SamplingParams(max_tokens=output, ignore_eos=True, logprobs=0, **GREEDY)
    with _engine(model, batch, rank, prompt + output, settings) as engine:
        one: list[int] = np.random.default_rng(0).integers(3, engine.info.vocab_size, prompt).tolist()

        def completions(loras: list[str]) -> list[tuple[list[int], list[float]]]:
            outputs = engine.generate([one] * len(loras), sampling, lora=loras)
            return [(found.token_ids, found.logprobs) for found in outputs]

        [plain] = completions([""])
        alone = [completions([name])[0] for name in names]
        return alone == completions(names) and all([plain, *alone].count(one) == 1 for one in alone)


@contextmanager
def _engine(model: str, batch: int, rank: int, length: int, settings: dict[str, Setting]) -> Iterator[Engine]:
    """An engine with random adapters `adapter-0` to `adapter-<batch - 1>` of all modules."""
    chosen: dict[str, Setting] = {
        "session_len": length,
        "max_batch_size": batch,
        "enable_prefix_caching": False,
        "lora_device_adapters": batch,
        "lora_max_rank": rank,
        **ALL_AT_ONCE,
        **settings,
    }
    with (
        tempfile.TemporaryDirectory(prefix="charonia-") as folder,
        Engine.from_pretrained(model, dtype="auto", show_progress=True, **chosen) as engine,
    ):
        shapes = _modules(model)
        for index in range(batch):
            _write_adapter(Path(folder, f"adapter-{index}"), shapes, rank, index)
            engine.load_adapter(f"adapter-{index}", Path(folder, f"adapter-{index}"))
        yield engine


@dataclass(frozen=True)
class _Seconds:
    """Of a run: by the clock, and CPU time; both by phase."""

    wall: dict[str, float]
    cpu: dict[str, float]


def _measure(
    engine: Engine, draw: Callable[[], list[list[int]]], sampling: SamplingParams, lora: str | list[str]
) -> _Seconds:
    """draw: returns new prompts, which are not in the prefix cache."""
    first, second = draw(), draw()
    began = time.process_time()
    engine.generate(first, replace(sampling, max_tokens=1), lora=lora)
    prefill_cpu = time.process_time() - began
    run = phases(run_batch(engine, second, sampling, lora))
    decode_cpu = time.process_time() - began - 2 * prefill_cpu
    return _Seconds({"prefill": run.prefill, "decode": run.decode}, {"prefill": prefill_cpu, "decode": decode_cpu})


def _has_cpu_time(phase: str, runs: list[_Seconds]) -> bool:
    return phase == "prefill" or all(one.cpu["decode"] > one.cpu["prefill"] for one in runs)


def _figures(
    phase: str, tokens: int, alone: list[_Seconds], adapted: list[_Seconds]
) -> Iterator[tuple[str, str, list[float]]]:
    """Names, units and values of a phase's records."""
    pairs = list(zip(alone, adapted, strict=True))
    yield phase, "tokens/s", [tokens / one.wall[phase] for one in alone]
    name, share = f"{phase} with adapters", "% of the model alone"
    yield name, "tokens/s", [tokens / one.wall[phase] for one in adapted]
    yield name, share, [100 * a.wall[phase] / b.wall[phase] for a, b in pairs]
    if _has_cpu_time(phase, [*alone, *adapted]):
        yield f"{name}{_BY_CPU_TIME}", share, [100 * a.cpu[phase] / b.cpu[phase] for a, b in pairs]


def _modules(model: str) -> dict[str, tuple[int, int]]:
    """Return the shapes of the modules that adapters can change."""
    location = workspace.locate(model)
    if location.weights is not None:
        modules = workspace.read_manifest(location.weights).modules
    else:
        spec = read_source(location.path).spec
        modules = module_places(spec, split(spec.tensors, spec.config, 1))
    if not modules:
        raise InvalidRequestError(f"{model} takes no adapters (docs/adapters.md)")
    return {name: (places[0]["shape"][0], places[0]["shape"][1]) for name, places in modules.items()}


def _write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Write a random adapter in fp32."""
    random = np.random.default_rng(seed)
    sizes: dict[str, tuple[int, ...]] = {}
    for name, (rows, cols) in shapes.items():
        sizes[f"base_model.model.{name}.lora_A.weight"] = (rank, cols)
        sizes[f"base_model.model.{name}.lora_B.weight"] = (rows, rank)
    folder.mkdir()

    def values(name: str) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        return [random.normal(0, 0.02, sizes[name]).astype(np.float32)]

    write_safetensors(folder / "adapter_model.safetensors", sizes, dict.fromkeys(sizes, "F32"), values)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
