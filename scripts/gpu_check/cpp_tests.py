"""The C++ tests on the device, suite by suite, so that an error that stays with a process spoils one suite at most."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check import python_tests
from gpu_check.build import test_program
from gpu_check.commands import Done, run
from gpu_check.context import Context, find_tool
from gpu_check.records import ASSERTION, CRASH, DEVICE, EXPLAINED, Failure, Outcome, Results, skipped
from gpu_check.worker import Session

# Suites of the engine as a whole; the others test operations, kernels and what plans them.
_ENGINE = re.compile("engine", re.IGNORECASE)
_DEVICE_ERROR = re.compile(r"cuda|cublas|nccl|illegal|misaligned|launch|device", re.IGNORECASE)
# A test that hangs must not cost what the others found: the stages end by themselves before they would be killed.
_OPS_S, _ENGINE_S, _WHY_S, _MEMCHECK_S, _SUITE_S = 130.0, 60.0, 160.0, 90.0, 50.0
# After so many deaths of one suite the rest of it is left.
_RESTARTS = 4


@dataclass
class Tally:
    """ends_at: on time.monotonic's clock; suites that would begin later are not run."""

    ends_at: float
    not_run: list[str] = field(default_factory=list)
    passed: int = 0
    skipped: int = 0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.passed += other.passed
        self.skipped += other.skipped
        self.not_run += other.not_run
        self.failures += other.failures

    def outcome(self, what: str) -> Outcome:
        told = f"{self.passed} {what} passed" + (f", {self.skipped} skipped" if self.skipped else "")
        if self.not_run:
            told += f"; no time for {', '.join(self.not_run)}"
        if self.failures:
            return Outcome("failed", f"{len(self.failures)} failed, {told}", failures=self.failures[:40])
        return Outcome("passed", told, {"passed": self.passed, "skipped": self.skipped})


_NO_PROGRAM = "the C++ tests were not built: GoogleTest is missing, see --help"


def ops(context: Context, session: Session, size: str) -> Outcome:
    if not test_program(context).is_file():
        return skipped(_NO_PROGRAM)
    suites = {suite: tests for suite, tests in _suites(context).items() if not _ENGINE.search(suite)}
    tally = _run_suites(context, suites, _OPS_S, session)
    return _complete(context, tally, "C++ tests")


def engine(context: Context, session: Session, size: str) -> Outcome:
    """The C++ tests of the engine, then those of the Python API, which need the device as a setting only."""
    suites = {suite: tests for suite, tests in _suites(context).items() if _ENGINE.search(suite)}
    tally = _run_suites(context, suites, _ENGINE_S, session)
    api = python_tests.engine(context)
    tally.passed += api.figures.get("passed", 0)
    tally.skipped += api.figures.get("skipped", 0)
    tally.failures += api.failures
    tally.not_run += api.figures.get("no_time_for", [])
    return _complete(context, tally, "tests")


# How a test that failed is run again. Which of these passes says where to look: at what ran before it in its process,
# at kernels that begin before the one before them has ended, at what no step waits for. Sanitizers find the place.
_ALONE, _NO_OVERLAP, _WAITS = "alone", "alone, CHARONIA_CUDA_PDL=0", "alone, CHARONIA_CUDA_SYNC=1"
_AGAIN: dict[str, dict[str, str]] = {
    _ALONE: {},
    _NO_OVERLAP: {"CHARONIA_CUDA_PDL": "0"},
    _WAITS: {"CHARONIA_CUDA_SYNC": "1"},
}
_SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")


def why(context: Context, session: Session, size: str) -> Outcome:
    """Runs every C++ test that failed again, alone, in several ways; the first of each suite first."""
    failed = {failure.where for name in ("ops", "engine") for failure in _failures(context, name)}
    suites = _suites(context)
    tried = failed | {tests[0] for tests in list(suites.values())[:2]} if context.rehearse else failed
    by_place = sorted(
        (place, suite, test)
        for suite, tests in suites.items()
        for place, test in enumerate(test for test in tests if test in tried)
    )
    if not by_place:
        return Outcome("passed", "no C++ test has failed")
    tally = Tally(time.monotonic() + _WHY_S)
    for _, suite, test in by_place:
        if time.monotonic() > tally.ends_at:
            tally.not_run.append(test)
            continue
        explained = _again(context, suite, test, tally.ends_at)
        tally.passed += 1
        if test in failed:  # the others are there to rehearse this
            tally.failures.append(Failure(test, explained, EXPLAINED))
        session.tell(tally.outcome("tests explained"))
    told = f"{tally.passed} tests run again" + (f"; no time for {len(tally.not_run)}" if tally.not_run else "")
    return Outcome("passed", told, failures=tally.failures)


