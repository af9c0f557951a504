"""scripts/gpu_check.sh without a GPU: the same stages with device = cpu and tiny models."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from missing_tools import missing_tool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from charonia.bench import machine, records
from charonia.bench.records import Record

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from gpu_check import cpp_tests, kernel_tables, packages, peers, python_tests, report, runner, speed  # noqa: E402
from gpu_check import machine as machine_stage  # noqa: E402
from gpu_check.__main__ import _copy_out, main  # noqa: E402
from gpu_check.commands import Done  # noqa: E402
from gpu_check.context import HOST, Context  # noqa: E402
from gpu_check.cpp_tests import parse  # noqa: E402
from gpu_check.plan import ALIASES, BUDGET_S, BY_NAME, CALLS, STAGES, Stage, select  # noqa: E402
from gpu_check.records import ASSERTION, CRASH, DEVICE, Failure, Outcome, Results, StageRecord, bar  # noqa: E402
from gpu_check.runner import Runner, Skip  # noqa: E402
from gpu_check.worker import Session  # noqa: E402


def gpu_check(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHON": sys.executable, **env},
    )  # fmt: skip


@pytest.mark.slow
def test_a_rehearsal_runs_the_stages_writes_the_results_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{10 + index}.6805900,{20 + index},{4 + index}" for index in range(8)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    results, out = tmp_path / "results.json", tmp_path / "out"
    # The package that is installed, and not one that a rehearsal has compiled before.
    options = ("--rehearse", "--work", tmp_path / "work", "--results", results, "--trace", trace)
    first = gpu_check(*options, "machine", "bench1", "bench4", OUT=str(out))
    assert first.returncode == 0, first.stdout + first.stderr
    run, measured = records.read(results)
    assert {name: stage["status"] for name, stage in run["stages"].items()} == {
        "machine": "passed",
        "bench1": "passed",
        "bench4": "passed",
    }
    assert run["commit"] and run["command"][:2] == ["scripts/gpu_check.sh", "--rehearse"]
    errors = [(record.case["stage"], record.value) for record in measured if record.name == "errors"]
    assert errors == [("bench4", 0)] * 3
    assert "llama2-7b, batch 1" in (out / "results.md").read_text()
    assert (out / "results.json").read_bytes() == results.read_bytes()
    with tarfile.open(out / "logs.tar.gz") as logs:
        assert any(name.endswith("7b.log") for name in logs.getnames())

    second = gpu_check(*options, "machine", "bench1", "bench4", "--budget-s", 1)
    assert second.returncode == 0, second.stdout + second.stderr
    assert second.stdout.count("done before, with these sources") == 3


def test_what_does_not_fit_into_the_budget_is_named(tmp_path: Path) -> None:
    done = gpu_check("--rehearse", "--results", tmp_path / "results.json", "--budget-s", 5, "bench2", "bench5")
    assert done.returncode == 0, done.stderr
    [following] = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    assert following.startswith("next: scripts/gpu_check.sh --rehearse ")
    assert following.endswith(" bench2 bench5")
    assert not Results(tmp_path / "results.json").records


def test_a_stage_that_fails_is_told_last_and_is_the_exit_code(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = gpu_check(
        "--rehearse", "--work", tmp_path / "work", "--results", results, "--set", "token_budget=none", "bench1"
    )
    assert done.returncode == 1
    told = done.stdout.partition("most telling last")[2]
    assert "setting token_budget = 'none' is not valid" in told


def test_a_folder_that_cannot_be_written_to_is_said_once_and_ends_nothing(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    # As on a bare machine, without any package: rich and typer may be brought along.
    bare = script(tmp_path / "python", f'exec {sys.executable} -S "$@"\n')
    done = gpu_check("--rehearse", "--work", tmp_path / "work", "--results", results, "machine",
                     OUT="/dev/null/out", PYTHON=str(bare))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("results.json is not copied to /dev/null/out: Not a directory") == 1
    assert Results(results).records["machine"].outcome.status == "passed"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("bench9", "'bench9' is no stage; --list says which there are"),
        ("--budget-s -5", "--budget-s: -5: expected seconds, at least 1"),
        ("--jobs 0", "--jobs: 0: expected a number, at least 1"),
        ("--requests 0", "--requests: 0: expected"),
        ("--trace /no/trace.csv", "--trace: there is no file or folder /no/trace.csv"),
        ("--brought /no/whl", "--brought: there is no file or folder /no/whl"),
        ("--build-for 9.0", "--build-for: 9.0: expected a compute capability without its dot: 80, 89, 90a"),
        ("--pack .whl call1", "--pack does nothing else: leave out call1"),
        ("--along /", "--along is for --pack"),
        ("--set threads", "--set threads: expected KEY=VALUE"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_expected(
    arguments: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_without_a_gpu_nothing_is_run_but_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "gpu_of", lambda: None)
    work, results = tmp_path / "work", tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--work", str(work), "--results", str(results), "call1"])
    assert main() == 1
    told = capsys.readouterr().err
    assert "no GPU" in told and "--rehearse" in told and "--build-for" in told
    assert not list(tmp_path.iterdir())
    outcome = machine_stage.run(context_of(tmp_path, rehearse=False), None, "")
    assert outcome.status == "failed" and "nvidia-smi shows no GPU" in outcome.failures[0].text


def test_a_results_file_that_cannot_be_written_is_said_before_anything_is_run(tmp_path: Path) -> None:
    (tmp_path / "results.json.part").mkdir()
    done = gpu_check("--rehearse", "--work", tmp_path / "work", "--results", tmp_path / "results.json", "machine")
    assert done.returncode == 1
    assert "results cannot be written" in done.stderr and "--results" in done.stderr
    assert "machine" not in done.stdout


def test_a_results_file_of_another_version_is_refused_and_left(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    for content, told in (
        ('{"machine": {}, "stages": {}}', 'results.json, line 1: there is no object "run"; '),
        ('{"run": {"machine": {}, "stages": {}}}', "is no results file of this version (KeyError('commit'))"),
    ):
        results.write_text(content)
        done = gpu_check("--rehearse", "--work", tmp_path / "work", "--results", results, "machine")
        assert done.returncode == 1
        assert told in done.stderr and ": move it away, or say --results FILE" in done.stderr
        assert results.read_text() == content


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_when_it_is_stopped_what_was_found_is_kept_and_nothing_runs_on(how: signal.Signals, tmp_path: Path) -> None:
    work, results = tmp_path / "work", tmp_path / "results.json"
    program, begun = work / "compiled" / "charonia_cuda_tests_on_host", tmp_path / "begun"
    script(program, LIST + f"""case "$1" in
