"""The C++ tests on the device, suite by suite, so that an error that stays with a process spoils one suite at most."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check import python_tests
from gpu_check.build import test_program
from gpu_check.commands import Done, run
from gpu_check.context import Context
from gpu_check.records import ASSERTION, CRASH, DEVICE, Failure, Outcome, skipped

# Suites of the engine as a whole; the others test operations, kernels and what plans them.
_ENGINE = re.compile("engine", re.IGNORECASE)
_DEVICE_ERROR = re.compile(r"cuda|cublas|nccl|illegal|misaligned|launch|device", re.IGNORECASE)
# A test that hangs must not cost what the others found: the pieces end by themselves before they would be killed.
_OPS_S, _ENGINE_S, _SUITE_S = 130.0, 60.0, 50.0
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

    def outcome(self, what: str) -> Outcome:
        told = f"{self.passed} {what} passed" + (f", {self.skipped} skipped" if self.skipped else "")
        if self.not_run:
            told += f"; no time for {', '.join(self.not_run)}"
        if self.failures:
            return Outcome("failed", f"{len(self.failures)} failed, {told}", failures=self.failures[:40])
        return Outcome("passed", told, {"passed": self.passed, "skipped": self.skipped})


_NO_PROGRAM = "the C++ tests were not built: GoogleTest is missing, see --help"


def ops(context: Context, session: object, size: str) -> Outcome:
    if not test_program(context).is_file():
        return skipped(_NO_PROGRAM)
    tally = Tally(time.monotonic() + _OPS_S)
    for suite, tests in _suites(context).items():
        if not _ENGINE.search(suite):
            _run_suite(context, suite, tests, tally)
    return _complete(context, tally, "C++ tests")


def engine(context: Context, session: object, size: str) -> Outcome:
    """The C++ tests of the engine, then those of the Python API, which need the device as a setting only."""
    tally = Tally(time.monotonic() + _ENGINE_S)
    for suite, tests in _suites(context).items():
        if _ENGINE.search(suite):
            _run_suite(context, suite, tests, tally)
    api = python_tests.engine(context)
    tally.passed += api.figures.get("passed", 0)
    tally.skipped += api.figures.get("skipped", 0)
    tally.failures += api.failures
    return _complete(context, tally, "tests")


def _complete(context: Context, tally: Tally, what: str) -> Outcome:
    """What was not run is no success, but for a rehearsal, whose kernels are slow."""
    if tally.not_run and not context.rehearse:
        tally.failures.append(Failure("not run", ", ".join(tally.not_run)))
    return tally.outcome(what)


def memcheck(context: Context, session: object, size: str) -> Outcome:
    """The first test of every suite under compute-sanitizer, as many as there is time for."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if context.rehearse:
        return skipped("compute-sanitizer needs a GPU")
    if sanitizer is None:
        return skipped("compute-sanitizer is not on this machine")
    tally = Tally(time.monotonic() + 100)
    for suite, tests in _suites(context).items():
        if time.monotonic() > tally.ends_at:
            tally.not_run.append(suite)
            continue
        command: list[str | Path] = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", test_program(context),
                   f"--gtest_filter={tests[0]}"]  # fmt: skip
        log = context.logs / "memcheck" / f"{_file_name(suite)}.log"
        done = run(command, log, limit_s=45, env=context.environment())
        if done.code == 0:
            tally.passed += 1
        elif done.code is None:
            tally.not_run.append(suite)
        elif "Device not supported" in done.text:
            return skipped("compute-sanitizer does not support this machine's device")
        else:
            found = [line for line in done.text.splitlines() if line.startswith("=========")]
            tally.failures.append(Failure(tests[0], "\n".join(found[:14]) or done.how, DEVICE))
    return tally.outcome("suites' first tests")


def _suites(context: Context) -> dict[str, list[str]]:
    """Full names of all tests, by suite; none where they were not built."""
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
    return suites


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
