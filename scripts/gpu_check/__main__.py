"""The command line of scripts/gpu_check.sh."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from charonia.bench import machine
from charonia.errors import InvalidRequestError
from gpu_check import build, emulated, packages, records, report
from gpu_check.context import HOST, ROOT, Context
from gpu_check.kernel_tables import KERNELS
from gpu_check.plan import ALIASES, BUDGET_S, CALLS, STAGES, select
from gpu_check.records import Results
from gpu_check.runner import Runner

_HELP = f"""\
On a machine without a network:
  Here, fetch what such a machine lacks (wheels for Python 3.12 or the one named with --python, GoogleTest, headers of
  CUDA), and compile all that does not depend on its Python:
      scripts/gpu_check.sh --pack .whl --build-for 90a
  This lays it out in folders .whl/1, .whl/2, ... of {packages.TRIP_BYTES >> 20} MiB at most. There, one at a time:
      scripts/gpu_check.sh --brought .whl/1 --keep     takes it to build/gpu_check/carried, and does nothing else
      scripts/gpu_check.sh --brought .whl/2 call1      runs, with all that was taken so far
  call1, call2, call3 are what fits into {BUDGET_S} seconds each; every call ends with the command of the next. Results
  are in benchmarks/results/: brought along, stages that passed with the same sources are not run
  again. docs/gpu_testing.md has more.
  The wheels are fetched with:
      {shlex.join(packages.download_command(".whl/all"))}