*Fine*) printf '[ RUN      ] Fine.A\\n[       OK ] Fine.A (0 ms)\\n';;
*) echo $$ > {begun}.new; mv {begun}.new {begun}; exec sleep 600;; esac
""")  # fmt: skip
    command = [ROOT / "scripts" / "gpu_check.sh", "--rehearse", "--again", "--jobs", "1", "--work", work]
    check = subprocess.Popen(
        [*command, "--results", results, "ops"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    wait_until(begun.is_file)
    wait_until(lambda: results.is_file() and "ops" in Results(results).records)  # of the first program
    check.send_signal(how)
    told, _ = check.communicate(timeout=120)
    wait_until(lambda: not Path(f"/proc/{begun.read_text().strip()}").exists())
    outcome = Results(results).records["ops"].outcome
    assert (outcome.status, outcome.figures) == ("failed", {"passed": 1, "skipped": 0})
    if how is signal.SIGTERM:
        assert check.returncode == 128 + how
        assert "stopped by SIGTERM" in told
        [following] = [line for line in told.splitlines() if line.startswith("next: ")]
        assert following.endswith(" call1") and "--again" not in following


def wait_until(true: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_help_says_what_to_bring_along() -> None:
    done = gpu_check("--help")
    assert done.returncode == 0
    assert "pip download" in done.stdout
    for package in ("nlohmann-json", "nvidia-pytriton==0.7.0", "numpy==1.26.4"):
        assert package in done.stdout


def test_stages_and_their_names_fit_together() -> None:
    assert len(BY_NAME) == len(STAGES)
    assert select(["7b", "build"])[0] is BY_NAME["build"]
    for members in ALIASES.values():
        assert set(members) <= BY_NAME.keys()
    for stage in STAGES:
        module, _, function = stage.run.partition(":")
        assert f"def {function}(" in (ROOT / "scripts" / "gpu_check" / f"{module}.py").read_text()
        assert set(stage.needs) <= BY_NAME.keys()
        assert stage.guess_s < stage.limit_s
    for names in CALLS.values():
        # The last stages of the third call are left to a fourth.
        assert sum(BY_NAME[name].guess_s for name in names if name != "bench5") < 1.1 * BUDGET_S
    order = CALLS["call1"]
    assert order.index("kernels") < min(order.index(name) for name in ("parity", "engine"))


OUTPUT = """\
[==========] Running 4 tests from 1 test suite.
[ RUN      ] Attention.Small
[       OK ] Attention.Small (3 ms)
[ RUN      ] Attention.Odd/1
[  SKIPPED ] Attention.Odd/1 (0 ms)
[ RUN      ] Attention.Long
attention_test.cpp:12: Failure
Expected: (error) < (0.001), actual: 0.5 vs 0.001
[  FAILED  ] Attention.Long (7 ms)
[ RUN      ] Attention.Wide
CUDA error: an illegal memory access was encountered
"""


def test_what_googletest_prints_is_understood_also_when_it_died() -> None:
    ran = parse(Done(-11, OUTPUT, 1.0))
    assert (ran.passed, ran.skipped) == (["Attention.Small"], ["Attention.Odd/1"])
    assert [(failure.where, failure.weight) for failure in ran.failures] == [
        ("Attention.Long", ASSERTION),
        ("Attention.Wide", CRASH),
    ]
    assert "actual: 0.5 vs 0.001" in ran.failures[0].text
    assert "died of SIGSEGV" in ran.failures[1].text


def test_tests_that_fail_fast_has_left_are_not_taken_for_skipped_ones() -> None:
    end = OUTPUT.index("[ RUN      ] Attention.Wide")
    left = "[ RUN      ] Attention.Wide\n[  SKIPPED ] Attention.Wide (0 ms)\n"
    assert parse(Done(1, OUTPUT[:end] + left, 1.0)).skipped == ["Attention.Odd/1"]


def context_of(folder: Path, **changes: object) -> Context:
    values = {"rehearse": True, "work": folder, "jobs": 2, "brought": folder / "brought", "architecture": HOST,
              "results": folder / "results.json"}  # fmt: skip
    (folder / "compiled").mkdir(exist_ok=True)
    return Context(**{**values, **changes})  # type: ignore[arg-type]


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text)
    file.chmod(0o755)
    return file


LIST = """case "$1" in --gtest_list_tests) printf 'Fine.\\n  A\\nRace.\\n  B\\n'; exit;; esac
"""


def nothing(outcome: object) -> None:
    pass


def test_what_a_killed_stage_has_found_is_kept(tmp_path: Path) -> None:
    context = context_of(tmp_path, jobs=1)
    script(cpp_tests.test_program(context), LIST + """case "$1" in
