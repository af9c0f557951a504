"""Measures Charonia and its peers on random models of the same shapes, in one run.

The first time it installs the peers from PyPI into environments under build/peers/ (llama.cpp is compiled) and makes
the models there. A peer that cannot be had is named in the report with the reason, and the others are measured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cpu_peers.engines import OURS, PEERS, ROOT, EngineSpec, Environment, prepare
from benchmarks.cpu_peers.models import ModelNotMadeError, form_for, make_model
from benchmarks.cpu_peers.process import Worker, WorkerError
from benchmarks.cpu_peers.table import BITS, LONG_PROMPT, EngineResult, Report, ShapeResult, bars_for
from charonia import _engine
from charonia.bench import machine
from charonia.bench.random_model import parse_shape
from charonia.errors import InvalidRequestError, ModelError

_DECODE_PROMPT, _AFTER_TOKENS = 32, 17


def run_peers(
    *,
    shapes: Sequence[str],
    bits: int,
    prompts: Sequence[int],
    batches: Sequence[int],
    peers: Sequence[str],
    threads: int | None,
    rounds: int,
    quick: bool,
    install: bool,
    only_prepare: bool,
    folder: Path | None,
) -> Report | None:
    """peers: only these, all without one. threads: of each engine, None for all processors. quick: a tiny model, few
    tokens and one round, whatever else is said of them. folder: of environments and models. None: nothing was to be
    measured."""
    _check(bits, peers, shapes)
    decode = 128
    if quick:
        shapes, rounds, prompts, decode = ["tiny"], 1, [64], 8
    threads = threads or len(os.sched_getaffinity(0))
    folder = folder or ROOT / "build" / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    of_bits = [spec for spec in (*OURS, *PEERS) if spec.bits == bits]
    specs = [spec for spec in of_bits if spec in OURS or not peers or spec.name in peers]
    environments = {spec.name: prepare(spec, folder, install, _say) for spec in specs}
    sources = {shape: make_model(shape, folder / "models") for shape in shapes}
    forms = {
        (spec.name, shape): _form(spec, environments[spec.name], sources[shape]) for spec in specs for shape in sources
    }
    if only_prepare:
        return None

    measured = []
    for shape in sources:
        results = [
            EngineResult(
                spec.name,
                spec.label,
                missing=environments[spec.name].missing,
                versions=environments[spec.name].versions,
            )
            for spec in specs
        ]
        one = ShapeResult(
            shape, 0.0, list(prompts), list(batches), decode, _AFTER_TOKENS, [], results,
            bars_for(bits, machine.read()),
        )  # fmt: skip
        places = {spec.name: forms[spec.name, shape] for spec in specs}
        _measure(one, specs, environments, places, threads, rounds, folder)
        measured.append(one)
    return Report(threads, rounds, quick, measured)


def _check(bits: int, peers: Sequence[str], shapes: Sequence[str]) -> None:
    """Before anything is installed."""
    for shape in shapes:
        parse_shape(shape)
    if bits not in BITS:
        raise InvalidRequestError(f"--bits {bits}: expected one of {', '.join(map(str, BITS))}")
    names = [spec.name for spec in PEERS if spec.bits == bits]
    for peer in peers:
        if peer not in names:
            raise InvalidRequestError(f"--peer {peer}: expected with --bits {bits} one of {', '.join(names)}")


def _form(spec: EngineSpec, environment: Environment, source: Path) -> Path | str:
    """The engine's form of the model, or why there is none."""
    if environment.missing:
        return environment.missing
    try:
        _say(f"{spec.label}: {source.name}")
        return form_for(spec, environment, source)
    except ModelNotMadeError as error:
        return str(error)


def _measure(
    shape: ShapeResult,
    specs: list[EngineSpec],
    environments: dict[str, Environment],
    places: dict[str, Path | str],
    threads: int,
    rounds: int,
    folder: Path,
) -> None:
    """All engines are loaded, and in every round each takes its turn; a worker that fails is left out from there on."""
    longest = max(*shape.prompts, _DECODE_PROMPT) + shape.decode_tokens
    most = max(shape.batches)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for spec, result in zip(specs, shape.engines, strict=True):
            place = places[spec.name]
            if isinstance(place, str):
                result.missing = place
                continue
            _say(f"{shape.shape}: loading {spec.label}")
            try:
                worker = stack.enter_context(
                    Worker(
                        environments[spec.name].python, spec.worker, place, threads, longest, most,
                        folder / f"{spec.name}-{shape.shape}.log", spec.option,
                    )
                )  # fmt: skip
                for batch in shape.batches:
                    worker.run(batch, _DECODE_PROMPT, 4)
                result.info, result.imports_mb = worker.info, worker.imports_mb
                workers[spec.name] = worker
            except WorkerError as error:
                result.missing = str(error)
        shape.weight_bytes = shape.engines[0].info.get("weight_mb_per_step", 0.0) * 1e6
        if not shape.weight_bytes:
            raise ModelError(f"{shape.engines[0].label} cannot run {shape.shape}: {shape.engines[0].missing}")
        for index in range(rounds):
            shape.limits.append(_engine.measure_read_bandwidth(threads))
            for result in shape.engines:
                if result.name not in workers:
                    continue
                _say(f"{shape.shape}: round {index + 1} of {rounds}, {result.label}")
                try:
                    _round(workers[result.name], shape, result)
                except WorkerError as error:
                    result.missing = str(error)
                    del workers[result.name]
        shape.limits.append(_engine.measure_read_bandwidth(threads))
        for result in shape.engines:
            if result.name in workers:
                result.peak_mb = workers[result.name].peak_mb()


def _round(worker: Worker, shape: ShapeResult, result: EngineResult) -> None:
    for prompt in shape.prompts:
        long = prompt >= LONG_PROMPT
        run = worker.run(1, prompt, shape.after_tokens if long else 2)
        result.prefill_s.setdefault(prompt, []).append(run.first_s)
        if long:
            result.after_s.setdefault(prompt, []).append(run.rest_s)
    for batch in shape.batches:
        run = worker.run(batch, _DECODE_PROMPT, shape.decode_tokens)
        result.decode_s.setdefault(batch, []).append(run.rest_s)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
