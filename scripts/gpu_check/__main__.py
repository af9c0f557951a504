"""The command line of scripts/gpu_check.sh."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import tarfile
import time
from pathlib import Path

from gpu_check import machine, packages, records, report
from gpu_check.context import ROOT, Context
from gpu_check.plan import ALIASES, PIECES, select
from gpu_check.records import Results
from gpu_check.runner import Runner

_HELP = f"""\
On a machine without a network:
  The sources, and what such a machine lacks: wheels, and GoogleTest's development package. Fetch both beforehand into
  .whl/, for Python 3.12 or the one named with --python:
      scripts/gpu_check.sh --pack .whl
  which is, and then packs the large wheels again without what is not used:
      {shlex.join(packages.download_command(".whl"))}
  nlohmann-json and GoogleTest are what the build needs, pytest-asyncio the engine's tests; the rest is for bench5.
  build/gpu_check/products.tar.gz holds what was compiled: brought along to the next machine, nothing is built there.
  Results are in benchmarks/results/: brought along, pieces that passed with the same sources are not run again.

Environment: OUT names a folder that results, logs and products are copied to. GPU_CHECK_COMMIT is the commit, where the
sources came without git. PYTHON is the Python to use.
"""


def main() -> int:
    options = _parse()
    if options.list:
        for piece in PIECES:
            print(f"{piece.name:14} {piece.what} (about {piece.guess_s:.0f} s)")
        for name, members in ALIASES.items():
            print(f"{name:14} = {' '.join(members)}")
        return 0
    if options.pack:
        packages.pack(options.pack, options.python)
        return 0
    context = Context(
        rehearse=options.rehearse,
        jobs=options.jobs,
        architecture=options.architecture or _architecture(),
        wheels=options.wheels.absolute(),
        trace=options.trace.absolute() if options.trace else None,
        trace_requests=options.requests,
        model_dir=options.model_dir.absolute() if options.model_dir else None,
        settings=dict(part.split("=", 1) for part in options.set),
    )
    began = time.monotonic()
    results = Results(options.results or _results_file(context))
    results.machine, results.commit = machine.read(context), records.commit()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    runner = Runner(context, results, budget_s=options.budget_s, again=options.again, say=say)
    skips = runner.run(select(options.pieces))
    results.save()
    page = results.file.with_suffix(".md")
    page.write_text(report.markdown(results), encoding="utf-8")
    _copy_out(context, results.file, page)
    print(report.terminal(results, skips, results.file), flush=True)
    chosen = {piece.name for piece in select(options.pieces)}
    return int(any(results.records[name].outcome.status == "failed" for name in chosen & results.records.keys()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Builds, tests and measures the engine on a machine with a GPU.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("pieces", nargs="*", metavar="PIECE", help="which pieces (all, in the order of --list)")
    add("--list", action="store_true", help="say which pieces there are")
    add("--rehearse", action="store_true", help="device = cpu and tiny models, to try the pieces themselves")
    add("--again", action="store_true", help="run pieces that passed before with the same sources")
    add("--budget-s", type=float, default=460, help="seconds in all; what does not fit is left out and named [460]")
    add("--trace", type=Path, help="a CSV of TIMESTAMP, ContextTokens, GeneratedTokens, for bench4")
    add("--requests", type=int, default=400, help="how many requests of the trace [400]")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine in all benchmarks")
    add("--model-dir", type=Path, help="where models are written [/dev/shm or /tmp, where there is room]")
    add("--results", type=Path, help="the results file [benchmarks/results/<the GPU>.json]")
    add("--wheels", type=Path, default=ROOT / ".whl", help="packages that were brought along [.whl]")
    add("--architecture", metavar="CC", help="compute capability to compile for, such as 90 [the GPU's]")
    add("--jobs", type=int, default=os.cpu_count() or 4, help="compilers at once [all processors]")
    add("--pack", type=Path, metavar="FOLDER", help="fetch the packages to bring along, and do nothing else")
    add("--python", default="3.12", help="for which Python to fetch [3.12]")
    options = parser.parse_args()
    try:
        select(options.pieces)
    except KeyError as error:
        parser.error(f"{error} is no piece; --list says which there are")
    for part in options.set:
        if "=" not in part:
            parser.error(f"--set {part}: expected KEY=VALUE")
    return options


def _architecture() -> str:
    gpu = machine.gpu_of()
    return gpu[3].replace(".", "") if gpu else ""


def _results_file(context: Context) -> Path:
    if context.rehearse:
        return context.work / "results.json"
    gpu = machine.gpu_of()
    name = re.sub(r"[^a-z0-9]+", "-", (gpu[0] if gpu else "no-gpu").lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def _copy_out(context: Context, *files: Path) -> None:
    """To $OUT: results, logs in one file, and what was compiled."""
    if not os.environ.get("OUT"):
        return
    out = Path(os.environ["OUT"])
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copy2(file, out / file.name)
    if context.logs.is_dir():
        with tarfile.open(out / "logs.tar.gz", "w:gz") as archive:
            archive.add(context.logs, "logs")
    products = context.work / "products.tar.gz"
    if products.is_file():
        shutil.copy2(products, out / products.name)


if __name__ == "__main__":
    sys.exit(main())