*Fine*) printf '[ RUN      ] Fine.A\\n[       OK ] Fine.A (0 ms)\\n';;
*) kill -9 $PPID;; esac
""")  # fmt: skip
    results = Results(context.results)
    saved: list[str] = []

    def save() -> None:
        results.save()
        saved.append(results.records["ops"].outcome.summary)

    Runner(context, results, budget_s=600, again=False, say=lambda text: None, save=save).run([BY_NAME["ops"]])
    record = Results(context.results).records["ops"]
    assert record.outcome.status == "failed"
    assert record.outcome.summary == "died of SIGKILL; so far: 1 C++ tests passed"
    assert record.outcome.figures == {"passed": 1, "skipped": 0}
    assert saved[0] == "not done when this was written; so far: 1 C++ tests passed"


def test_what_a_rehearsal_compiles_is_not_of_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    class FakeWorker:
        def __init__(self, context: Context, group: str) -> None:
            self.group = group

        def run(self, stage: Stage, limit_s: float, told: object) -> Outcome:
            limits[stage.name] = limit_s
            return Outcome("passed", "")

        def end(self) -> None:
            pass

    monkeypatch.setattr(runner, "Worker", FakeWorker)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 0.0))
    stages = [BY_NAME["build"], replace(BY_NAME["machine"], limit_s=100)]
    for rehearse in (True, False):
        limits.clear()
        context = context_of(tmp_path, rehearse=rehearse)
        results = results_with(tmp_path, build=Outcome("passed", ""))
        results.records["build"].seconds = 900  # of before, with other sources
        given = Runner(context, results, budget_s=50, again=False, say=nothing, save=lambda: None).run(stages)
        if rehearse:
            assert limits["build"] == BY_NAME["build"].limit_s
            assert not given
        else:
            assert "build" not in limits
            assert [skip.stage.name for skip in given] == ["build"]
        assert limits["machine"] == 80


def test_a_test_that_failed_is_run_again_in_ways_that_name_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(tmp_path, rehearse=False, architecture="90a")
    # Right when no kernel begins before the one before it has ended; and one tool finds the place.
    script(cpp_tests.test_program(context), LIST + '[ "$CHARONIA_CUDA_PDL" = 0 ]\n')
    script(tmp_path / "bin" / "compute-sanitizer", """case "$2" in racecheck)
