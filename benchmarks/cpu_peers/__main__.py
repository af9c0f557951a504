"""Measures Charonia and its peers on random models of the same shapes, in one run.

    python -m benchmarks.cpu_peers                    m05 and m11, 2 threads where there are 2 processors
    python -m benchmarks.cpu_peers --bits 4           with weights of 4 bits (or 8)
    python -m benchmarks.cpu_peers --prompt 4096 --prompt 32768 --batch 1     long prompts
    python -m benchmarks.cpu_peers --quick            a tiny model and few tokens: does it work?

The first time it installs the peers from PyPI into environments under build/peers/ (llama.cpp is compiled) and makes
the models there. A peer that cannot be had is named in the table with the reason, and the others are measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cpu_peers.engines import OURS, PEERS, ROOT, EngineSpec, Environment, prepare
from benchmarks.cpu_peers.models import ModelNotMadeError, form_for, make_model
from benchmarks.cpu_peers.process import Worker, WorkerError
from benchmarks.cpu_peers.table import LONG_PROMPT, EngineResult, Report, ShapeResult, bars_for, markdown
from charonia import _engine
from charonia.bench import machine, records

_DECODE_PROMPT, _AFTER_TOKENS = 32, 17


def main() -> int:
    options = _parse()
    if options.quick:
        options.shape, options.rounds, options.prompt, decode = ["tiny"], 1, [64], 8
    else:
        decode = 128
    folder: Path = options.build
    folder.mkdir(parents=True, exist_ok=True)
    of_bits = [spec for spec in (*OURS, *PEERS) if spec.bits == options.bits]
    specs = [spec for spec in of_bits if spec in OURS or not options.peer or spec.name in options.peer]
    environments = {spec.name: prepare(spec, folder, not options.no_install, _say) for spec in specs}
    sources = {shape: make_model(shape, folder / "models") for shape in options.shape}
    forms = {
        (spec.name, shape): _form(spec, environments[spec.name], sources[shape]) for spec in specs for shape in sources
    }
    if options.prepare:
        return 0

    shapes = []
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
        measured = ShapeResult(
            shape, 0.0, options.prompt, options.batch, decode, _AFTER_TOKENS, [], results,
            bars_for(options.bits, machine.read()),
        )  # fmt: skip
        places = {spec.name: forms[spec.name, shape] for spec in specs}
        _measure(measured, specs, environments, places, options.threads, options.rounds, folder)
        shapes.append(measured)
    report = Report(machine.read(), options.threads, options.rounds, options.quick, shapes)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    records.write(options.output.with_suffix(".jsonl"), records.describe_run(report.about()), report.records())
    page = markdown(report)
    options.output.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)
    return 0


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
            raise SystemExit(f"{shape.engines[0].label} cannot run {shape.shape}: {shape.engines[0].missing}")
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [spec.name for spec in PEERS]
    parser.add_argument("--shape", action="append", help="m05, m11, ...; may be repeated (m05 and m11)")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="of the weights (16)")
    parser.add_argument("--prompt", action="append", type=int, help="tokens of a prefill; may be repeated (512)")
    parser.add_argument("--batch", action="append", type=int, help="sequences that decode; may be repeated (1 and 8)")
    parser.add_argument("--peer", action="append", choices=names, help="measure only these (all)")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine (all processors)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="medians are taken over them (3)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few tokens, one round")
    parser.add_argument("--no-install", action="store_true", help="measure what is installed, and name what is not")
    parser.add_argument("--prepare", action="store_true", help="install and make the models, measure nothing")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "peers", help="environments and models")
    parser.add_argument("--output", type=Path, help="without .md and .jsonl (benchmarks/results/cpu_peers...)")
    options = parser.parse_args()
    options.shape = options.shape or ["m05", "m11"]
    options.prompt, options.batch = options.prompt or [512], options.batch or [1, 8]
    name = "cpu_peers" if options.bits == 16 else f"cpu_peers_int{options.bits}"
    options.output = options.output or ROOT / "benchmarks" / "results" / name
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