Environment: OUT as --out. GPU_CHECK_COMMIT is the commit, where the sources came without git. PYTHON is the Python.
"""
_NO_GPU = """\
nvidia-smi shows no GPU here, so nothing is run. --rehearse runs every stage without one. Where there is a GPU and no
nvidia-smi, name what to compile for: --build-for 90a"""
# What comes back from such a machine: so large a file at most.
_OUT_BYTES = 16 << 20
_LOG_BYTES = 200_000


class Stopped(BaseException):
    """A signal that asks this process to end."""


def main() -> int:
    options = _parse()
    try:
        return _run(options)
    except (OSError, subprocess.CalledProcessError, InvalidRequestError) as error:
        print(f"scripts/gpu_check.sh: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.list:
        for stage in STAGES:
            print(f"{stage.name:14} {stage.what} (about {stage.guess_s:.0f} s)")
        for name, members in ALIASES.items():
            print(f"{name:14} = {' '.join(members)}")
        return 0
    architecture = options.build_for or (HOST if options.rehearse else _architecture())
    if not architecture and not (options.pack or options.keep or options.emulated):
        print(_NO_GPU, file=sys.stderr)
        return 1
    results_file = (options.results or _results_file(options.rehearse)).absolute()
    context = Context(
        rehearse=options.rehearse,
        work=(options.work or ROOT / "build" / ("gpu_check_rehearsal" if options.rehearse else "gpu_check")).absolute(),
        jobs=options.jobs,
        architecture=architecture,
        brought=(options.brought or ROOT / ".whl").absolute(),
        results=results_file,
        trace=options.trace.absolute() if options.trace else None,
        trace_requests=options.requests,
        model_dir=options.model_dir.absolute() if options.model_dir else None,
        settings=dict(part.split("=", 1) for part in options.set),
    )
    context.work.mkdir(parents=True, exist_ok=True)
    if options.emulated:
        return emulated.run(context, options.emulated.absolute())
    if options.pack:
        return _pack(context, options)
    if options.brought or not options.rehearse:  # which needs no packages, least of all for another Python
        packages.gather(context.brought, context.carried)
    if options.keep:
        kept = sorted(file.name for file in context.carried.iterdir())
        print(f"{context.carried}: {', '.join(kept) or f'nothing, and nothing was in {context.brought}'}")
        print("\n".join(packages.incomplete(context.carried)))
        return 0 if kept else 1
    return _check(context, options)


def _check(context: Context, options: argparse.Namespace) -> int:
    began = time.monotonic()
    results = Results(context.results, sys.argv[1:])
    results.machine, results.commit = machine.read(), records.commit()

    not_copied: set[str] = set()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    page = results.file.with_suffix(".md")

    def write() -> None:
        results.save()
        page.write_text(report.markdown(results), encoding="utf-8")

    def save() -> None:
        failures = []
        try:
            write()
        except (OSError, InvalidRequestError) as error:  # a disk that is full by now: what is measured next is told
            failures.append(f"results cannot be written: {error}")
        failures += _copy_out(context, options.out, results.file, page) if options.out else []
        for failure in failures:
            if failure not in not_copied:
                say(failure)
            not_copied.add(failure)

    if not context.site.is_dir() and not (context.rehearse and _installed("charonia")):
        build.make_site(context.site)  # the stage build adds what is compiled
    try:
        write()
    except (OSError, InvalidRequestError) as error:
        print(f"results cannot be written: {error}; name another file with --results", file=sys.stderr)
        return 1
    calls = [options.stages] if options.stages or not options.rehearse else [[call] for call in CALLS]
    skips, stopped = [], 0
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        for stages in calls:
            runner = Runner(context, results, budget_s=options.budget_s, again=options.again, say=say, save=save)
            skips += runner.run(select(stages))
    except Stopped as signalled:
        stopped = int(signalled.args[0])
        say(f"stopped by {signal.Signals(stopped).name}; what was found before is kept")
    save()
    if options.rehearse:
        print("\n".join(report.calls_table(results)))
    words = [word for word in sys.argv[1:] if word not in options.stages and word != "--again"]
    print(report.terminal(results, skips, results.file, words), flush=True)
    if stopped:
        return 128 + stopped
    chosen = {stage.name for stages in calls for stage in select(stages)}
    return int(any(results.records[name].outcome.status == "failed" for name in chosen & results.records.keys()))


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _stop(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # the report follows
    raise Stopped(number)


def _pack(context: Context, options: argparse.Namespace) -> int:
    compiled = None
    if options.build_for:
        packages.fetch_for_compiling()
        compiled = context.work / f"compiled_{options.build_for}"
        done = build.compile_all(context, compiled)
        if done.code != 0:
            print(f"{done.text[-4000:]}\ncompiling {done.how}", file=sys.stderr)
            return 1
    trips = packages.pack(options.pack, options.python, compiled, options.along)
    for trip in trips:
        last = trip == trips[-1]
        print(f"with {trip} there: scripts/gpu_check.sh --brought {trip} {'call1' if last else '--keep'}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh",
        description="Builds, tests and measures the engine on a machine with a GPU.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    out = os.environ.get("OUT")
    add("stages", nargs="*", metavar="STAGE", help="which stages (all, in the order of --list)")
    add("--list", action="store_true", help="say which stages there are")
    add(
        "--rehearse",
        action="store_true",
        help="every call without a GPU: device = cpu, the emulated device, tiny models",
    )
    add("--again", action="store_true", help="run stages that passed before with the same sources")
    add("--budget-s", type=_seconds, default=BUDGET_S,
        help=f"seconds of a call; what does not fit is left out and named [{BUDGET_S}]")  # fmt: skip
    add(
        "--out",
        type=Path,
        default=Path(out) if out else None,
        help="results and logs are copied there after each stage",
    )
    add("--trace", type=_existing, help="a CSV of TIMESTAMP, ContextTokens, GeneratedTokens, for bench4")
    add("--requests", type=_count, default=400, help="how many requests of the trace [400]")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine in all benchmarks")
    add("--model-dir", type=Path, help="where models are written [/dev/shm or /tmp, where there is room]")
    add(
        "--work",
        type=Path,
        help="for what is compiled, logs, tiny models [build/gpu_check or build/gpu_check_rehearsal]",
    )
    add("--results", type=Path, help="the results file [benchmarks/results/<the GPU>.json]")
    add("--brought", type=_existing, help="a folder of what was brought along [.whl]")
    add("--keep", action="store_true", help="take what was brought along, and do nothing else")
    add(
        "--jobs", type=_count, default=os.cpu_count() or 4, help="compilers and test processes at once [all processors]"
    )
    add("--pack", type=Path, metavar="FOLDER", help="lay out what to bring along, and do nothing else")
    add(
        "--build-for",
        metavar="CC",
        type=_compute_capability,
        help="compile for this GPU architecture (90a for an H200) instead of the GPU's here",
    )
    add("--along", type=_existing, action="append", default=[], metavar="PATH",
        help="with --pack: this file (the trace) or folder (a build of llama.cpp, named llama_cpp) too")  # fmt: skip
    add("--python", default="3.12", type=_python, help="with --pack: for which Python to fetch [3.12]")
    add("--emulated", type=Path, metavar="FOLDER",
        help="tests/gpu on the emulated device of this build folder, and nothing else")  # fmt: skip
    options = parser.parse_args()
    try:
        select(options.stages)
    except KeyError as error:
        parser.error(f"{error} is no stage; --list says which there are")
    for part in options.set:
        if "=" not in part:
            parser.error(f"--set {part}: expected KEY=VALUE")
    alone = [f"--{name}" for name in ("pack", "keep", "emulated") if getattr(options, name)]
    if alone and (options.stages or len(alone) > 1):
        parser.error(f"{alone[0]} does nothing else: leave out {' '.join([*alone[1:], *options.stages])}")
    if options.along and not options.pack:
        parser.error("--along is for --pack: say --pack FOLDER too")
    return options


# Types of options; argparse puts the option's name before what they say.
def _existing(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no file or folder {text}")
    return Path(text)


def _matching(text: str, pattern: str, expected: str) -> str:
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"{text}: expected {expected}")
    return text


def _seconds(text: str) -> float:
    return float(_matching(text, r"0*[1-9]\d*(\.\d+)?", "seconds, at least 1"))


def _count(text: str) -> int:
    return int(_matching(text, r"0*[1-9]\d*", "a number, at least 1"))


def _compute_capability(text: str) -> str:
    return _matching(text, r"\d{2,3}[af]?", "a compute capability without its dot: 80, 89, 90a")


def _python(text: str) -> str:
    return _matching(text, r"3\.\d+", "a Python's version: 3.12")


def _architecture() -> str:
    """To compile for: of compute capability 9.0 the architecture with Hopper's own instructions."""
    gpu = machine.gpu_of()
    number = gpu[3].replace(".", "") if gpu else ""
    return "90a" if number == "90" else number