echo '========= Error: Race reported between Write access at sum() and Read access at norm()'; exit 9;; esac
""")  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    results = Results(context.results)
    failures = [Failure("Race.B", "0.5 vs 0.001"), Failure("tests/unit/test_engine_api.py::test_x", "")]
    results.records = {"ops": StageRecord(Outcome("failed", "", failures=failures), "", 1.0, "")}
    results.save()
    outcome = cpp_tests.why(context, Session(nothing), "")
    [failure] = outcome.failures
    assert failure.where == "Race.B"
    assert failure.text.splitlines() == [
        "passes: alone, CHARONIA_CUDA_PDL=0; memcheck; synccheck. "
        "Fails: alone; alone, CHARONIA_CUDA_SYNC=1; racecheck.",
        "racecheck: ========= Error: Race reported between Write access at sum() and Read access at norm()",
        "Look at a kernel that reads what the one before it still writes.",
    ]
    rehearsed = cpp_tests.why(replace(context, rehearse=True, architecture=HOST), Session(nothing), "")
    assert (rehearsed.summary, rehearsed.failures) == ("no C++ test has failed", [])  # there is no such program
    script(cpp_tests.test_program(replace(context, architecture=HOST)), LIST + "exit 0\n")
    rehearsed = cpp_tests.why(replace(context, rehearse=True, architecture=HOST), Session(nothing), "")
    # What has not failed is run again to rehearse it, and is no failure.
    assert (rehearsed.summary, [each.where for each in rehearsed.failures]) == ("2 tests run again", ["Race.B"])
    assert report.terminal(results_with(tmp_path, why=outcome), [], Path("x")).count("Race reported") == 1


def test_variables_of_the_device_reach_the_tests_and_other_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHARONIA_CUDA_SYNC", "1")
    monkeypatch.setenv("CHARONIA_MAX_BATCH_SIZE", "3")
    given = context_of(tmp_path).environment()
    assert given["CHARONIA_CUDA_SYNC"] == "1"
    assert "CHARONIA_MAX_BATCH_SIZE" not in given


def test_outcomes_of_python_tests_are_kept_when_one_of_them_ends_its_process(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os\n\ndef test_a(): pass\n\ndef test_b(): assert 'CUDA' == 1\n\ndef test_c(): os._exit(3)\n"
    )
    outcome = python_tests._pytest(context_of(tmp_path, jobs=1), "some", [tests], limit_s=500)
    assert outcome.status == "failed"
    assert outcome.figures["passed"] == 1
    assert [failure.where.rpartition("::")[2] for failure in outcome.failures] == ["test_b", "test_c"]
    assert outcome.failures[0].weight == DEVICE
    assert "crashed" in outcome.failures[1].text


def test_slow_python_tests_fail_on_a_device_and_are_left_out_of_a_rehearsal(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text("import time\n\ndef test_a(): pass\n\ndef test_b(): time.sleep(500)\n")
    for rehearse, status in ((True, "passed"), (False, "failed")):
        context = context_of(tmp_path, jobs=1, rehearse=rehearse)
        lines = context.logs / "some.jsonl"
        limit_s = 5.0
        while True:  # until one has passed, on a machine of any speed
            outcome = python_tests._pytest(context, "some", [tests], limit_s=limit_s)
            if lines.is_file() and '"passed"' in lines.read_text():
                break
            limit_s *= 2
        assert outcome.status == status
        assert outcome.figures["passed"] == 1
    assert "pytest was killed" in outcome.failures[0].text


def test_a_rehearsal_runs_one_test_of_each_suite(tmp_path: Path) -> None:
    for rehearse, expected in ((True, ["Fine.A"]), (False, ["Fine.A", "Fine.C"])):
        context = context_of(tmp_path, rehearse=rehearse)
        script(cpp_tests.test_program(context), "printf 'Fine.\\n  A\\n  C\\n'\n")
        assert cpp_tests._suites(context) == {"Fine": expected}


def test_what_is_brought_along_in_trips_is_whole_again(tmp_path: Path) -> None:
    large, small = tmp_path / "compiled.tar.xz", tmp_path / "a.whl"
    source = tmp_path / "source"
    script(source / "program", "exit 0\n")
    (source / "data").write_bytes(os.urandom(5000))
    assert packages._archive(source, tmp_path / "compiled") == large
    small.write_bytes(b"wheel")
    trips = packages.lay_out([large, small], tmp_path / "trips", limit=2000)
    assert len(trips) == 3
    assert all(sum(file.stat().st_size for file in trip.iterdir()) <= 2000 for trip in trips)
    carried = tmp_path / "carried"
    packages.gather(trips[0], carried)
    assert packages.unpacked(carried, packages.COMPILED) is None
    assert packages.incomplete(carried) == [
        "compiled.tar.xz is not whole: 1 of 3 parts are here; bring the other trips along too"
    ]
    script(tmp_path / "trips" / "all" / "of_packing", "exit 0\n")
    packages.gather(tmp_path / "trips", tmp_path / "of_all")  # the folder of the trips itself
    assert sorted(file.name for file in (tmp_path / "of_all").iterdir()) == ["a.whl", "compiled.tar.xz"]
    for trip in trips[1:]:
        packages.gather(trip, carried)
    folder = packages.unpacked(carried, packages.COMPILED)
    assert folder is not None
    assert (folder / "data").read_bytes() == (source / "data").read_bytes()
    assert os.access(folder / "program", os.X_OK)
    assert sorted(file.name for file in carried.iterdir()) == ["a.whl", "compiled"]


def test_what_is_brought_again_takes_the_place_of_what_was_carried_before(tmp_path: Path) -> None:
    carried, old, new = tmp_path / "carried", tmp_path / "old", tmp_path / "new"
    for name, content in (("gguf-0.1-py3-none-any.whl", b"1"), ("gguf_more-0.1-py3-none-any.whl", b"2")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "compiled.tar.xz").write_bytes(b"a" * 3000)
    first = packages.lay_out([tmp_path / "compiled.tar.xz", *tmp_path.glob("*.whl")], old, limit=2000)
    packages.gather(first[0], carried)  # a part of what is compiled
    packages.gather(first[1], carried)
    (carried / "compiled.tar.xz").unlink()
    packages.gather(first[0], carried)

    (tmp_path / "gguf-0.1-py3-none-any.whl").rename(tmp_path / "gguf-0.2-py3-none-any.whl")
    (tmp_path / "compiled.tar.xz").write_bytes(b"b" * 3000)
    second = packages.lay_out([tmp_path / "compiled.tar.xz", tmp_path / "gguf-0.2-py3-none-any.whl"], new, limit=2000)
    packages.gather(second[1], carried)
    assert not (carried / "compiled.tar.xz").exists(), "made of parts of two"
    packages.gather(second[0], carried)
    assert (carried / "compiled.tar.xz").read_bytes() == b"b" * 3000
    assert sorted(file.name for file in carried.iterdir()) == [
        "compiled.tar.xz",
        "gguf-0.2-py3-none-any.whl",
        "gguf_more-0.1-py3-none-any.whl",
    ]


def make_wheel(folder: Path, version: str, module: str) -> Path:
    file = folder / f"some_tool-{version}-py3-none-any.whl"
    file.parent.mkdir(parents=True, exist_ok=True)
    info = f"some_tool-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{module}.py", f"version = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: some-tool\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return file


def test_wheels_of_before_do_not_shadow_those_of_now(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    for version, module in (("1.0", "some_tool_of_before"), ("0.9", "some_tool")):  # the last one wins, old or new
        brought = tmp_path / f"brought{version}"
        make_wheel(brought, version, module)
        packages.gather(brought, context.carried)
        assert packages.install(context) == "1 + 0 wheels"
    found = sorted(file.name for file in context.packages.iterdir() if file.name != "__pycache__")
    assert found == ["some_tool-0.9.dist-info", "some_tool.py"]


def test_what_cannot_be_copied_out_is_said_and_keeps_nothing_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, out = context_of(tmp_path), tmp_path / "out"
    context.results.write_text("{}")
    (tmp_path / "kernels.jsonl").write_text("[]")
    (out / "results.json").mkdir(parents=True)  # nothing can be put in its place
    [failure] = _copy_out(context, out, context.results)
    assert failure.startswith(f"results.json is not copied to {out}: ")
    assert sorted(file.name for file in out.iterdir()) == ["kernels.jsonl", "logs.tar.gz", "results.json"]

    def full(source: Path, to: Path) -> None:
        to.write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpu_check.__main__.shutil.copyfile", full)
    failures = _copy_out(context, out, context.results)
    assert [failure.partition(" is not copied")[0] for failure in failures] == [
        "results.json",
        "kernels.jsonl",
        "logs.tar.gz",
    ]
    assert all(failure.endswith("No space left on device") for failure in failures)
    assert not list(out.glob("*.part"))


def test_few_and_small_files_come_back(tmp_path: Path) -> None:
    context = context_of(tmp_path)
    for index in range(30):
        script(context.logs / "tests" / f"{index}.log", "x" * 1_000_000)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "gemms.json").write_bytes(bytes(17 << 20))
    context.results.write_text("{}")
    [failure] = _copy_out(context, tmp_path / "out", context.results)
    assert failure.startswith("gemms.json is not copied") and "16 MiB" in failure
    back = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir()}
    assert back.keys() == {"results.json", "logs.tar.gz"}
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        assert sum(entry.size for entry in logs.getmembers()) < 30 * 210_000


def test_every_call_says_what_the_next_is(tmp_path: Path) -> None:
    passed = {name: Outcome("passed", "") for name in CALLS["call1"]}
    results = results_with(tmp_path, **passed)
    assert report.next_command(results, [], ["--trace", "a b"]) == "scripts/gpu_check.sh --trace 'a b' call2"
    late = [Skip(BY_NAME["why"], "not run: about 9 s and 1 s of the budget are left")]
    assert report.next_command(results, late, []) == "scripts/gpu_check.sh why"
    results.records["build"].outcome.status = "failed"
    assert report.next_command(results, [], []) == "when the build is mended: scripts/gpu_check.sh call2"
    for stage in STAGES:
        results.records[stage.name] = StageRecord(Outcome("passed", ""), "abc", 1.0, "")
    assert report.next_command(results, [], []) == "nothing: all calls are done"
    assert "call1 in all, of 520 8" in rows_of(report.calls_table(results))
    results.machine = {}  # a rehearsal, which compiles what is brought along elsewhere
    assert "call1 in all, of 520 7" in rows_of(report.calls_table(results))


def rows_of(table: list[str]) -> list[str]:
    return [" ".join(line.replace("|", " ").split()) for line in table]


def test_llama_cpp_is_measured_where_it_was_brought_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(tmp_path)
    assert peers.llama_cpp(context, Session(nothing), "7b").status == "skipped"
    monkeypatch.setattr(peers, "model_of", lambda context, size: str(tmp_path / "model"))
    (tmp_path / "model.gguf").touch()
    program = tmp_path / "carried" / packages.LLAMA_CPP / "bin" / "llama-batched-bench"
    script(program, f"""[ "$2" = {tmp_path}/model.gguf ] || exit 1
