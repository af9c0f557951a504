"""The `charonia` command."""

from __future__ import annotations

import logging
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from charonia import __version__, disk
from charonia.api.options import (
    ApiKeyOption,
    DtypeOption,
    GroupedCommand,
    ModelArgument,
    TlsCaOption,
    with_engine_options,
)
from charonia.bench.cli import app as benchmark_app
from charonia.engine_settings import spell_settings
from charonia.errors import CharoniaError, InvalidRequestError
from charonia.keys import add_keys
from charonia.option_hints import HintingGroup
from charonia.serve.command import (
    LoraOption,
    models_app,
    prepare_command,
    serve_command,
    with_adapters,
    with_setting_options,
)
from charonia.text import prompt_ids
from charonia.web.command import generate_command, web_command

app = typer.Typer(
    name="charonia",
    cls=HintingGroup,
    help="Converts, runs and measures large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables would truncate option names at 80 columns
)
app.add_typer(benchmark_app, name="benchmark")
add_keys(app)
app.add_typer(models_app, name="models")
app.command("serve", cls=GroupedCommand)(serve_command)
app.command("prepare", cls=GroupedCommand)(prepare_command)
app.command("web", cls=GroupedCommand)(web_command)
app.command("generate", cls=GroupedCommand)(generate_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


TemplateOption = Annotated[
    Path | None,
    typer.Option(help="A file with a chat template in Jinja that replaces the model's.", metavar="FILE"),
]


@app.command(cls=GroupedCommand)
@with_engine_options(environment=False)
def convert(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face model folder, a GGUF file or a hub id; or an EAGLE-3 head.", metavar="MODEL"
        ),
    ],
    dst_path: Annotated[Path, typer.Option(help="The workspace to write.")] = Path("workspace"),
    model_format: Annotated[
        str,
        typer.Option(
            help="Format of the weights: auto (detected), hf (not quantised), compressed-tensors, awq, gptq, fp8, "
            "mxfp4, modelopt."
        ),
    ] = "auto",
    dtype: DtypeOption = "auto",
    link: Annotated[bool, typer.Option("--link", help="Refer to the model's files instead of copying them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing workspace.")] = False,
    chat_template: TemplateOption = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Convert a Hugging Face model to a workspace. The inference parameters given here are written to its config.ini.
    --tp also splits the weights over this number of ranks."""
    from charonia.weights.convert import convert as copy
    from charonia.weights.convert import link_workspace
    from charonia.weights.workspace import is_head, model_task

    path = (partial(link_workspace, head=None) if link else copy)(
        model,
        dst_path,
        model_format=model_format,
        dtype=dtype,
        force=force,
        chat_template=chat_template,
        settings=spell_settings(settings or {}),
        show_progress=True,
    )
    if is_head(path):
        print(
            f"{path} is ready. Use it: charonia serve MODEL --speculative-method eagle3 --speculative-model {dst_path}"
        )
        return
    chat = f" Chat with it: charonia chat {dst_path}  " if model_task(path) == "generate" else ""
    print(f"{path} is ready.{chat} Serve it: charonia serve {dst_path}")


@app.command()
def check(workspace: Annotated[Path, typer.Argument(help="A workspace.", metavar="WORKSPACE")]) -> None:
    """Check every file of a workspace against the checksums from its creation."""
    from charonia.errors import ModelError
    from charonia.progress import Progress
    from charonia.weights import workspace as layout

    location = layout.locate(workspace)
    if location.weights is None:
        raise ModelError(f"{workspace} is a Hugging Face folder; only a workspace has checksums")
    manifest = layout.read_manifest(location.weights)
    with Progress(True).task("reading", layout.total_bytes(manifest)) as advance:
        differences = list(layout.check(location.weights, advance))
    for difference in differences:
        print(difference, file=sys.stderr)
    if differences:
        raise typer.Exit(1)
    linked = sum("sha256" not in entry for entry in manifest.files.values())
    print(f"{workspace} is valid" + (f" ({linked} linked files: sizes compared only)" if linked else ""))


@app.command(cls=GroupedCommand)
@with_engine_options(environment=True)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A workspace, a Hugging Face folder, a GGUF file or a hub id (MODEL; default: SmolLM2).",
            metavar="[MODEL]",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message at the start.")] = None,
    enter_sends: Annotated[
        bool, typer.Option("--enter-sends", help="A single Enter sends (default: an empty line sends).")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of a response.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the model's.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Only the top tokens up to this total probability; default: the model's.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Only the top k tokens; 0: all; default: the model's.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="More than 1 makes repetition less likely; default: the model's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same responses.")] = None,
    chat_template: TemplateOption = None,
    dtype: DtypeOption = "auto",
    settings: dict[str, Any] | None = None,
) -> None:
    """Chat with a model in this process: an empty line sends, `exit` quits, Ctrl-C interrupts a response."""
    from charonia.api.engine import Engine
    from charonia.api.results import SamplingParams
    from charonia.chat import run
    from charonia.serve.model import model_or_default
    from charonia.serve.models import asked_for
    from charonia.settings import inference_settings, read_settings
    from charonia.text.tokenizer import replace_chat_template

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    # A chat runs one sequence at a time, so a batch of two is enough.
    chosen = {"max_batch_size": 2, "stream_interval_ms": 0, **(settings or {})}
    named = model_or_default(
        model or asked_for(read_settings())[0][1],
        inference_settings(spell_settings(settings or {})),
        lambda text: print(text, file=sys.stderr),
    )
    with Engine.from_pretrained(named, dtype=dtype, show_progress=True, **chosen) as engine:
        if chat_template is not None:
            replace_chat_template(engine.tokenizer, chat_template)
        run(engine, sampling, system=system, enter_sends=enter_sends)


@app.command(cls=GroupedCommand)
@with_engine_options(environment=True)
def plan(
    model: ModelArgument,
    users: Annotated[int | None, typer.Option(min=1, help="Users at once; prints the longest context.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens per user; prints the number of users.")] = None,
    memory: Annotated[
        str, typer.Option(help="Memory of each GPU, or of the machine for the CPU, of another machine: 80GiB.")
    ] = "",
    dtype: DtypeOption = "auto",
    lora: LoraOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Show how much memory a model needs, and how many users with how much context fit, without loading it. Weights on
    the hub are not downloaded.

    Exit code 1 if the numbers given with --users and --context do not fit."""
    import json

    from charonia.weights.plan import make_plan, show

    made = make_plan(model, with_adapters(spell_settings(settings or {}), lora), dtype=dtype, memory=memory)
    refusal = made.refusal(users, context)
    if json_output:
        print(json.dumps(made.answers(users, context), indent=2))
    else:
        show(made, users, context, Console(soft_wrap=True))
    if refusal is not None:
        if json_output:
            raise typer.Exit(1)
        raise InvalidRequestError(refusal)


