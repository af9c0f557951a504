"""The commands `charonia benchmark ...`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from charonia.api.options import with_engine_options
from charonia.bench.checkout import add_commands
from charonia.bench.options import JsonOption
from charonia.engine_settings import MEASURED
from charonia.errors import InvalidRequestError, ModelError

if TYPE_CHECKING:
    from charonia.api.engine import Engine
    from charonia.bench.records import Record
    from charonia.bench.targets import OpenTarget

app = typer.Typer(help="Measure speed.", no_args_is_help=True, pretty_exceptions_enable=False)

DtypeOption = Annotated[str, typer.Option(help="Type of the weights: auto (the model's own), bf16, fp16 or fp32.")]
ModelArgument = Annotated[str, typer.Argument(help="A workspace, a Hugging Face model folder or a hub id.")]


UrlOption = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of Triton's gRPC or the gateway's URL [those that charonia serve has here: CHARONIA_GRPC_PORT, "
        "CHARONIA_GATEWAY_PORT and others hold].",
        show_default=False,
    ),
]


KeyOption = Annotated[
    str | None,
    typer.Option(envvar="CHARONIA_API_KEY", show_envvar=True, help="For a gateway that asks for a key."),
]
CaOption = Annotated[
    Path | None, typer.Option(help="PEM file: certificates that the gateway's comes from [public ones], for https.")
]


class TargetKind(str, Enum):
    """Who is measured."""

    in_process = "in-process"
    triton = "triton"
    gateway = "gateway"


class StreamTarget(str, Enum):
    """What a stream goes through: Triton alone, or the gateway too; with calls for its answers, or a subscription. In
    process: nothing, and only how late events come is measured, as often as they come by calls or by a subscription; on
    a GPU beside the servers of the others, so both need room."""

    triton = "triton"
    gateway = "gateway"
    triton_subscribed = "triton-subscribed"
    gateway_subscribed = "gateway-subscribed"
    in_process = "in-process"
    in_process_subscribed = "in-process-subscribed"


class KernelSizes(str, Enum):
    """Sizes of the shapes that single kernels are measured with."""

    full = "full"
    quick = "quick"
    tiny = "tiny"


def _open(
    stack: ExitStack,
    target: TargetKind,
    url: str | None,
    model: str,
    dtype: str,
    settings: dict[str, Any],
    *,
    api_key: str | None,
    tls_ca: Path | None,
) -> tuple[OpenTarget, Engine | None]:
    """The target, and the engine where it is of this process: that one lives as long as `stack`."""
    from charonia.api.engine import Engine
    from charonia.bench import targets
    from charonia.serve.access import gateway_url, grpc_target
    from charonia.settings import read_settings

    if target is TargetKind.triton:
        return targets.triton(url or grpc_target(read_settings())), None
    if target is TargetKind.gateway:
        return targets.gateway(url or gateway_url(read_settings()), api_key, tls_ca), None
    engine = stack.enter_context(Engine.from_pretrained(model, dtype=dtype, show_progress=True, **settings))
    return targets.in_process(engine), engine


def _show(console: Console, file: Path | None, about: dict[str, Any], records: Sequence[Record]) -> None:
    from charonia.bench.figures import print_errors
    from charonia.bench.records import print_records

    print_records(console, records)
    print_errors(console, records)
    _write(file, about, records)


def _write(file: Path | None, about: dict[str, Any], records: Sequence[Record]) -> None:
    """about: the settings of what was measured."""
    from charonia.bench.records import describe_run, write

    if file is not None:
        write(file, describe_run(about), records)


@app.command()
@with_engine_options(environment=True)
def static(
    model: ModelArgument,
    batch_size: Annotated[list[int] | None, typer.Option(help="Sequences at once; may be repeated [1, 8].")] = None,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="Prompt length; may be repeated [32].")] = None,
    output_tokens: Annotated[list[int] | None, typer.Option(help="New tokens; may be repeated [128].")] = None,
    runs: Annotated[int, typer.Option(help="Runs of each combination; medians are printed.")] = 3,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also which kernels were chosen (on a GPU).")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Batches of equal length in this process, against the device's limits measured in the same run."""
    from charonia.bench.static import print_report, run_static

    console = Console()
    report = run_static(
        model,
        batch_size or [1, 8],
        prompt_tokens or [32],
        output_tokens or [128],
        runs=runs,
        dtype=dtype,
        settings=settings or {},
        console=console,
    )
    print_report(console, report, verbose=verbose)
    _write(json_file, {**(settings or {}), **report.about()}, report.records)