echo loading
echo '{{"pl": 1, "speed_tg": 80.5}}'
echo '{{"pl": 32, "speed_tg": 900.0}}'
""")  # fmt: skip
    outcome = peers.llama_cpp(context, Session(nothing), "7b")
    assert outcome.status == "passed", outcome.failures
    assert (outcome.figures["batch"], outcome.figures["output_tokens_per_s"]) == (32, 900.0)


def results_with(tmp_path: Path, **outcomes: Outcome) -> Results:
    results = Results(tmp_path / "results.json")
    results.machine = {"gpu": "NVIDIA Test"}
    results.records = {
        name.replace("_", "-"): StageRecord(outcome, "abc", 1.0, "2026-01-01") for name, outcome in outcomes.items()
    }
    results.save()
    return Results(results.file)


def test_the_most_telling_failure_is_the_last_thing_said(tmp_path: Path) -> None:
    results = results_with(
        tmp_path,
        ops=Outcome(
            "failed", "2 failed", failures=[Failure("a", "assertion", ASSERTION), Failure("b", "error 700", DEVICE)]
        ),
        bench1=Outcome("passed", "", records=[bar("1", "share", 75.0, "%", 80.0), bar("1", "other", 81.0, "%", 80.0)]),
    )
    text = report.terminal(results, [], results.file)
    assert text.splitlines()[-1].strip() == "error 700"
    assert "NOT MET" in text
    page = " ".join(report.markdown(results).split())
    assert "| 1 | bench1 | share | 80 % | 75 % | NOT MET |" in page
    assert "| 1 | bench1 | other | 80 % | 81 % | met |" in page


def test_the_peers_rate_is_compared_with_the_table_of_the_same_results(tmp_path: Path) -> None:
    table = [Record.of("static", speed.TABLE_RATE, "tokens/s", 6000.0, case={"batch": 32})]
    peer = {"batch": 32, "output_tokens_per_s": 1000.0, "what": "transformers"}
    results = results_with(tmp_path, bench2=Outcome("passed", "", records=table), peer=Outcome("passed", "", peer))
    [times] = records.bars(results.all_records())
    assert (times.value, times.asked, times.met) == (6.0, 5.0, True)
    results.save()  # what follows from two stages is of none of them, and is there once
    assert Results(results.file).records == results.records
    assert records.bars(records.read(results.file)[1]) == [times]


def test_a_large_wheel_is_packed_without_what_is_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "server-1-py3-none-any.whl"
    stubs = {version: f"server/python_backend_stubs/{version}/stub" for version in ("3.11", "3.12")}
    names = ["server/bin/run", "server/tests/test_run.py", *stubs.values()]
    with zipfile.ZipFile(wheel, "w") as made:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100755 << 16
            made.writestr(entry, bytes(2_000_000))
        made.writestr("server-1.dist-info/RECORD", "".join(f"{name},sha256=x,2000000\n" for name in names))
    before = wheel.stat().st_size
    packages.slim(wheel, "3.12")
    assert wheel.stat().st_size < before / 100
    with zipfile.ZipFile(wheel) as packed:
        assert packed.namelist() == ["server/bin/run", stubs["3.12"], "server-1.dist-info/RECORD"]
        assert packed.getinfo("server/bin/run").external_attr >> 16 == 0o100755
        assert packed.read("server-1.dist-info/RECORD").decode().count("sha256") == 2


def test_layers_with_int4_are_compared_with_bf16_by_the_fastest_kernels() -> None:
    def row(kernel: str, weight: str, microseconds: float, **shape: object) -> dict[str, object]:
        of = {"model": "llama3-8b", "weight": weight, "rows": 64, "type": "bf16", **shape}
        return {"kernel": kernel, "shape": of, "microseconds": microseconds}

    weights = ("qkv", "o", "gate_up", "down")
    bf16 = [row("cuBLASLt", weight, 10, out="bf16") for weight in weights]
    int4 = [row("quant_tile", weight, 25, codes="int4") for weight in weights]
    others = [
        row("gemm_tile", "qkv", 12, out="bf16"),
        row("gemm_gated", "gate_up", 1, out="bf16"),
        row("dequantise", "qkv", 1, codes="int4"),
        row("quant_tile", "qkv", 1, codes="int8"),
        row("gemm_tile", "qkv", 1, out="bf16", model="llama2-7b"),
        row("gemm_tile", "head", 1, out="fp32"),
        row("gemm_tile", "qkv", 1, out="bf16", rows=128),
    ]
    [found] = kernel_tables.int4_bars([*bf16, *int4, *others])
    assert (found.value, found.asked, found.unit) == (0.4, 1, "x") and "64 rows" in found.name
    assert kernel_tables.int4_bars([*bf16, *int4[1:]]) == []


def test_the_command_that_fetches_packages_names_all_of_them() -> None:
    command = packages.download_command(".whl")
    assert set(packages.GENERAL + packages.TRITON) <= set(command)
    assert "--no-deps" in command


def needed_by(names: set[str]) -> set[str]:
    """Canonical names of these packages and of all that they need, as installed here."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            try:
                needed = [Requirement(line) for line in metadata.requires(name) or ()]
            except metadata.PackageNotFoundError:
                missing_tool(f"what {name} needs is read from its installation, and it is not here")
            left += [
                canonicalize_name(each.name)
                for each in needed
                if not each.marker or each.marker.evaluate({"extra": ""})
            ]
    return found


@pytest.mark.parametrize("triton", [False, True], ids=["engine", "triton"])
def test_the_packages_brought_along_and_those_of_such_machines_are_all_that_is_needed(triton: bool) -> None:
    """They are installed with --no-deps: a package that is missing would cost all Python stages."""
    own = {"charonia", "charonia-client", "charonia-gateway"}
    used = own | {"nvidia-pytriton"} if triton else {"charonia", "compressed-tensors"}
    distributions = metadata.packages_distributions()
    if lacking := [module for module in packages.MODULES if module not in distributions]:
        missing_tool(f"what needs which packages is read from those that are installed; not here: {', '.join(lacking)}")
    there = needed_by({name for module in packages.MODULES for name in distributions[module]})
    lists = packages.GENERAL + (packages.TRITON if triton else [])
    brought = {canonicalize_name(Requirement(name).name) for name in lists}
    assert needed_by(used) - own - there - brought == set()