def _failures(context: Context, stage: str) -> list[Failure]:
    record = Results(context.results).records.get(stage)
    return record.outcome.failures if record else []


def _again(context: Context, suite: str, test: str, ends_at: float) -> str:
    """What passed and what did not, in one line; then what the sanitizer found. What has not ended by ends_at, on
    time.monotonic's clock, counts as failed, and the rest is left out."""

    def limit_s(most: float) -> float:
        return min(most, ends_at - time.monotonic())

    passed: list[str] = []
    failed: list[str] = []
    found: list[str] = []
    for name, variables in _AGAIN.items():
        if limit_s(30) < 1:
            break
        log = context.logs / "why" / f"{_file_name(test + name)}.log"
        done = run(
            [test_program(context), f"--gtest_filter={test}"],
            log, limit_s=limit_s(30), env=context.environment() | variables,
        )  # fmt: skip
        (passed if done.code == 0 else failed).append(name)
    for tool in _SANITIZER_TOOLS[: 1 if _ENGINE.search(suite) else None]:
        if limit_s(45) < 1:
            break
        errors = sanitize(context, tool, test, limit_s=limit_s(45))
        if errors == "":
            passed.append(tool)
        elif errors is not None:
            failed.append(tool)
            found += [f"{tool}: {line}" for line in errors.splitlines()[:8]]
    lines = [f"passes: {'; '.join(passed) or 'nothing'}. Fails: {'; '.join(failed) or 'nothing'}.", *found]
    return "\n".join([*lines, f"Look at {_where_to_look(passed)}."])


def _where_to_look(passed: Sequence[str]) -> str:
    """The table of docs/gpu_testing.md."""
    if _ALONE in passed:
        return "what an earlier test of the same suite left behind"
    if _NO_OVERLAP in passed and _WAITS not in passed:
        return "a kernel that reads what the one before it still writes"
    if _WAITS in passed and _NO_OVERLAP not in passed:
        return "a missing wait between streams, or a host buffer that is used again too early"
    if _WAITS in passed:
        return "kernels or streams that overlap: both variables hide it"
    return "the kernel itself"


def sanitize(context: Context, tool: str, test: str, limit_s: float) -> str | None:
    """What compute-sanitizer's tool says of a test: empty when it found nothing, None when it cannot be run here."""
    sanitizer = find_tool("compute-sanitizer")
    if sanitizer is None or context.rehearse:  # which has no GPU
        return None
    command: list[str | Path] = [
        sanitizer, "--tool", tool, "--error-exitcode", "9", test_program(context), f"--gtest_filter={test}"
    ]  # fmt: skip
    done = run(command, context.logs / tool / f"{_file_name(test)}.log", limit_s=limit_s, env=context.environment())
    if done.code == 0:
        return ""
    if "Device not supported" in done.text:
        return None
    found = [line for line in done.text.splitlines() if line.startswith("=========")]
    return "\n".join(found) or done.how


def _complete(context: Context, tally: Tally, what: str) -> Outcome:
    """What was not run is no success, but for a rehearsal, whose kernels are slow."""
    if tally.not_run and not context.rehearse:
        tally.failures.append(Failure("not run", ", ".join(tally.not_run)))
    return tally.outcome(what)


def memcheck(context: Context, session: Session, size: str) -> Outcome:
    """The first test of every suite under compute-sanitizer, as many as there is time for."""
    tally = Tally(time.monotonic() + _MEMCHECK_S)
    for suite, tests in _suites(context).items():
        if time.monotonic() > tally.ends_at:
            tally.not_run.append(suite)
            continue
        errors = sanitize(context, "memcheck", tests[0], limit_s=45)
        if errors is None:
            return skipped("compute-sanitizer is not here, or does not support the device")
        if errors:
            tally.failures.append(Failure(tests[0], "\n".join(errors.splitlines()[:14]), DEVICE))
        else:
            tally.passed += 1
        session.tell(tally.outcome("suites' first tests"))
    return tally.outcome("suites' first tests")


