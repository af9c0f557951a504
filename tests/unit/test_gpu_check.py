"""scripts/gpu_check.sh: its parsers and its budget. `--emulated` runs the stages themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import gpu_check  # noqa: E402
from gpu_check import HANGS, STAGES, Outcome, Run  # noqa: E402
from gpu_check_stages import GOALS, MEASUREMENTS, PRICES, Command, Figure, decide  # noqa: E402

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
    monkeypatch.setattr(gpu_check, "LOGS", tmp_path)
    monkeypatch.setattr(gpu_check, "MODELS", tmp_path / "models")
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
    results = iter(
        [(None, f"[ RUN      ] A.hangs\n{HANGS} for 15 s"), (0, "[ RUN      ] A.good\n[       OK ] A.good (1 ms)\n")]
    )
    seen = []

    def run(
        command: Sequence[object], log: str, limit_s: float, env: dict[str, str], quiet_s: float
    ) -> tuple[int | None, str]:
        seen.append((command[1], env["CHARONIA_CUDA_MEASURE_S"], quiet_s))
        return next(results)

    monkeypatch.setattr(gpu_check, "run", run)
    outcome = gpu_check.cpp_tests(None, 500)
    assert outcome.status == "failed" and outcome.summary == f"1 passed, 1 failed: A.hangs ({HANGS} for 15 s)"
    assert not gpu_check.measures_unproven({"cpp_tests": outcome})
    unproven = ":".join(gpu_check.UNPROVEN_TESTS)
    filters = (f"--gtest_filter=*-{unproven}", f"--gtest_filter=*-{unproven}:A.hangs")
    assert seen == [(one, "2", gpu_check.CPP_QUIET_S) for one in filters]


def test_engines_measure_unproven_kernels_until_a_stage_shows_that_they_hang_or_are_wrong(out: Path) -> None:
    for name, summary, later in (
        ("probe", "wrong: HopperTest.boxes", "0"),
        ("cpp_tests", f"9 passed, 1 failed: A.hangs ({HANGS} for 15 s)", "0"),
        ("bf16", f"static bf16: {HANGS} for 60 s", "0"),
        ("bf16", "static bf16: stopped after 140 s", "1"),
        ("cpp_tests", "9 passed, 1 failed: A.wrong (FAILED)", "1"),
    ):
        seen = []

        def stage(outcome: Outcome, seen: list[str] = seen) -> Run:
            def run(emulated: Path | None, limit_s: float) -> Outcome:
                seen.append(gpu_check.environment()["CHARONIA_CUDA_UNPROVEN"])
                return outcome

            return run

        (out / "results.json").unlink(missing_ok=True)
        os.environ["CHARONIA_CUDA_UNPROVEN"] = ""
        gpu_check.check(
            {name: (1, stage(gpu_check.failed(summary, ""))), "lib": (1, stage(Outcome("passed")))}, None, 900.0
        )
        assert seen == ["1", later], (name, summary)


def test_later_call_and_the_caller_can_keep_unproven_kernels_away(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def lib(emulated: Path | None, limit_s: float) -> Outcome:
        seen.append(gpu_check.environment()["CHARONIA_CUDA_UNPROVEN"])
        return Outcome("passed")

    monkeypatch.setattr(gpu_check, "OUT", out / "out")
    gpu_check.check({"probe": (1, lambda *_: gpu_check.failed("wrong", ""))}, None, 900.0)
    assert json.loads((out / "out" / "results.json").read_text())["stages"]["probe"]["status"] == "failed"
    assert (out / "out" / "logs.tar.gz").is_file()
    for file in (out / "out").iterdir():
        file.unlink()  # it is emptied between calls
    for before, probe in (("", True), ("1", True), ("0", False), ("1", False)):
        if not probe:
            (out / "results.json").unlink()
        monkeypatch.setenv("CHARONIA_CUDA_UNPROVEN", before)
        gpu_check.check({"lib": (1, lib)}, None, 900.0)
    assert seen == ["0", "0", "0", "1"]


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


def test_stage_that_does_not_fit_is_left_out_and_results_are_written(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = gpu_check.check({"limits": (1, passing), "decode": (1000, passing)}, None, 100.0)
    assert {name: one.status for name, one in now.items()} == {"limits": "passed", "decode": "left out"}
    assert list(gpu_check.check({"lib": (1, passing)}, None, 100.0)) == ["lib"]
    stages = json.loads((out / "results.json").read_text())["stages"]
    assert set(stages) == {"limits", "decode", "lib"}  # includes the stages of the earlier call
    assert "it takes about 1000 s" in stages["decode"]["summary"] and stages["limits"]["records"] == [FIGURE]
    assert "limits: passed (0 s, estimate 1 s), one | figure" in capsys.readouterr().out


def test_failed_build_ends_the_check_with_the_end_of_the_log(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad: Run = lambda emulated, limit_s: gpu_check.failed("not compiled", "an error")  # noqa: E731
    assert list(gpu_check.check({"build": (1, bad), "limits": (1, passing)}, None, 100.0)) == ["build"]
    assert "\nan error\n" in capsys.readouterr().out


def test_error_of_a_stage_and_a_model_that_cannot_be_written_do_not_stop_the_others(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(out, monkeypatch, "mkdir -p $2; echo no space left; exit 1")
    monkeypatch.setitem(MEASUREMENTS, "fp8", (75, [Command("static", model=("fp8", "1,2"))]))
    now = gpu_check.check({"fp8": STAGES["fp8"], "lib": (1, passing)}, None, 900.0)
    assert now["fp8"].status == "failed" and now["fp8"].summary.endswith("1,2-fp8: no space left")
    assert now["lib"].status == "passed" and not (out / "models").exists()


def test_goals_of_a_stage_that_is_left_out_are_not_measured(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu_check.check({"w8a8": STAGES["w8a8"], "probe": STAGES["probe"]}, None, 1.0)
    printed = capsys.readouterr().out
    assert "w8a8, batch 4: prefill not measured, goal for an H200: 48000" in printed
    assert "reproducible mode" not in printed


def test_stages_are_in_the_order_of_their_value() -> None:
    assert list(STAGES) == [
        "build", "probe", "cpp_tests", "limits", "bf16", "w4a16", "yard_attention", "gap", "fp8", "lib", "w8a8",
        "python_tests", "pdl", "yard_gemm", "gpt_oss_20b", "qwen3_30b", "two_ranks", "adapters", "serving",
    ]  # fmt: skip


def test_budget_is_used_by_the_stages_that_fit_and_an_earlier_outcome_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock)

    def taking(seconds: float) -> Run:
        def run(emulated: Path | None, limit_s: float) -> Outcome:
            nonlocal clock
            clock += seconds
            return Outcome("passed")

        return run

    stages = {name: (guess_s, taking(guess_s)) for name, (guess_s, _) in STAGES.items()}
    now = gpu_check.check(stages, None, 420.0)
    ran = {name for name, one in now.items() if one.status == "passed"}
    assert ran == {
        "build",
        "probe",
        "cpp_tests",
        "limits",
        "bf16",
        "w4a16",
        "gap",
    }  # 420 seconds, and no yard_attention
    gpu_check.check({"gap": stages["gap"], "fp8": stages["fp8"]}, None, 10.0)
    kept = json.loads((out / "results.json").read_text())["stages"]
    assert (kept["gap"]["status"], kept["fp8"]["status"]) == ("passed", "left out")


def test_command_that_runs_too_long_or_writes_nothing_is_killed(out: Path) -> None:
    env = {"PATH": "/usr/bin:/bin"}
    assert gpu_check.run(["sleep", "600"], "log", 0.1, env) == (None, "\nstopped after 0 s")
    assert gpu_check.run(["sleep", "600"], "log", 500, env, quiet_s=0.1) == (None, f"\n{HANGS} for 0 s")


def program(out: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let measurements call a shell script instead of `charonia benchmark`. The last argument is the file."""
    file = out / "benchmark"
    file.write_text(f"#!/bin/bash\nfile=${{@: -1}}\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(gpu_check, "BENCHMARK", [str(file)])
    monkeypatch.setattr(gpu_check, "MODELS", out / "models")


WRITES = f"echo '{json.dumps({'records': [{**FIGURE, 'case': {'batch': 1}}]})}' > $file"


def test_measurement_that_writes_nothing_is_killed_and_the_others_figures_are_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(out, monkeypatch, f"case $2 in --first) {WRITES};; *) exec sleep 600;; esac")
    commands = [Command("static", "--first", labels={"weights": "fp8"}), Command("static", "--second")]
    monkeypatch.setitem(MEASUREMENTS, "fp8", (75, commands))
    monkeypatch.setattr(gpu_check, "QUIET_S", 0.5)
    outcome = gpu_check.measured("fp8", None, 500.0)
    assert outcome.status == "failed" and outcome.summary == f"static : {HANGS} for 0 s"
    assert [one["case"] for one in outcome.records] == [{"batch": 1, "weights": "fp8"}]
    assert not gpu_check.measures_unproven({"fp8": outcome})


def test_commands_after_one_that_fails_are_run_and_complete_pairs_decide(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = {**FIGURE, "name": "decode", "case": {"batch": 1}}
    writes = f"echo '{json.dumps({'records': [rate]})}' > $file"
    program(out, monkeypatch, f"[ $1 = make-model ] || {{ {writes}; [ $CHARONIA_CUDA_PDL != late ]; }}")
    monkeypatch.setattr(gpu_check, "QUIET_S", 500.0)
    outcome = gpu_check.measured("pdl", None, 500.0)
    assert outcome.status == "failed" and outcome.summary.startswith("static bf16, False, late: ;")
    assert len(outcome.records) == 10 and len(outcome.decisions) == 2
    assert outcome.decisions[1].startswith("w4a16: early 1.000, late 1.000")


def test_library_that_fails_is_a_line_in_the_results(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"case $* in *flashinfer*) echo a traceback; echo flashinfer is missing; exit 1;; *) {WRITES}; esac"
    program(out, monkeypatch, f"echo 'xqa, rows 1: ERROR no such page size'; {script}")
    commands = [
        Command("kernels", f"--library {name}", labels={"library": name}, optional=True)
        for name in ("xqa", "flashinfer")
    ]
    monkeypatch.setitem(MEASUREMENTS, "w8a8", (75, commands))
    outcome = gpu_check.measured("w8a8", None, 60)
    assert (outcome.status, outcome.summary) == ("passed", "1 figures")
    assert "w8a8: xqa, rows 1: ERROR no such page size" in outcome.decisions
    assert "w8a8, flashinfer: ERROR flashinfer is missing" in outcome.decisions


def test_goals_have_a_verdict_only_on_an_h200(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of figures name the GPU: nvidia-smi may wait forever after a kernel that hangs."""
    monkeypatch.setattr("charonia.bench.machine._output", lambda _: pytest.fail("nvidia-smi was called"))
    rate = {**FIGURE, "name": "decode", "value": 300.0, "case": {"batch": 1}}
    monkeypatch.setitem(MEASUREMENTS, "fp8", (75, [Command("static", labels={"reproducible": False})]))
    for run, verdict in (
        ({"machine": {"gpu": "NVIDIA H200, 570.86.15, 143771 MiB"}}, "missed by 21.1%"),
        ({"machine": {"gpu": "NVIDIA H100 80GB HBM3, 1, 2"}}, "no verdict on NVIDIA H100 80GB HBM3"),
        ({"machine": {"gpu": "NVIDIA GH200 480GB, 1, 2"}}, "no verdict on NVIDIA GH200 480GB"),
        ({"machine": {"gpu": ""}}, "no verdict on this device"),
        ({}, "no verdict on this device"),
    ):
        program(out, monkeypatch, f"echo '{json.dumps({'run': run, 'records': [rate]})}' > $file")
        decided = gpu_check.measured("fp8", None, 60).decisions[0]
        assert decided == f"fp8, batch 1: decode 300 tokens/s, {verdict}; goal for an H200: 380"


def test_pdl_measures_each_setting_with_each_model(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ",".join(f"$CHARONIA_CUDA_{name}" for name in ("PDL", "PREFETCH", "DECODE_SPLIT"))
    script = (
        f'[ $1 = make-model ] && mkdir -p $2 || {{ echo "{settings} $2 $CHARONIA_DEVICE" >> {out}/seen; {WRITES}; }}'
    )
    program(out, monkeypatch, script)
    for name in ("PDL", "PREFETCH", "DECODE_SPLIT"):
        monkeypatch.delenv(f"CHARONIA_CUDA_{name}", raising=False)
    outcome = gpu_check.measured("pdl", None, 60)
    assert outcome.status == "passed", outcome.text
    labels = [(one["case"]["setting"], one["case"]["weights"]) for one in outcome.records]
    names = ("early", "late", "late, prefetch", "splits of 64", "off")
    assert labels == [(name, weights) for name in names for weights in ("bf16", "w4a16")]
    seen = [line.split() for line in (out / "seen").read_text().splitlines()]
    assert [line[0] for line in seen[::2]] == ["early,,", "late,,", "late,16,", ",,64", "off,,"]
    assert {line[1].rpartition("-")[2] for line in seen} == {"bf16", "w4a16"} and seen[0][2] == "cuda"


def test_every_goal_has_a_stage_that_measures_its_batch() -> None:
    for stage, goals in GOALS.items():
        commands = MEASUREMENTS[stage][1]
        assert not commands[0].labels["reproducible"]
        assert all(f"--case {batch}," in commands[0].options for _, batch in goals)
        if stage != "gpt_oss_20b":
            assert [command.labels["reproducible"] for command in commands] == [False, True]
            assert all(f"--case {batch}," in command.options for command in commands for batch in PRICES)


def test_unknown_stage_is_rejected() -> None:
    done = subprocess.run([ROOT / "scripts" / "gpu_check.sh", "bench1"], capture_output=True, text=True)
    assert done.returncode == 2 and "expected build, probe, cpp_tests" in done.stderr


def test_decisions_name_the_faster_way_and_missed_bars() -> None:
    def figure(name: str, value: float, **case: object) -> Figure:
        return {"name": name, "value": value, "case": case}

    rates = {"early": 100.0, "late": 104.0, "off": 90.0}
    pdl = [figure("decode", rate, weights="bf16", setting=name) for name, rate in rates.items()]
    assert list(decide("pdl", pdl)) == ["bf16: early 1.000, late 1.040, off 0.900 of early: take late"]
    assert list(decide("pdl", pdl[1:])) == []
    pdl[1]["value"] = 101.0
    assert next(decide("pdl", pdl)).endswith("take early, as no other is 2 % faster")
    lib = [figure("time", us, weight="o", format=kind, rows=rows, kernel=f"kernel of {rows}") for kind, rows, us in (
        ("bf16", 1, 9.0), ("bf16", 2048, 50.0), ("w8a8", 2048, 25.0))]  # fmt: skip
    assert list(decide("lib", lib)) == [
        "o: w8a8 is 2.00 times as fast as bf16 with 2048 rows; 1 row in bf16: kernel of 1"
    ]
    yard = [figure("time", us, rows=8, library=name) for name, us in (
        ("charonia, proven", 125.0), ("charonia", 120.0), ("a", 110.0), ("b", 100.0))]  # fmt: skip
    assert list(decide("yard_attention", yard)) == [
        "rows 8: 83% of the speed of b: below 85 %",
        "rows 8: with unproven kernels 1.04 times as fast: prove them",
    ]
    yard[1]["value"] = 124.0
    assert list(decide("yard_attention", yard[:3])) == [
        "rows 8: 89% of the speed of a: keep our kernel",
        "rows 8: with unproven kernels 1.01 times as fast: keep the proven ones",
    ]
    assert list(decide("yard_gemm", yard[1:2])) == list(decide("yard_gemm", yard[2:])) == []
    layer = [figure("time", us, experts="8 of 128", rows=64, kernel=kernel, library="charonia") for kernel, us in (
        ("tiles", 130.0), ("wgmma", 100.0), ("stream", 9.0))]  # fmt: skip
    assert list(decide("qwen3_30b", layer)) == [
        "experts 8 of 128, rows 64: with unproven kernels 1.30 times as fast: prove them"
    ]
    speeds = [
        figure(name, rate, reproducible=how, batch=batch, prompt=prompt)
        for name, batch, prompt, how, rate in (
            ("decode", 1, 32, False, 200.0), ("decode", 1, 32, True, 180.0), ("decode", 64, 1024, False, 10000.0),
            ("decode", 64, 1024, True, 9000.0), ("prefill", 4, 2048, False, 44000.0), ("prefill", 1, 32, False, 9.0))
    ]  # fmt: skip
    assert list(decide("bf16", speeds, "NVIDIA H200")) == [
        "bf16, batch 1: decode 200 tokens/s, missed by 24.5%; goal for an H200: 265",
        "bf16, batch 64: decode 10000 tokens/s, reached; goal for an H200: 9500",
        "bf16, batch 4: prefill 44000 tokens/s, missed by 2.2%; goal for an H200: 45000",
        "bf16, batch 1: reproducible costs 10.0 %, goal for an H200 5 %: missed by 5.0 points",
        "bf16, batch 64: reproducible costs 10.0 %, goal for an H200 15 %: reached",
    ]
    assert list(decide("w8a8", speeds[:2])) == [
        "w8a8, batch 4: prefill not measured, goal for an H200: 48000",
        "w8a8, batch 1: reproducible costs 10.0 %, goal for an H200 5 %: no verdict on this device",
    ]
    gap = [figure("first to last kernel", 50.0), figure("kernels", 42.0)]
    assert list(decide("gap", gap)) == ["8.00 of 50.00 ms of a step are in no kernel: shorten the gaps first"]
    limits = [
        figure("read", 4.5),
        *(figure("bf16 GEMM", rate, what=w) for w, rate in (("burst", 820), ("after 5 s", 700))),
    ]
    assert "4.50 TB/s and 700 T operations/s in bf16 (820" in next(decide("limits", limits))