@app.command(cls=GroupedCommand)
@with_engine_options(environment=True)
def evaluate(
    model: ModelArgument,
    against: Annotated[
        str | None, typer.Option(help="The 16-bit model to compare with; MODEL itself to measure KV quantisation.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file for perplexity and comparison; default: a short text of Charonia.")
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(help="Questions with answers, one JSON object per line; default: general questions of Charonia."),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask/--no-ask", help="Whether to ask questions.")] = True,
    window: Annotated[int, typer.Option(help="Tokens of the text that are computed together.")] = 1024,
    stride: Annotated[int, typer.Option(help="Tokens from one window to the next, at least 2.")] = 512,
    dtype: DtypeOption = "auto",
    save: Annotated[
        bool, typer.Option("--save/--no-save", help="Store the record next to the model, for plan and /v1/models.")
    ] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: dict[str, Any] | None = None,
) -> None:
    """Measure a model's quality: perplexity over a text, difference from the 16-bit model, correct answers.

    See docs/quantisation.md."""
    import json

    from charonia.quality.evaluate import evaluate as run
    from charonia.quality.evaluate import show

    record = run(
        model,
        against,
        text=text,
        questions=questions,
        ask=ask,
        window=window,
        stride=stride,
        dtype=dtype,
        settings=settings,
        save=save,
        command=shlex.join(["charonia", *sys.argv[1:]]),
        show_progress=True,
    )
    if json_output:
        print(json.dumps(record.content(), indent=2))
    else:
        show(record, Console(soft_wrap=True))


def _schemes() -> list[str]:
    from charonia.quantize.command import SCHEMES

    return list(SCHEMES)


CalibrationOption = Annotated[
    Path | None,
    typer.Option(help="A text, or JSON objects, one per line, with text or messages; default: a text of Charonia."),
]
SamplesOption = Annotated[int, typer.Option(help="Maximum samples of the calibration text.")]
MaxLengthOption = Annotated[int, typer.Option(help="Maximum tokens of a sample.")]


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or a hub id, 16-bit weights.", metavar="MODEL")],
    scheme: Annotated[str, typer.Option(help="w4a16, w8a16, w8a8 or fp8.", autocompletion=_schemes)],
    dst: Annotated[Path, typer.Option(help="The folder to write.")],
    method: Annotated[
        str | None, typer.Option(help="awq, gptq, smoothquant or rtn; default: depends on the scheme.")
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input features that share a scale; 0: all. Default: 128 or what fits for w4a16, otherwise 0."
        ),
    ] = None,
    calibration: CalibrationOption = None,
    samples: SamplesOption = 128,
    max_length: MaxLengthOption = 2048,
) -> None:
    """Quantise a model's weights with llm-compressor, in a separate environment that is created if it is missing.

    The result has the compressed-tensors format: Charonia, transformers and vLLM can read it. See docs/quantisation.md.
    """
    from charonia.quantize.command import quantize as run
    from charonia.quantize.environment import signals_as_interrupts

    with signals_as_interrupts():
        path = run(
            model,
            dst,
            scheme=scheme,
            method=method,
            group_size=group_size,
            calibration=calibration,
            samples=samples,
            max_length=max_length,
            command=shlex.join(["charonia", *sys.argv[1:]]),
            say=lambda text: print(text, file=sys.stderr),
        )
    print(f"{path} is ready. Measure it: charonia evaluate {dst} --against {model}   Serve it: charonia serve {dst}")


