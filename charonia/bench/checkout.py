"""The commands of `charonia benchmark` whose code is in benchmarks/ of a checkout, which no wheel has: they take its
models and scripts."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from charonia.bench.options import JsonOption, writable
from charonia.errors import InvalidRequestError, UnsupportedError

_OWN = Path(__file__).resolve().parents[2]  # the checkout, if this package is of one


def add_commands(app: typer.Typer) -> None:
    for command in (peers, kv_quantisation, quantised_quality, real_schemas, page_load, cuda_predictions):
        app.command()(_naming_packages(command))


def _naming_packages(command: Callable[..., None]) -> Callable[..., None]:
    """The command, which says how to get a package that it lacks: no wheel brings those of these benchmarks."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "benchmarks", "charonia"):
                raise
            raise UnsupportedError(
                f"this command needs the Python package {package}, which is not installed here: pip install {package}, "
                "or run it in the environment of `make setup`"
            ) from error

    return run


def _module(name: str) -> Any:
    """benchmarks.`name` of the checkout that this package is of, or that is the current folder."""
    file = Path("benchmarks", *name.split(".")).with_suffix(".py")
    for folder in (_OWN, Path.cwd()):
        if (folder / file).is_file():
            sys.path.insert(0, str(folder))
            return importlib.import_module(f"benchmarks.{name}")
    raise UnsupportedError(
        f"this command runs in a checkout of the repository, of which it takes {file}: {_OWN}, where this package is, "
        f"and {Path.cwd()}, the current folder, are none. Change to the checkout's folder"
    )


def _print(about: dict[str, Any], records: Sequence[Any], *, ranges: bool = False, **more: Any) -> dict[str, Any]:
    """about, more: what describe_run() takes. Returns the run."""
    from charonia.bench.records import describe_run
    from charonia.bench.report import print_report

    run = describe_run(about, **more)
    print_report(Console(), run, records, "", ranges=ranges)
    return run


def _report(file: Path | None, about: dict[str, Any], records: Sequence[Any], **more: Any) -> None:
    """more: as _print() takes it."""
    from charonia.bench.records import write

    write(file, _print(about, records, **more), records)


def peers(
    shape: Annotated[list[str] | None, typer.Option(help="m05, m11, ...; may be repeated [both].")] = None,
    bits: Annotated[int, typer.Option(help="Of the weights: 16, 8 or 4.")] = 16,
    prompt: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a prefill; may be repeated [512].")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences that decode; may be repeated [1, 8].")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine [all processors].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Times that all is repeated; medians are printed.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model, few tokens, one round: does it work?")] = False,
    no_install: Annotated[
        bool, typer.Option("--no-install", help="Measure what is installed, and name what is not.")
    ] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Install and make the models, and measure nothing.")
    ] = False,
    build: Annotated[
        Path | None,
        typer.Option(help="For environments and models [build/peers of the checkout].", file_okay=False),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Other engines on the CPU beside Charonia, on random models of the same shapes; runs in a checkout.

    The first time it installs them from PyPI into environments of their own, and makes the models. One that cannot be
    installed is named with the reason.
    """
    if prepare and json_file is not None:
        raise InvalidRequestError("--prepare measures nothing: leave out --json beside it")
    report = _module("cpu_peers.run").run_peers(
        shapes=shape or ["m05", "m11"], bits=bits, prompts=prompt or [512], batches=batch or [1, 8], peers=peer or [],
        threads=threads, rounds=rounds, quick=quick, install=not no_install, only_prepare=prepare, folder=build,
    )  # fmt: skip
    if report is not None:
        _report(json_file, report.settings(), report.records(), **report.for_report())


def kv_quantisation(
    threads: Annotated[int, typer.Option(min=0, help="Of the engine; 0: as many as there are processors.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """What a KV cache of 8 or 4 bits changes in the demo model's answers; runs in a checkout."""
    records = _module("kv_quantisation").run_kv_quantisation(threads)
    _report(json_file, {"threads": threads}, records)


def quantised_quality(
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where the quantised folders go, and stay [build/quantised of the checkout].", file_okay=False
        ),
    ] = None,
    families: Annotated[
        bool,
        typer.Option("--families", help="Instead of the demo model: small random models of all families."),
    ] = False,
    family: Annotated[
        list[str] | None, typer.Option(help="Only this one: llama3, gemma2, mixtral, ...; may be repeated.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Quantise the demo model in every scheme and measure what is lost; runs in a checkout.

    A folder that is there is measured as it is. Exit code 1 where nothing could be measured, or of families where one
    could not, or where a method loses much more than rounding to the nearest.
    """
    module = _module("quantised_quality")
    if families or family:
        notes, records = module.run_families(folder, family or [])
        failed = bool(notes) or any(one.met is False for one in records)
    else:
        notes, records = module.run_quantised_quality(folder)
        failed = not records
    _report(json_file, {}, records, notes=notes)
    if failed:
        raise typer.Exit(1)


def real_schemas(
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the packages are kept [build/real_schemas of the checkout].", file_okay=False),
    ] = None,
    json_file: JsonOption = None,
    refusals: Annotated[
        Path | None, typer.Option(help="Also write every refusal here, a line each.", callback=writable)
    ] = None,
) -> None:
    """Answers under the JSON schemas of public packages: exit code 1 where one is not valid; runs in a checkout."""
    from charonia.bench.records import print_grid, write

    module = _module("real_schemas")
    found = module.run_real_schemas(folder)
    records = module.figures(found)
    run = _print({}, records)
    console = Console()
    print_grid(console, module.refusals(found))
    for case in found:
        for text in case.invalid:
            console.print(f"{case.source} {case.name}: {text}", style="red", markup=False, soft_wrap=True)
    if refusals is not None:
        refusals.write_text("".join(f"{case.source} {case.name}: {case.refusal}\n" for case in found if case.refusal))
    write(json_file, run, records)  # last: where it fails, what is not valid has been said
    if any(case.invalid for case in found):
        raise typer.Exit(1)


def page_load(
    loads: Annotated[int, typer.Option(min=1, help="How often the page is loaded.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """The size of the chat page, and how long Chromium takes to load it, with an empty cache; runs in a checkout."""
    browser, records = _module("page_load").run_page_load(loads)
    _report(json_file, {"loads": loads}, records, ranges=True, notes=[browser])


def cuda_predictions(
    results: Annotated[
        Path | None,
        typer.Option(
            help="Times to put beside the predictions, of `charonia benchmark kernels --json` "
            "[benchmarks/results/h200_kernels.json]."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Instead: compare bytes and operations with those of this charonia_cuda_kernels_on_host."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For the table [benchmarks/cuda_predictions.md].", callback=writable)
    ] = None,
) -> None:
    """What every CUDA kernel should take, and the table that its measured times are put in; runs in a checkout."""
    if against is not None and (results is not None or out is not None):
        raise InvalidRequestError("--against writes no table: leave out --results and --out beside it")
    module = _module("cuda_predictions")
    if against is not None:
        raise typer.Exit(module.check(against))
    module.write_table(results, out)