def _results_file(rehearse: bool) -> Path:
    if rehearse:
        return ROOT / "build" / "gpu_check_rehearsal" / "results.json"
    gpu = machine.gpu_of()
    name = re.sub(r"[^a-z0-9]+", "-", (gpu[0] if gpu else "no-gpu").lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def _copy_out(context: Context, out: Path, *files: Path) -> list[str]:
    """Results first, then logs in one file and by-products, at most five files in all and none too large. Returns what
    could not be copied and why: a folder that is full or cannot be written to keeps nothing from being measured."""
    logs = context.work / "logs.tar.gz"
    failures = []
    try:
        _archive_logs(context.logs, logs)
    except OSError as error:
        failures.append(f"{logs} is not written: {error.strerror or error}")
    for file in (*files, context.work / KERNELS, logs, context.work / "cache" / "gemms.json"):
        if not file.is_file():
            continue
        if file.stat().st_size >= _OUT_BYTES:
            failures.append(f"{file.name} is not copied to {out}: it has {_OUT_BYTES >> 20} MiB or more; it is {file}")
        else:
            # A call may be killed at any time: what is there already is not cut short.
            part = out / f"{file.name}.part"
            try:
                out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, part)
                part.replace(out / file.name)
            except OSError as error:
                failures.append(f"{file.name} is not copied to {out}: {error.strerror or error}")
                with contextlib.suppress(OSError):
                    part.unlink()
    return failures


def _archive_logs(folder: Path, archive_file: Path) -> None:
    with tarfile.open(archive_file, "w:gz") as archive:
        for log in sorted(file for file in folder.rglob("*") if file.is_file()):
            try:
                content = log.read_bytes()
            except FileNotFoundError:  # a stage that runs has just begun it anew
                continue
            if len(content) > _LOG_BYTES:
                content = content[: _LOG_BYTES // 4] + b"\n[...]\n" + content[-_LOG_BYTES * 3 // 4 :]
            entry = tarfile.TarInfo(str(Path("logs") / log.relative_to(folder)))
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main())
