"""scripts/gpu_check.sh without a GPU: the same pieces with device = cpu and tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from gpu_check import packages, report  # noqa: E402
from gpu_check.commands import Done  # noqa: E402
from gpu_check.cpp_tests import parse  # noqa: E402
from gpu_check.plan import ALIASES, BY_NAME, PIECES, select  # noqa: E402
from gpu_check.records import ASSERTION, CRASH, DEVICE, Bar, Failure, Outcome, Record, Results  # noqa: E402


def gpu_check(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh", *map(str, arguments)],
        capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHON": sys.executable, **env},
    )  # fmt: skip


@pytest.mark.slow
def test_a_rehearsal_runs_the_pieces_writes_the_results_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{10 + index}.6805900,{20 + index},{4 + index}" for index in range(8)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    results, out = tmp_path / "results.json", tmp_path / "out"
    options = ("--rehearse", "--results", results, "--trace", trace, "--wheels", tmp_path / "none")
    first = gpu_check(*options, "machine", "bench1", "bench4", OUT=str(out))
    assert first.returncode == 0, first.stdout + first.stderr
    content = json.loads(results.read_text())
    assert {name: piece["outcome"]["status"] for name, piece in content["pieces"].items()} == {
        "machine": "passed",
        "bench1": "passed",
        "bench4": "passed",
    }
    assert content["commit"]
    assert content["pieces"]["bench4"]["outcome"]["figures"]["runs"]["all at once"]["errors"] == 0
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
    assert "go on with: scripts/gpu_check.sh bench2 bench5" in done.stdout
    assert not json.loads((tmp_path / "results.json").read_text())["pieces"]


def test_a_piece_that_fails_is_told_last_and_is_the_exit_code(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = gpu_check("--rehearse", "--results", results, "--set", "token_budget=none", "bench1")
    assert done.returncode == 1
    told = done.stdout.partition("most telling last")[2]
    assert "setting token_budget = 'none' is not valid" in told


def test_unknown_pieces_are_refused() -> None:
    done = gpu_check("bench9")
    assert done.returncode == 2
    assert "--list" in done.stderr


def test_the_help_says_what_to_bring_along() -> None:
    done = gpu_check("--help")
    assert done.returncode == 0
    assert "pip download" in done.stdout
    for package in ("nlohmann-json", "nvidia-pytriton==0.7.0", "numpy==1.26.4"):
        assert package in done.stdout


def test_pieces_and_their_names_fit_together() -> None:
    assert len(BY_NAME) == len(PIECES)
    assert select(["7b", "build"])[0] is BY_NAME["build"]
    for members in ALIASES.values():
        assert set(members) <= BY_NAME.keys()
    for piece in PIECES:
        module, _, function = piece.run.partition(":")
        assert f"def {function}(" in (ROOT / "scripts" / "gpu_check" / f"{module}.py").read_text()
        assert set(piece.needs) <= BY_NAME.keys()
        assert piece.guess_s < piece.limit_s


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


def results_with(tmp_path: Path, **outcomes: Outcome) -> Results:
    results = Results(tmp_path / "results.json")
    results.machine = {"gpu": "NVIDIA Test"}
    results.records = {
        name.replace("_", "-"): Record(outcome, "abc", 1.0, "2026-01-01") for name, outcome in outcomes.items()
    }
    results.save()
    return Results(results.file)


def test_the_most_telling_failure_is_the_last_thing_said(tmp_path: Path) -> None:
    results = results_with(
        tmp_path,
        ops=Outcome(
            "failed", "2 failed", failures=[Failure("a", "assertion", ASSERTION), Failure("b", "error 700", DEVICE)]
        ),
        bench1=Outcome("passed", "", bars=[Bar("1", "share", 75.0, "%", 80.0), Bar("1", "other", 81.0, "%", 80.0)]),
    )
    text = report.terminal(results, [], results.file)
    assert text.splitlines()[-1].strip() == "error 700"
    assert "NOT MET" in text
    page = report.markdown(results)
    assert "| 1 | share | 80 % | 75 % | NOT MET |" in page
    assert "| 1 | other | 80 % | 81 % | met |" in page


def test_the_peers_rate_is_compared_with_the_table_of_the_same_results(tmp_path: Path) -> None:
    table = {"rows": [{"batch": 32, "total_output_tokens_per_s": 6000.0}]}
    peer = {"batch": 32, "output_tokens_per_s": 1000.0, "what": "transformers"}
    results = results_with(tmp_path, bench2=Outcome("passed", "", table), peer=Outcome("passed", "", peer))
    [(_, bar)] = report.bars_of(results)
    assert (bar.measured, bar.asked, bar.met) == (6.0, 5.0, True)


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


def test_the_command_that_fetches_packages_names_all_of_them() -> None:
    command = packages.download_command(".whl")
    assert set(packages.GENERAL + packages.TRITON) <= set(command)
    assert "--no-deps" in command