@app.command()
@with_engine_options(environment=True)
def serving(
    model: Annotated[str, typer.Argument(help="The model: a workspace, folder or hub id; its tokenizer for a trace.")],
    target: Annotated[TargetKind, typer.Option(help="Who answers.")] = TargetKind.in_process,
    url: UrlOption = None,
    api_key: KeyOption = None,
    tls_ca: CaOption = None,
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one per line.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A CSV of TIMESTAMP, ContextTokens, GeneratedTokens.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="How many requests are sent.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens for each prompt of a file.")] = 128,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second, Poisson arrivals.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at once [8, where neither a rate nor a trace says when].")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="How many times faster than recorded a trace arrives.")] = 1.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the measurement.")] = 2,
    seed: Annotated[int, typer.Option(help="Of arrivals and random prompts.")] = 0,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """A stream of requests: prompts or a recorded trace, at a rate, at recorded times or so many at once."""
    from dataclasses import replace

    from charonia.bench import workload
    from charonia.bench.figures import records
    from charonia.bench.records import print_records
    from charonia.bench.serving import run_serving

    if (prompts is None) == (trace is None):
        raise InvalidRequestError("name either --prompts FILE or --trace FILE")
    if request_rate is not None and concurrency is not None:
        raise InvalidRequestError("--request-rate and --concurrency exclude each other")
    console = Console()
    with ExitStack() as stack:
        opened, engine = _open(stack, target, url, model, dtype, settings or {}, api_key=api_key, tls_ca=tls_ca)
        if prompts is not None:
            jobs = workload.jobs_from_prompts(prompts, num_requests, max_tokens)
        else:
            assert trace is not None
            tokenizer, session_len = _tokenizer_of(model, engine)
            jobs = workload.jobs_from_trace(trace, num_requests, tokenizer, session_len, seed)
            jobs = [replace(job, arrival_s=job.arrival_s / speed) for job in jobs]
        if request_rate is not None:
            jobs = workload.arrive_at_rate(jobs, request_rate, seed)
        elif trace is None and concurrency is None:
            concurrency = 8
        figures = run_serving(opened, jobs, concurrency=concurrency, warmup=warmup, console=console)
    found = records("serving", [figures], {"target": target.value})
    print_records(console, found)
    _write(json_file, {"model": model, **(settings or {})}, found)
    if figures.errors:
        answered = "the figures are of the others" if figures.errors < figures.requests else "there are no figures"
        raise ModelError(f"{figures.errors} of {figures.requests} requests failed, and {answered}: {figures.why()}")


