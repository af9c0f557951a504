"""The commands `charonia benchmark ...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from charonia import disk
from charonia.api.options import ApiKeyOption, DtypeOption, ModelArgument, TlsCaOption, with_engine_options
from charonia.bench.records import check_writable
from charonia.engine_settings import MEASURED
from charonia.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from charonia.api.engine import Engine
    from charonia.bench.records import Record
    from charonia.bench.targets import OpenTarget

app = typer.Typer(help="Measure speed.", no_args_is_help=True, pretty_exceptions_enable=False)

JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the figures to this file.", callback=check_writable)
]


class TargetKind(str, Enum):
    """The target of requests."""

    in_process = "in-process"
    triton = "triton"
    gateway = "gateway"


class DeviceKind(str, Enum):
    """The device that runs kernels."""

    cpu = "cpu"
    cuda = "cuda"


def _show(
    file: Path | None, about: dict[str, Any], records: Iterable[Record], *, progress: bool = False
) -> list[Record]:
    """Write the file after each record, print all of them at the end or at an error, and return them. about: the
    settings of the measurement. progress: show the last record on standard error if it is a terminal."""
    from charonia.bench.records import keep, print_records

    found: list[Record] = []
    try:
        with _progress_line() if progress and sys.stderr.isatty() else nullcontext() as line:
            for found in keep(file, about, records):
                if line:
                    text = f"figures: {len(found)}, last: {found[-1].subject}"
                    line.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
    finally:
        print_records(Console(), found)
    return found


def _progress_line() -> Live:
    """Return a line on standard error without a thread that redraws it, which would take time from measured kernels.
    Does not redirect standard output, which may be a file."""
    return Live("measuring", console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False)


class OperationKind(str, Enum):
    """The operations that `kernels` measures."""

    gemm = "gemm"
    attention = "attention"
    experts = "experts"


@app.command()
@with_engine_options(environment=True)
def static(
    model: ModelArgument,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences at once; may be repeated [1, 8].")] = None,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="Prompt length; may be repeated [32].")] = None,
    output_tokens: Annotated[list[int] | None, typer.Option(help="New tokens; may be repeated [128].")] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(metavar="BATCH,PROMPT,OUTPUT", help="Instead of the three options above; may be repeated."),
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs of each combination; medians are printed.")] = 3,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print which kernels a GPU chose.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Measure batches of equal length in this process, compared with the device's limits in the same run."""
    from charonia.bench.records import describe_run, write
    from charonia.bench.static import print_report, run_static

    console = Console()
    if case and (batch_size or prompt_tokens or output_tokens):
        raise InvalidRequestError("--case cannot be combined with --batch-size, --prompt-tokens and --output-tokens")
    cases = [_parse_case(text) for text in case or ()] or [
        (batch, prompt, output)
        for prompt in prompt_tokens or [32]
        for output in output_tokens or [128]
        for batch in batch_size or [1, 8]
    ]
    report = None
    for report in run_static(model, cases, runs=runs, dtype=dtype, settings=settings or {}, console=console):
        write(json_file, describe_run({**(settings or {}), **report.about()}), report.records)
    if report:
        print_report(console, report, verbose=verbose)


def _parse_case(text: str) -> tuple[int, int, int]:
    try:
        batch, prompt, output = map(int, text.split(","))
    except ValueError:
        raise InvalidRequestError(f"--case {text}: expected BATCH,PROMPT,OUTPUT, for example 8,1024,64") from None
    return batch, prompt, output