@app.command()
def calibrate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or a hub id, 16-bit weights.", metavar="MODEL")],
    calibration: CalibrationOption = None,
    samples: SamplesOption = 128,
    max_length: MaxLengthOption = 2048,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the ranges of keys, values and activations by layer, and recommend a quant_policy.

    It runs in the environment of charonia quantize. See docs/quantisation.md."""
    import json

    from charonia.quantize.calibrate import calibrate as run
    from charonia.quantize.calibrate import show
    from charonia.quantize.environment import signals_as_interrupts

    with signals_as_interrupts():
        ranges = run(
            model,
            calibration=calibration,
            samples=samples,
            max_length=max_length,
            say=lambda text: print(text, file=sys.stderr),
        )
    if json_output:
        print(json.dumps(ranges.content(), indent=2))
    else:
        show(ranges, Console(soft_wrap=True))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A log of requests: CHARONIA_GATEWAY_LOG_REQUESTS.", metavar="FILE")],
    url: Annotated[str | None, typer.Option(help="The gateway [charonia serve on this machine].")] = None,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at the same time.")] = 8,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Send logged requests again and compare the tokens. See docs/determinism.md.

    Exit code 1 if tokens differ although the fingerprints are equal, or if a request fails."""
    import asyncio
    import json

    from charonia.replay import read_log, show, summary
    from charonia.replay import replay as run
    from charonia.serve.access import gateway_url
    from charonia.settings import read_settings

    outcomes = asyncio.run(run(read_log(file), url or gateway_url(read_settings()), api_key, tls_ca, concurrency))
    found = summary(outcomes)
    if json_output:
        print(json.dumps(found, indent=2))
    else:
        show(outcomes)
    if found["broken"] or found["failed"]:
        raise typer.Exit(1)


@app.command()
@with_setting_options("run_dir", "grpc_port")
def doctor(given: dict[str, Any] | None = None) -> None:
    """Check whether this machine can serve: Python, Triton, GPU, memory, disk, ports. Each problem has a remedy. For
    `make serve`, add `--run-dir run`.

    Exit code 1 if there is a problem."""
    from charonia.doctor import examine, show
    from charonia.settings import read_settings

    findings = list(examine(read_settings(**(given or {}))))
    show(findings)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point. An error of Charonia is printed as one message on stderr, and sets the exit code, usually 1."""
    logging.addLevelName(logging.WARNING, "warning")  # as other warnings of this program
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    prompt_ids.tokenizers_alone = True
    try:
        app()
    except CharoniaError as error:
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)), highlight=False)
        sys.exit(error.exit_code)
    except OSError as error:
        if not disk.is_full_or_read_only(error):
            raise
        Console(stderr=True, soft_wrap=True).print(
            Text.assemble(("error: ", "bold red"), disk.reason(error)), highlight=False
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