def _tokenizer_of(model: str, engine: Any) -> tuple[Any, int]:
    """The tokenizer and the longest sequence of a model that may be served elsewhere."""
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
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts, one per line; else random words.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; may be repeated [1, 8, 32].")] = None,
    requests_per_client: Annotated[int, typer.Option(min=1, help="Requests that each client sends.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each request.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 1,
    processes: Annotated[int, typer.Option(min=1, help="Over which the clients of a server are spread.")] = 1,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """The same requests in this process, through Triton and through the gateway, one after the other."""
    from charonia.bench import workload
    from charonia.bench.compare import compare_records, run_compare

    console = Console()
    jobs: dict[int, list[workload.Job]] = {}
    for level in concurrency or [1, 8, 32]:
        count = level * requests_per_client
        if prompts is not None:
            jobs[level] = workload.jobs_from_prompts(prompts, count, max_tokens)
        else:
            jobs[level] = workload.random_jobs(model, count, 32, max_tokens, seed=level)
    results = run_compare(model, jobs, rounds=rounds, settings=settings or {}, console=console, processes=processes)
    about = {"model": model, "max_tokens": max_tokens, **(settings or {})}
    _show(console, json_file, about, compare_records(results))


@app.command()
@with_engine_options(environment=True)
def endpoints(
    model: ModelArgument,
    servers: Annotated[list[int] | None, typer.Option(min=1, help="Servers; may be repeated [1, 3].")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 12,
    num_requests: Annotated[int, typer.Option(min=1, help="How many requests are sent in a round.")] = 48,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each request.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 3,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """The same requests through a gateway with one server and with several, all of them on this machine."""
    from charonia.bench import workload
    from charonia.bench.endpoints import endpoint_records, run_endpoints

    console = Console()
    results = run_endpoints(
        model,
        workload.random_jobs(model, num_requests, 32, max_tokens, seed=0),
        levels=servers or [1, 3],
        concurrency=concurrency,
        rounds=rounds,
        settings=settings or {},
        console=console,
    )
    about = {"model": model, "max_tokens": max_tokens, "concurrency": concurrency, **(settings or {})}
    _show(console, json_file, about, endpoint_records(results))


@app.command()
@with_engine_options(environment=True)
def streaming(
    model: ModelArgument,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="At once; may be repeated [1, 8, 64, 256].")] = None,
    target: Annotated[list[StreamTarget] | None, typer.Option(help="Who streams; may be repeated [first two].")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each request.")] = 128,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="Log probabilities, and of so many most likely tokens [none].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 3,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """CPU time of a streamed response in each process, less that of the same tokens unstreamed."""
    from dataclasses import replace

    from charonia.bench.records import print_records
    from charonia.bench.streaming import TARGETS, run_streaming
    from charonia.bench.workload import random_jobs

    console = Console()
    levels = streams or [1, 8, 64, 256]
    chosen = {"max_batch_size": max(levels), **(settings or {})}
    targets = [one.value for one in target] if target else TARGETS
    [job] = random_jobs(model, 1, 32, max_tokens, seed=0)
    records = run_streaming(
        model, streams=levels, targets=targets, job=replace(job, logprobs=logprobs), rounds=rounds, settings=chosen,
        console=console,
    )  # fmt: skip
    for name in targets:  # a table each: one for all would be too wide
        print_records(console, [record for record in records if record.case["through"] == name])
    _write(json_file, {"model": model, "max_tokens": max_tokens, **chosen}, records)


@app.command()
@with_engine_options(environment=True)
def mixed(
    model: ModelArgument,
    decodes: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 7,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt in the same step.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 3,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """One step that decodes and computes a prompt, against the same in two steps."""
    from charonia.bench.steps import run_mixed

    chosen = settings or {}
    records = run_mixed(model, decodes=decodes, prompt_tokens=prompt_tokens, rounds=rounds, settings=chosen)
    _show(Console(), json_file, {"model": model, **chosen}, records)


@app.command()
@with_engine_options(environment=True)
def beside_prompts(
    model: ModelArgument,
    streams: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts that come.")] = 3900,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated.")] = 2,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """How much later tokens of running requests come while long prompts are computed, with step_time_ms and without."""
    from charonia.bench.steps import run_beside_prompts

    chosen = settings or {}
    records = run_beside_prompts(model, streams=streams, prompt_tokens=prompt_tokens, rounds=rounds, settings=chosen)
    _show(Console(), json_file, {"model": model, **chosen}, records)


@app.command()
@with_engine_options(environment=True)
def workers(
    model: ModelArgument,
    count: Annotated[
        list[int] | None, typer.Option(min=1, help="Processes of a gateway; may be repeated [1, 2, 4].")
    ] = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="At once; may be repeated [16, 64].")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 3,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """How much gateways of several processes carry. All use one engine; --device null has it compute nothing."""
    from charonia.bench.workers import run_workers
    from charonia.bench.workload import random_jobs

    console = Console()
    levels = streams or [16, 64]
    chosen = {"max_batch_size": max(levels), **(settings or {})}
    [job] = random_jobs(model, 1, 32, max_tokens, seed=0)
    records = run_workers(
        model, counts=count or [1, 2, 4], streams=levels, text=job.text, max_tokens=max_tokens, rounds=rounds,
        settings=chosen, console=console,
    )  # fmt: skip
    _show(console, json_file, {"model": model, "max_tokens": max_tokens, **chosen}, records)


@app.command()
@with_engine_options(environment=True)
def prefix(
    model: ModelArgument,
    target: Annotated[TargetKind, typer.Option(help="Who answers.")] = TargetKind.in_process,
    url: UrlOption = None,
    api_key: KeyOption = None,
    tls_ca: CaOption = None,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens that two prompts share.")] = 2000,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt after them.")] = 32,
    prefixes: Annotated[int, typer.Option(min=1, help="Different prefixes; medians over them are printed.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Time to first token with and without a prefix that an earlier prompt had."""
    from charonia.bench.prefix import run_prefix

    console = Console()
    with ExitStack() as stack:
        opened, engine = _open(
            stack,
            target,
            url,
            model,
            dtype,
            {"enable_prefix_caching": True, **(settings or {})},
            api_key=api_key,
            tls_ca=tls_ca,
        )
        tokenizer, session_len = _tokenizer_of(model, engine)
        if prefix_tokens + question_tokens + 8 > session_len:
            raise InvalidRequestError(
                f"--prefix-tokens {prefix_tokens} and --question-tokens {question_tokens} do not fit the "
                f"context of {session_len} tokens: lower one of them, or raise --session-len"
            )
        records = run_prefix(
            opened,
            tokenizer,
            prefix_tokens=prefix_tokens,
            question_tokens=question_tokens,
            prefixes=prefixes,
            seed=seed,
        )
    _show(console, json_file, {"target": target.value, "model": model, **(settings or {})}, records)


@app.command()
@with_engine_options(environment=True)
def guides(
    model: ModelArgument,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once, each with a schema of its own.")] = 8,
    output_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="With and without, in turns; medians are printed.")] = 9,
    at_most: Annotated[
        float | None, typer.Option(help="Percent that a step with guides may take longer; exit code 1 beyond.")
    ] = None,
    jumps: Annotated[
        bool,
        typer.Option("--off-and-on", help="Instead: the same schemas with jump_forward off and on, on two engines."),
    ] = False,
    dtype: DtypeOption = "auto",
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """What structured output costs: decode steps with a JSON schema for each sequence, and without any. Or what
    jump_forward saves."""
    from charonia.api.engine import Engine
    from charonia.bench.guides import measure_guides, measure_jump_forward

    chosen = {**MEASURED, "stream_interval_ms": 0, **(settings or {})}
    if jumps and at_most is not None:
        raise InvalidRequestError("--at-most is of steps with and without guides: leave it out beside --off-and-on")
    with ExitStack() as stack:

        def engine(**more: Any) -> Engine:
            made = Engine.from_pretrained(model, dtype=dtype, show_progress=True, **{**chosen, **more})
            return stack.enter_context(made)

        if jumps:
            engines = {on: engine(jump_forward=on) for on in (False, True)}
            records = measure_jump_forward(engines, batch=batch_size, tokens=output_tokens, rounds=rounds)
        else:
            records = measure_guides(engine(), batch=batch_size, tokens=output_tokens, rounds=rounds, at_most=at_most)
    _show(Console(), json_file, {"model": model, **chosen}, records)
    if any(record.met is False for record in records):
        raise typer.Exit(1)


@app.command()
@with_engine_options(environment=True)
def soak(
    model: ModelArgument,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 600,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 16,
    seed: Annotated[int, typer.Option(help="Of prompts and of when clients disconnect.")] = 0,
    growth_limit: Annotated[
        float, typer.Option(min=0, help="Growth of resident memory, as a share, that counts as a fault.")
    ] = 0.02,
    gateway: Annotated[bool, typer.Option(help="Through the gateway's REST instead of Triton's gRPC.")] = False,
    api_key: Annotated[
        list[str] | None, typer.Option(help="For the gateway; may be repeated: clients use them in turn.")
    ] = None,
    tls_ca: CaOption = None,
    json_file: JsonOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """A long mixed load through Triton with clients that disconnect; exit code 1 when anything leaks or is lost.

    The environment holds for what it serves: CHARONIA_GATEWAY_KEYS_FILE, CHARONIA_GATEWAY_TLS_CERT and others.
    """
    from charonia.bench.compare import serving as served
    from charonia.bench.soak import Guarded, run_soak

    console = Console()
    with served(model, settings or {}, tls_ca=tls_ca) as server:
        target = Guarded(server.gateway, api_key or (), tls_ca) if gateway else server.triton
        report = run_soak(
            target, server.metrics, server.pid, seconds=seconds, clients=clients, seed=seed, console=console
        )
    faults = report.faults(growth_limit)
    about = {"model": model, "seconds": seconds, "clients": clients, "faults": faults, **(settings or {})}
    if gateway:
        about |= {"url": server.gateway.partition(":")[0], "keys": len(api_key or ())}
    _show(console, json_file, about, report.records())
    for fault in faults:
        console.print(fault, style="red", markup=False)
    if faults:
        raise typer.Exit(1)


@app.command()
def kernels(
    binary: Annotated[Path, typer.Argument(help="charonia_cuda_kernels, or charonia_cuda_kernels_on_host.")],
    json_file: JsonOption = None,
    size: Annotated[
        KernelSizes, typer.Option(help="Of shapes; tiny: for charonia_cuda_kernels_on_host.")
    ] = KernelSizes.full,
    suite: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which a suite is killed.")] = 150,
) -> None:
    """Every CUDA kernel on its own, beside cuBLASLt and PyTorch; exit code 1 when something could not be measured."""
    from charonia.bench.kernels import SUITES, measure

    for name in suite or []:
        if name not in SUITES:
            raise InvalidRequestError(f"--suite {name}: expected one of {', '.join(SUITES)}")
    console = Console()
    if not measure(binary, json_file, size=size.value, suites=suite or [], limit_s=limit, console=console):
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def program(
    file: Annotated[Path, typer.Argument(help="A program of benchmarks/, such as build/charonia_scheduler.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    json_file: JsonOption = None,
) -> None:
    """A C++ benchmark (cmake -DCHARONIA_BENCHMARKS=ON): the scheduler, token masks, the CPU's kernels."""
    from charonia.bench.program import run_program

    given = arguments or []
    _show(Console(), json_file, {"program": file.name, "arguments": given}, run_program(file, given))


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Files that --json or scripts/gpu_check.sh has written.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print pages of Markdown.")] = False,
    ranges: Annotated[bool, typer.Option("--ranges", help="Beside medians, the smallest and the largest.")] = False,
) -> None:
    """The figures of files: tables, bars with what is asked and whether it is met, and where they were measured."""
    from charonia.bench import records
    from charonia.bench.report import markdown as page
    from charonia.bench.report import print_report

    for file, (run, found) in [(file, records.read(file)) for file in files]:
        if markdown:
            print(page(run, found, file.stem, ranges=ranges), end="")
        else:
            print_report(Console(), run, found, file.stem, ranges=ranges)


@app.command("make-model")
def make_model(
    folder: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    shape: Annotated[
        str,
        typer.Option(
            help="tiny, m05 (0.5 B parameters), m11 (1.1 B), llama2-7b, llama3-8b, or six numbers separated by commas: "
            "layers, hidden, heads, KV heads, intermediate, vocabulary."
        ),
    ] = "m05",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    scheme: Annotated[
        str,
        typer.Option(help="Quantised weights of the layers: w4a16, w4a16-zeros, w8a16, w8a8, fp8 or mxfp4."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of the random weights.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Repeat one random block: seconds instead of minutes for a large model.")
    ] = False,
) -> None:
    """Write a model with random weights, for measurements."""
    from charonia.bench.random_model import parse_shape, write_random_model

    if folder.exists() and any(folder.iterdir()):
        raise InvalidRequestError(f"{folder} is not empty: choose another folder")
    write_random_model(
        folder, parse_shape(shape), weight_type=dtype, scheme=scheme, seed=seed, quick=quick, show_progress=True
    )
    print(f"{folder} is ready")


add_commands(app)