@app.command()
@with_engine_options(environment=True)
def adapters(
    model: ModelArgument,
    batch_size: Annotated[int, typer.Option(help="Sequences at once, each with another adapter.")] = 8,
    rank: Annotated[int, typer.Option(help="Rank of the random adapters.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="New tokens of each sequence.")] = 64,
    runs: Annotated[int, typer.Option(help="Runs; medians are printed.")] = 3,
    check: Annotated[
        bool, typer.Option("--check", help="First check that a request has the same tokens alone and in a batch.")
    ] = False,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Measure the cost of LoRA adapters, compared with the model alone in the same run."""
    from charonia.bench.adapters import check_tokens, run_adapters
    from charonia.bench.records import report_progress

    sizes = {"batch": batch_size, "rank": rank, "prompt": prompt_tokens, "output": output_tokens}
    if check:
        check_tokens(model, **sizes, settings=settings or {})
        report_progress("tokens are the same alone and in a batch")
    measured = run_adapters(model, **sizes, runs=runs, settings=settings or {}, console=Console())
    _show(json_file, settings or {}, measured)


@app.command()
@with_engine_options(environment=True)
def serving(
    model: Annotated[
        str, typer.Argument(help="The model: a workspace, folder or hub id; a trace needs its tokenizer.")
    ],
    target: Annotated[TargetKind, typer.Option(help="Target of the requests.")] = TargetKind.in_process,
    url: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of Triton's gRPC, or the gateway's URL [default: charonia serve on this machine]."
        ),
    ] = None,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: one per line, or JSON with prompt, text, messages or ShareGPT's conversations "
            "[random words]."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="A CSV of TIMESTAMP, ContextTokens, GeneratedTokens.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 64,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Random words: tokens of a prompt, from half to one and a half of this.")
    ] = 256,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="New tokens of each prompt; with random words, half to one and a half of this.")
    ] = 128,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second, Poisson arrivals.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once [8, without a rate and a trace].")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Speed-up of the arrival times in a trace.")] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and random prompts.")] = 0,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """A stream of requests: random words, prompts of a file or a recorded trace; at a rate, at recorded times or with a
    number of clients."""
    from dataclasses import replace

    from charonia.bench import workload
    from charonia.bench.figures import records
    from charonia.bench.serving import run_serving

    if prompts is not None and trace is not None:
        raise InvalidRequestError("--prompts and --trace cannot be combined")
    if request_rate is not None and concurrency is not None:
        raise InvalidRequestError("--request-rate and --concurrency cannot be combined")
    jobs = [] if prompts is None else workload.jobs_from_prompts(prompts, num_requests, max_tokens)
    with ExitStack() as stack:
        opened, engine = _open(stack, target, url, model, dtype, settings or {}, api_key, tls_ca)
        if trace is not None:
            tokenizer, session_len = _tokenizer_of(model, engine)
            jobs = workload.jobs_from_trace(trace, num_requests, tokenizer, session_len, seed)
            jobs = [replace(job, arrival_s=job.arrival_s / speed) for job in jobs]
        elif prompts is None:
            tokenizer, session_len = _tokenizer_of(model, engine)
            prompt_tokens, max_tokens = min(prompt_tokens, session_len // 3), min(max_tokens, session_len // 4)
            jobs = workload.random_jobs(tokenizer, num_requests, prompt_tokens, max_tokens, seed, spread=0.5)
        if request_rate is not None:
            jobs = workload.arrive_at_rate(jobs, request_rate, seed)
        elif trace is None and concurrency is None:
            concurrency = 8
        figures = run_serving(opened, jobs, concurrency=concurrency, warmup=warmup, console=Console())
    _show(json_file, {"model": model, **(settings or {})}, records("serving", [figures], {"target": target.value}))
    if figures.errors:
        raise ModelError(
            f"{figures.errors} of {figures.requests} requests failed and are not in the figures: "
            f"{figures.errors_text()}"
        )


def _open(
    stack: ExitStack,
    target: TargetKind,
    url: str | None,
    model: str,
    dtype: str,
    settings: dict[str, Any],
    api_key: str | None,
    tls_ca: Path | None,
) -> tuple[OpenTarget, Engine | None]:
    """Return the target, and the engine if it is in this process. `stack` closes the engine."""
    from charonia.api.engine import Engine
    from charonia.bench import targets
    from charonia.serve.access import gateway_url, grpc_target
    from charonia.settings import read_settings

    if target is TargetKind.triton:
        return partial(targets.triton, url or grpc_target(read_settings())), None
    if target is TargetKind.gateway:
        return partial(targets.gateway, url or gateway_url(read_settings()), api_key, tls_ca), None
    engine = stack.enter_context(Engine.from_pretrained(model, dtype=dtype, show_progress=True, **settings))
    return partial(targets.in_process, engine), engine


def _tokenizer_of(model: str, engine: Any) -> tuple[Any, int]:
    """Return the tokenizer and the longest sequence of a model. Another process may serve the model."""
    if engine is not None:
        return engine.tokenizer, engine.info.session_len
    from charonia import _engine
    from charonia.families import describe
    from charonia.json_files import read_json
    from charonia.text.tokenizer import load_tokenizer
    from charonia.weights import workspace

    location = workspace.locate(model)
    if location.tokenizer is None:
        raise InvalidRequestError(f"{model} has no tokenizer; name the model or its workspace")
    if location.weights is not None:
        ini = _engine.read_config_ini(location.weights / "config.ini")
        return load_tokenizer(location.tokenizer), int(ini["session_len"]) or int(ini["max_position_embeddings"])
    spec = describe(read_json(location.path / "config.json"), location.path.name)
    return load_tokenizer(location.tokenizer), spec.config.max_position_embeddings


@app.command()
@with_engine_options(environment=True)
def compare(
    model: ModelArgument,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one per line [random words].")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; may be repeated [1, 8, 32].")] = None,
    requests_per_client: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random words: tokens of a prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each request.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of everything; medians are printed.")] = 1,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Measure the same requests in this process, through Triton and through the gateway, one after the other."""
    from charonia.bench import workload
    from charonia.bench.compare import run_compare

    jobs: dict[int, list[workload.Job]] = {}
    for level in concurrency or [1, 8, 32]:
        count = level * requests_per_client
        if prompts is not None:
            jobs[level] = workload.jobs_from_prompts(prompts, count, max_tokens)
        else:
            tokenizer, _ = _tokenizer_of(model, None)
            jobs[level] = workload.random_jobs(tokenizer, count, prompt_tokens, max_tokens, seed=level)
    measured = run_compare(model, jobs, rounds=rounds, settings=settings or {}, console=Console())
    found = _show(json_file, {"model": model, "max_tokens": max_tokens, **(settings or {})}, measured)
    if texts := sorted({text for record in found for text in record.details.get("texts", ())}):
        raise ModelError(f"requests failed and are not in the figures: {'; '.join(texts)}")


@app.command()
@with_engine_options(environment=True)
def guides(
    model: ModelArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once, besides one alone.")] = 8,
    output_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="With and without, in turns; medians are printed.")] = 5,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """The cost of structured output: first token, decode steps and token masks with JSON schemas, and without any. Exit
    code 1 if a figure misses its goal."""
    from charonia.api.engine import Engine
    from charonia.bench.guides import measure_guides

    chosen = {**MEASURED, "stream_interval_ms": 0, **(settings or {})}
    with Engine.from_pretrained(model, dtype=dtype, show_progress=True, **chosen) as engine:
        records = measure_guides(engine, batch=batch_size, tokens=output_tokens, rounds=rounds)
    _show(json_file, {"model": model, **chosen}, records)
    if any(record.met is False for record in records):
        raise typer.Exit(1)


@app.command()
def kernels(
    device: Annotated[DeviceKind, typer.Option(help="Device of the kernels.")] = DeviceKind.cpu,
    shape: Annotated[str | None, typer.Option(help="Model shape, see make-model [m05; on a GPU llama3-8b].")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", help="bf16, w4a16, mxfp4, w8a16, w8a8, fp8; may be repeated [all that fit the shape]."
        ),
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows; may be repeated [1, 8, 16, 64, 512; experts: 1, 64 to 2048].")
    ] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Positions; may be repeated [1024, 8192].")] = None,
    experts: Annotated[
        list[str] | None,
        typer.Option(
            help="Layers of experts: number, experts of a row, hidden and intermediate size (128,8,2048,768); may be "
            "repeated [on a GPU those of Qwen3-30B-A3B and GPT-OSS 20B]."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a decode [4; on a GPU 64].")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all processors.")] = 0,
    reproducible: Annotated[
        bool | None,
        typer.Option(
            "--reproducible/--no-reproducible", help="With the setting reproducible or without [on a GPU both]."
        ),
    ] = None,
    only: Annotated[OperationKind | None, typer.Option(help="Measure only GEMMs, attention or experts.")] = None,
    library: Annotated[
        str | None,
        typer.Option(
            help="Measure the same operations of this library instead, as far as it has them: torch, flashinfer, xqa, "
            "flash_attn_3 or humming."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each; medians are printed.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """Measure single operations: GEMMs with weights in each format, attention with KV caches of 16 bits, FP8, 8 and 4
    bits, and layers of experts."""
    from charonia.bench.kernels import EXPERTS, FORMATS, measure_experts, measure_kernels, parse_layers, weights_of
    from charonia.bench.libraries import LIBRARIES, measure_library
    from charonia.bench.random_model import parse_shape

    gpu = device is DeviceKind.cuda
    name = shape or ("llama3-8b" if gpu else "m05")
    for one in formats or ():
        if one not in FORMATS:
            raise InvalidRequestError(f"--format {one} is not known: expected one of {', '.join(FORMATS)}")
    if library is not None and library not in LIBRARIES:
        raise InvalidRequestError(f"--library {library} is not known: expected one of {', '.join(LIBRARIES)}")
    modes = [False, True] if reproducible is None and gpu else [bool(reproducible)]
    if experts and (library or only not in (None, OperationKind.experts)):
        raise InvalidRequestError("--experts cannot be combined with --library, --only gemm or --only attention")
    layers = parse_layers(experts, formats or FORMATS) if experts else EXPERTS if gpu else ()
    ours: dict[str, Any] = {"threads": threads, "modes": modes}
    how: dict[str, Any] = {"device": device.value, "formats": formats or FORMATS, "rounds": rounds}
    operations: dict[str, Any] = {
        **how,
        "formats": how["formats"] if only in (None, OperationKind.gemm) else [],
        "rows": rows or [1, 8, 16, 64, 512],
        "contexts": context or [1024, 8192] if only in (None, OperationKind.attention) else [],
        "batch": batch or (64 if gpu else 4),
    }
    sizes = parse_shape(name)
    if library is not None:
        measured = measure_library(library, sizes, weights_of(sizes), **operations)
    else:
        measured = measure_kernels(sizes, **ours, **operations)
        if layers and only in (None, OperationKind.experts):
            expert_rows = rows or [1, 64, 128, 256, 512, 2048]
            measured = chain(measured, measure_experts(layers, **ours, **how, rows=expert_rows))
    about = {"device": device.value, "shape": name, "threads": threads, "reproducible": modes, "library": library}
    _show(json_file, about, measured, progress=True)


@app.command()
def peers(
    shape: Annotated[str, typer.Option(help="Model shape, see make-model.")] = "m05",
    bits: Annotated[int, typer.Option(help="Bits of the weights: 16, 8 or 4.")] = 16,
    gguf: Annotated[
        Path | None,
        typer.Option(
            help="Measure this GGUF file in Charonia and llama.cpp instead of a random model.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    prompt: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prefill; may be repeated [512].")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences of a decode; may be repeated [1, 8].")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each decoded sequence.")] = 128,
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this peer: llama_cpp, openvino, ...; may be repeated.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine [all processors].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of everything; medians are printed.")] = 3,
    no_install: Annotated[bool, typer.Option("--no-install", help="Measure only installed peers.")] = False,
    folder: Annotated[
        Path, typer.Option(help="Folder for environments and models.", file_okay=False, show_default=True)
    ] = Path("build/peers"),
    json_file: JsonOption = None,
) -> None:
    """Compare Charonia with llama.cpp, OpenVINO, CTranslate2 and transformers on the CPU, with a random model.

    The first run installs the peers from PyPI, each into its own environment, and creates the models.
    """
    from charonia.bench.peers import peer_records, run_peers

    threads = threads or len(os.sched_getaffinity(0))
    results, limits = run_peers(
        shape=shape, bits=bits, gguf=gguf, prompts=prompt or [512], batches=batch or [1, 8], peers=peer or [],
        tokens=tokens, threads=threads, rounds=rounds, install=not no_install, folder=folder.absolute(),
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    missing = {result.label: result.missing for result in results if result.missing}
    about = {"threads": threads, "bytes_per_s": limits, "missing": missing}
    _show(json_file, about, peer_records(gguf.name if gguf else shape, results, limits, tokens))
    print(f"{threads} threads; memory reads {min(limits) / 1e9:.1f} to {max(limits) / 1e9:.1f} GB/s")
    for name, why in missing.items():
        print(f"{name} was not measured: {why}")


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    shape: Annotated[
        str,
        typer.Option(
            help="tiny, m05 (0.5 B parameters), m11 (1.1 B), llama2-7b, llama3-8b, or six numbers separated by commas: "
            "layers, hidden, heads, KV heads, intermediate, vocabulary. With gpt-oss-, qwen3.5-, qwen3-moe-, gemma4- "
            "or glm4-moe- before the six numbers: the architecture of GPT-OSS with 32 experts, of Qwen3.5 0.8B, of "
            "Qwen3-30B-A3B with 128 experts, of Gemma 4 E2B, or of GLM-4.5 with 16 experts and an MTP layer."
        ),
    ] = "m05",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    scheme: Annotated[
        str,
        typer.Option(help="Quantised weights of the layers: w4a16, w4a16-zeros, w8a16, w8a8, fp8 or mxfp4."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Repeat one random block: seconds instead of minutes for a large model.")
    ] = False,
) -> None:
    """Write a model with random weights, for measurements."""
    from charonia.bench.random_model import parse_shape, write_random_model

    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequestError(f"{folder} is not an empty folder: choose another one")
    write = partial(write_random_model, folder, parse_shape(shape), weight_type=dtype, scheme=scheme)
    try:
        with disk.explained(folder, str(folder)):
            write(seed=seed, quick=quick, show_progress=True)
    except BaseException:  # a part of a model looks like a whole one
        with suppress(OSError):
            for file in folder.iterdir():
                file.unlink()
            if not existed:
                folder.rmdir()
        raise
    print(f"{folder} is ready")
