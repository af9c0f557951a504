"""scripts/gpu_check.sh: its parsers and its budget. `--emulated` runs the stages themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import gpu_check  # noqa: E402
from gpu_check import LATER, STAGES, Outcome, Run  # noqa: E402

from charonia.bench.limits import busy_and_gaps  # noqa: E402

GTEST = """\
[==========] Running 4 tests from 2 test suites.
[ RUN      ] CudaRows.sums
[       OK ] CudaRows.sums (3 ms)
[ RUN      ] All/CudaGemm.rows/0
some text
[  FAILED  ] All/CudaGemm.rows/0, where GetParam() = 1 (2 ms)
[ RUN      ] CudaRows.skips
[  SKIPPED ] CudaRows.skips (0 ms)
"""


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(gpu_check, "OUT", tmp_path)
    monkeypatch.setattr(gpu_check, "WORK", tmp_path)
    monkeypatch.setenv("CHARONIA_CUDA_UNPROVEN", "")  # check() sets it
    return tmp_path


FIGURE = {"benchmark": "lib", "name": "time", "unit": "us", "value": 2.5, "minimum": 2.5, "maximum": 2.5}


def passing(emulated: Path | None, limit_s: float) -> Outcome:
    return Outcome("passed", "one | figure", records=[FIGURE])


def test_gtest_results_name_failed_and_unfinished_tests() -> None:
    assert gpu_check.gtest_results(GTEST) == {
        "CudaRows.sums": "OK", "All/CudaGemm.rows/0": "FAILED", "CudaRows.skips": "SKIPPED",
    }  # fmt: skip
    assert gpu_check.gtest_results("[  FAILED  ] 2 tests, listed below:\n") == {}


def test_cpp_tests_continue_after_a_crash(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = out / "charonia_cuda_tests"
    program.write_text(
        "#!/bin/sh\ncase $1 in *A.dies*) echo '[ RUN      ] A.good'; echo '[       OK ] A.good (1 ms)';;\n"
        "*) echo '[ RUN      ] A.dies'; exit 7;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check, "ENGINE", out)
    outcome = gpu_check.cpp_tests(None, 60)
    assert outcome.status == "failed" and "1 passed, 1 failed: A.dies (ended with 7)" in outcome.summary


def test_cpp_tests_continue_after_a_test_that_hangs_and_leave_out_those_of_probe(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (out / "charonia_cuda_tests").touch()
    monkeypatch.setattr(gpu_check, "ENGINE", out)
    results = iter([(None, "[ RUN      ] A.hangs\n"), (0, "[ RUN      ] A.good\n[       OK ] A.good (1 ms)\n")])
    seen = []

    def run(
        command: Sequence[object], log: str, limit_s: float, env: dict[str, str], quiet_s: float
    ) -> tuple[int | None, str]:
        seen.append((command[1], env["CHARONIA_CUDA_MEASURE_S"], quiet_s))
        return next(results)

    monkeypatch.setattr(gpu_check, "run", run)
    outcome = gpu_check.cpp_tests(None, 500)
    assert outcome.status == "failed" and outcome.summary == "1 passed, 1 failed: A.hangs (killed)"
    unproven = ":".join(gpu_check.UNPROVEN_TESTS)
    filters = (f"--gtest_filter=*-{unproven}", f"--gtest_filter=*-{unproven}:A.hangs")
    assert seen == [(one, "2", gpu_check.QUIET_S) for one in filters]


def test_engines_measure_unproven_kernels_until_a_stage_shows_that_they_hang_or_are_wrong(out: Path) -> None:
    for name, summary, later in (
        ("probe", "wrong: HopperTest.boxes", "0"),
        ("cpp_tests", "9 passed, 1 failed: A.hangs (killed)", "0"),
        ("decode", "killed after 140 s", "0"),
        ("cpp_tests", "9 passed, 1 failed: A.wrong (FAILED)", "1"),
    ):
        seen = []

        def stage(outcome: Outcome, seen: list[str] = seen) -> Run:
            def run(emulated: Path | None, limit_s: float) -> Outcome:
                seen.append(gpu_check.environment(None)["CHARONIA_CUDA_UNPROVEN"])
                return outcome

            return run

        (out / "results.json").unlink(missing_ok=True)
        gpu_check.check(
            {name: (1, stage(gpu_check.failed(summary, ""))), "lib": (1, stage(Outcome("passed")))}, None, 900.0
        )
        assert seen == ["1", later], (name, summary)


def test_probe_reports_bits_and_names_wrong_instructions(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = out / "charonia_cuda_tests"
    monkeypatch.setattr(gpu_check, "ENGINE", out)
    passed = "[ RUN      ] HopperTest.bits\\nfigure 99.5 %% equal bits, bf16\\n[       OK ] HopperTest.bits (1 ms)\\n"
    program.write_text(f"#!/bin/sh\nprintf '{passed}'\n")
    program.chmod(0o755)
    outcome = gpu_check.probe(None, 60)
    assert outcome.status == "passed" and outcome.decisions == ["reproducible mode must not use wgmma"]
    [figure] = outcome.records
    assert (figure["value"], figure["unit"], figure["case"]) == (99.5, "%", {"what": "equal bits, bf16"})
    program.write_text(
        "#!/bin/sh\necho '[ RUN      ] HopperTest.boxes'; echo '[  FAILED  ] HopperTest.boxes (1 ms)'; exit 1\n"
    )
    outcome = gpu_check.probe(None, 60)
    assert outcome.status == "failed" and outcome.summary == "0 passed, 1 failed: HopperTest.boxes (FAILED)"
    program.write_text("#!/bin/sh\necho '[ RUN      ] HopperTest.bits'; echo '[  SKIPPED ] HopperTest.bits (1 ms)'\n")
    assert gpu_check.probe(None, 60).status == "left out"


def test_busy_time_counts_overlapping_kernels_once() -> None:
    kernels = [(0.0, 4.0, "a"), (1.0, 2.0, "b"), (3.0, 5.0, "c"), (9.0, 10.0, "d"), (11.0, 12.0, "e")]
    assert busy_and_gaps(kernels) == (7.0, [(4.0, "c", "d"), (1.0, "d", "e")])


def test_stage_that_does_not_fit_is_left_out_and_results_are_written(out: Path) -> None:
    now = gpu_check.check({"limits": (1, passing), "decode": (1000, passing)}, None, 100.0)
    assert {name: one.status for name, one in now.items()} == {"limits": "passed", "decode": "left out"}
    assert list(gpu_check.check({"lib": (1, passing)}, None, 100.0)) == ["lib"]
    stages = json.loads((out / "results.json").read_text())["stages"]
    assert set(stages) == {"limits", "decode", "lib"}  # includes the stages of the earlier call
    assert "it takes about 1000 s" in stages["decode"]["summary"] and stages["limits"]["records"] == [FIGURE]
    page = (out / "results.md").read_text()
    assert "one \\| figure" in page and "| time, us |" in page and "| 2.5 |" in page


def test_failed_build_ends_the_check_with_the_end_of_the_log(out: Path) -> None:
    bad: Run = lambda emulated, limit_s: gpu_check.failed("not compiled", "an error")  # noqa: E731
    assert list(gpu_check.check({"build": (1, bad), "limits": (1, passing)}, None, 100.0)) == ["build"]
    assert "    an error" in (out / "results.md").read_text()


def test_default_run_checks_correctness_first_and_fits_the_budget() -> None:
    default = [name for name in STAGES if name not in LATER]
    assert default[:4] == ["build", "probe", "cpp_tests", "python_tests"]
    for names in (default, ["build", *LATER]):
        assert sum(STAGES[name][0] for name in names) <= gpu_check.BUDGET_S


def test_default_run_leaves_out_no_stage_that_takes_its_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock)

    def taking(seconds: float) -> Run:
        def run(emulated: Path | None, limit_s: float) -> Outcome:
            nonlocal clock
            clock += seconds
            return Outcome("passed")

        return run

    stages = {name: (guess_s, taking(guess_s)) for name, (guess_s, _) in STAGES.items() if name not in LATER}
    now = gpu_check.check(stages, None, gpu_check.BUDGET_S)
    assert {one.status for one in now.values()} == {"passed"}


def test_command_that_runs_too_long_or_writes_nothing_is_killed(out: Path) -> None:
    env = {"PATH": "/usr/bin:/bin"}
    assert gpu_check.run(["sleep", "600"], "log", 0.1, env)[0] is None
    assert gpu_check.run(["sleep", "600"], "log", 500, env, quiet_s=0.1)[0] is None


def test_an_engine_that_does_not_start_ends_its_measurement(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import time
from charonia import Engine
from gpu_check_starts import limited_starts

Engine.from_pretrained = lambda *model, **settings: time.sleep(settings["seconds"])
with limited_starts():
    Engine.from_pretrained("quick", seconds=0)
print("started", flush=True)
with limited_starts(0.5):
    Engine.from_pretrained("hangs", seconds=600)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stdout == "started\n" and "in limited" in done.stderr
    monkeypatch.setattr(gpu_check, "run", lambda *arguments: (done.returncode, done.stderr))
    outcome = gpu_check.measured("decode", None, 140)
    assert outcome.summary == "killed: an engine did not start in 60 s"
    assert not gpu_check.measures_unproven({"decode": outcome})


def test_pdl_measures_each_setting_in_a_process_of_its_own_session(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = json.dumps({**FIGURE, "name": "decode", "case": {"weights": "bf16"}})
    settings = ",".join(f"$CHARONIA_CUDA_{name}" for name in ("PDL", "PREFETCH", "DECODE_SPLIT"))
    program = out / "python"
    session = "$(cut -d ' ' -f 6 /proc/$$/stat)"
    program.write_text(
        f"#!/bin/sh\necho '{figure}' > {out}/pdl_one.jsonl\necho \"{settings} $3 {session}\" >> {out}/seen\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpu_check.sys, "executable", str(program))
    for name in ("PDL", "PREFETCH", "DECODE_SPLIT"):
        monkeypatch.delenv(f"CHARONIA_CUDA_{name}", raising=False)
    records = list(gpu_check.measure_pdl(cast(gpu_check.Clock, None)))
    assert [one["case"] for one in records] == [{"weights": "bf16", "setting": name} for name in gpu_check.PDL]
    seen = [line.split() for line in (out / "seen").read_text().splitlines()]
    assert [line[0] for line in seen] == ["off,,", "early,,", "late,,", "late,16,", ",,64"]
    assert {(line[1], int(line[2])) for line in seen} == {("pdl_one", os.getsid(0))}


def test_unknown_stage_is_rejected() -> None:
    done = subprocess.run([ROOT / "scripts" / "gpu_check.sh", "bench1"], capture_output=True, text=True)
    assert done.returncode == 2 and "expected build, probe, cpp_tests" in done.stderr


def test_decisions_name_the_faster_way_and_missed_bars() -> None:
    def figure(name: str, value: float, **case: object) -> gpu_check.Record:
        return {"name": name, "value": value, "case": case}

    rates = {"early": 100.0, "late": 104.0, "off": 90.0}
    pdl = [figure("decode", rate, weights="bf16", setting=name) for name, rate in rates.items()]
    assert list(gpu_check.decide("pdl", pdl)) == ["bf16: early 1.000, late 1.040, off 0.900 of early: take late"]
    pdl[1]["value"] = 101.0
    assert next(gpu_check.decide("pdl", pdl)).endswith("take early, as no other is 2 % faster")
    lib = [figure("time", us, weight="o", type="bf16", rows=rows) for rows, us in ((1, 9.0), (16, 8.0), (2048, 50.0))]
    lib.append(figure("time", 25.0, weight="o", type="s8", rows=2048))
    assert list(gpu_check.decide("lib", lib)) == [
        "o: 1 row 9.0 us, 16 rows 8.0 us: pad",
        "o: int8 2.00 times bf16: cuBLASLt for W8A8",
    ]
    yard = [figure("rate", rate, kernel=name, rows=8) for name, rate in (
        ("charonia tiles", 80.0), ("a", 90.0), ("b", 100.0))]  # fmt: skip
    best = "has 80% of the best library: below 85 %, the exit rule counts"
    assert list(gpu_check.decide("yard", yard)) == [f"8 rows: charonia tiles {best}"]
    yard += [figure("rate", rate, kernel=f"charonia {name}", rows=8) for name, rate in (
        ("wgmma", 88.0), ("tiles, 8-bit KV", 50.0), ("wgmma, 8-bit KV", 50.5), ("wgmma, 4-bit KV", 40.0))]  # fmt: skip
    assert list(gpu_check.decide("yard", yard)) == [
        "8 rows: charonia wgmma has 88% of the best library: keep our attention",
        "8 rows: charonia wgmma 1.10 times tiles: prove it",
        "8 rows: charonia wgmma, 8-bit KV 1.01 times tiles: keep tiles",
    ]
    ours = [one for one in yard if one["case"]["kernel"].startswith("charonia")]
    assert list(gpu_check.decide("yard", ours[:2])) == ["8 rows: charonia wgmma 1.10 times tiles: prove it"]
    decode = [
        figure("decode", rate, weights="bf16", reproducible=how, batch=batch, prompt=prompt)
        for batch, prompt, how, rate in ((1, 32, False, 200.0), (1, 32, True, 180.0), (64, 32, False, 9000.0),
                                         (64, 1024, False, 8000.0), (64, 1024, True, 7000.0))
    ]  # fmt: skip
    assert list(gpu_check.decide("decode", decode)) == [
        "bf16, batch 1: 200 tokens/s; goal for an H200: 265 / 560 in bf16 / w4a16",
        "bf16, batch 1: reproducible costs 10% of at most 5%: missed",
        "bf16, batch 64: 8000 tokens/s; goal for an H200: 9,500 / 12,000 in bf16 / w4a16",
        "bf16, batch 64: reproducible costs 12% of at most 15%: kept",
    ]
    gap = [figure("first to last kernel", 50.0), figure("kernels", 42.0)]
    assert list(gpu_check.decide("gap", gap)) == ["8.00 of 50.00 ms of a step are in no kernel: shorten the gaps first"]
    limits = [
        figure("read", 4.5),
        *(figure("bf16 GEMM", rate, what=w) for w, rate in (("burst", 820), ("after 5 s", 700))),
    ]
    assert "4.50 TB/s and 700 T operations/s in bf16 (820" in next(gpu_check.decide("limits", limits))