def _suites(context: Context) -> dict[str, list[str]]:
    """Full names of all tests, by suite; none where they were not built. In a rehearsal, whose kernels are slow,
    only the first test of each suite: ctest runs them all on the emulated device."""
    if not test_program(context).is_file():
        return {}
    listed = subprocess.run(
        [test_program(context), "--gtest_list_tests"],
        capture_output=True, text=True, timeout=60, check=True, env=context.environment(),
    ).stdout  # fmt: skip
    suites: dict[str, list[str]] = {}
    suite = ""
    for line in listed.splitlines():
        name = line.partition("#")[0].rstrip()
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  ") and suite:
            suites.setdefault(suite[:-1], []).append(suite + name.strip())
    return {suite: tests[:1] for suite, tests in suites.items()} if context.rehearse else suites


def _run_suites(context: Context, suites: dict[str, list[str]], limit_s: float, session: Session) -> Tally:
    """One after the other on a GPU, whose free memory some look at; an emulated device is each process's own."""
    tally = Tally(time.monotonic() + limit_s)

    def run_one(suite: str) -> Tally:
        own = Tally(tally.ends_at)
        _run_suite(context, suite, suites[suite], own)
        return own

    at_once = context.jobs if context.rehearse else 1
    with ThreadPoolExecutor(at_once) as pool:
        # What one has found is told before the next one begins.
        for own in (pool.map if at_once > 1 else map)(run_one, suites):
            tally.add(own)
            session.tell(tally.outcome("C++ tests"))
    return tally


def _run_suite(context: Context, suite: str, tests: Sequence[str], tally: Tally) -> None:
    """Goes on in a new process after a test that died or met an error of the device, which later tests would repeat."""
    left = list(tests)
    for attempt in range(_RESTARTS + 1):
        limit_s = min(_SUITE_S, tally.ends_at - time.monotonic())
        if limit_s < 1:
            tally.not_run.append(suite)
            return
        log = context.logs / "tests" / f"{_file_name(suite)}_{attempt}.log"
        command: list[str | Path] = [test_program(context), f"--gtest_filter={':'.join(left)}"]
        if attempt < _RESTARTS:
            command.append("--gtest_fail_fast")
        done = run(command, log, limit_s=limit_s, env=context.environment())
        ran = parse(done)
        if done.code is None and context.rehearse:  # slow rather than hung
            ran.failures = [failure for failure in ran.failures if failure.weight != CRASH]
            tally.not_run.append(suite)
        tally.passed += len(ran.passed)
        tally.skipped += len(ran.skipped)
        tally.failures += ran.failures
        finished = {*ran.passed, *ran.skipped, *(failure.where for failure in ran.failures)}
        left = [test for test in left if test not in finished]
        if not left and done.code not in (0, None) and not ran.failures:
            tally.failures.append(Failure(suite, f"all tests ended, then it {done.how}:\n{done.text[-800:]}", CRASH))
        if not left or done.code == 0 or suite in tally.not_run:
            return
        if not finished:
            tally.failures.append(Failure(suite, f"{done.how}:\n{done.text[-800:]}", CRASH))
            return
    tally.failures.append(Failure(suite, f"{len(left)} more tests were not run: {', '.join(left[:5])}", 0))


@dataclass
class Ran:
    passed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


_RUN = re.compile(r"^\[ RUN      \] (\S+)")


def parse(done: Done) -> Ran:
    """What GoogleTest printed; a test that began and has no end is the one that died."""
    ran = Ran()
    current, said = "", []  # type: str, list[str]
    for line in done.text.splitlines():
        if begun := _RUN.match(line):
            current, said = begun.group(1), []
        elif current and line.startswith(("[       OK ]", "[  SKIPPED ]", "[  FAILED  ]")) and current in line:
            if line.startswith("[       OK ]"):
                ran.passed.append(current)
            elif line.startswith("[  SKIPPED ]"):
                # After a failure --gtest_fail_fast says so of all that it leaves.
                ran.skipped += [] if ran.failures else [current]
            else:
                text = "\n".join(said[:14])
                ran.failures.append(Failure(current, text, DEVICE if _DEVICE_ERROR.search(text) else ASSERTION))
            current = ""
        elif current:
            said.append(line[:300])
    if current:
        ran.failures.append(Failure(current, f"{done.how}\n" + "\n".join(said[-12:]), CRASH))
    return ran


def _file_name(suite: str) -> str:
    return re.sub(r"\W+", "_", suite)
