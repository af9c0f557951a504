"""Benchmarks whose code is in benchmarks/ of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from charonia.bench import checkout
from charonia.bench import records as figures_of
from charonia.bench.cli import app
from charonia.errors import InvalidRequestError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import page_load, quantised_quality, real_schemas  # noqa: E402


@pytest.mark.parametrize(
    "command",
    ["peers", "kv-quantisation", "quantised-quality", "real-schemas", "page-load", "cuda-predictions"],
)
def test_outside_of_a_checkout_a_command_is_listed_and_says_where_it_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "_OWN", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    assert command in CliRunner().invoke(app, ["--help"]).output
    error = CliRunner().invoke(app, [command]).exception
    assert isinstance(error, UnsupportedError)
    assert "runs in a checkout of the repository" in str(error)
    assert f"{tmp_path / 'site-packages'}, where this package is" in str(error) and f"{tmp_path}, the" in str(error)


def test_the_current_folder_may_be_the_checkout(tmp_path: Path) -> None:
    """In a process of its own: modules of another checkout would stay."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "kv_quantisation.py").write_text(
        "def run_kv_quantisation(threads): exit(40 + threads)\n"
    )
    code = (
        "from pathlib import Path; from charonia.bench import checkout; from charonia.bench.cli import app; "
        "checkout._OWN = Path('/none'); app(['kv-quantisation', '--threads', '2'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ), capture_output=True)
    assert done.returncode == 42, done.stderr


def test_wrong_bits_and_peers_are_refused_with_what_is_expected() -> None:
    refused = CliRunner().invoke(app, ["peers", "--bits", "5"]).exception
    assert str(refused) == "--bits 5: expected one of 16, 8, 4"
    refused = CliRunner().invoke(app, ["peers", "--bits", "8", "--peer", "openvino"]).exception
    assert str(refused).startswith("--peer openvino: expected with --bits 8 one of llama_cpp_q8_0, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["peers", "--shape", "m5"], "shape 'm5' is not known"),
        (["peers", "--prepare", "--json", "x"], "--prepare measures nothing"),
        (["cuda-predictions", "--against", "x", "--out", "y"], "--against writes no table"),
        (["cuda-predictions", "--against", "x", "--results", "y"], "--against writes no table"),
        (["cuda-predictions", "--out", "none/x"], "there is no folder none"),
        (["cuda-predictions", "--results", "none"], "none cannot be read"),
        (["cuda-predictions", "--results", str(ROOT / "benchmarks/results/soak.json")], "has no times of CUDA kernels"),
        (["real-schemas", "--refusals", "none/x"], "there is no folder none"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_anything_is_done(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    build = ["--build", str(tmp_path)] if arguments[0] == "peers" else []
    refused = CliRunner().invoke(app, [*arguments, *build]).exception
    assert isinstance(refused, InvalidRequestError) and message in str(refused)
    assert not list(tmp_path.iterdir())


def test_a_package_that_is_not_installed_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(loads: int) -> None:
        raise ModuleNotFoundError("No module named 'playwright.sync_api'", name="playwright.sync_api")

    monkeypatch.setattr(page_load, "run_page_load", load)
    error = CliRunner().invoke(app, ["page-load"]).exception
    assert isinstance(error, UnsupportedError)
    assert "needs the Python package playwright" in str(error) and "`make setup`" in str(error)


def test_answers_that_are_not_valid_are_said_and_are_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = real_schemas.Case("one==1", "a.json", {}, ended=3, cut_off=1)
    refused = real_schemas.Case("one==1", "b.json", {}, refusal="the JSON schema: it has no value")
    wrong = real_schemas.Case("two==2", "c.json", {}, ended=4, invalid=["[1]: too short"])
    file = tmp_path / "some.json"

    def run(*cases: real_schemas.Case) -> Any:
        monkeypatch.setattr(real_schemas, "run_real_schemas", lambda folder: list(cases))
        return CliRunner().invoke(app, ["real-schemas", "--json", str(file), "--refusals", str(tmp_path / "no")])

    assert run(good, refused).exit_code == 0
    done = run(good, refused, wrong)
    assert done.exit_code == 1 and "two==2 c.json: [1]: too short" in done.output
    assert (tmp_path / "no").read_text() == "one==1 b.json: the JSON schema: it has no value\n"
    counts = {(one.case["package"], one.name): (one.value, one.met) for one in figures_of.read(file)[1]}
    assert counts["one==1", "refused"] == (1, None) and counts["all", "answers"] == (8, None)
    assert counts["one==1", "not valid"] == (0, True) and counts["all", "not valid"] == (1, False)

    def write(*_: Any) -> None:
        raise InvalidRequestError("the disk is full")

    monkeypatch.setattr(figures_of, "write", write)
    done = run(wrong)
    assert str(done.exception) == "the disk is full" and "[1]: too short" in done.output


def test_figures_of_the_page_are_its_last_size_and_the_times_of_all_loads() -> None:
    def load(kilobytes: float, paint: float, usable: float) -> tuple[page_load.Load, dict[str, page_load.Load]]:
        formulas = {"formulas": page_load.Load(2, 8000, 30000)}
        return page_load.Load(29, int(1000 * kilobytes), 360_000, paint, usable), formulas

    found = page_load.figures([load(121, 500, 700), load(123, 400, 900), load(122, 800, 600)])
    shown = {(record.case["of"], record.name): record.with_range for record in found}
    assert shown["the page", "sent"] == "122" and shown["formulas", "sent"] == "8"
    assert shown["the page", "first text on the screen"] == "500 (400 to 800)"
    assert shown["the page", "a message can be written"] == "700 (600 to 900)"


def test_a_scheme_that_could_not_be_measured_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"tokens": 4535, "window": 1024, "stride": 512, "perplexity": 8.75}
    reference = {"kl_mean": 0.25, "kl_p99": 0.5, "top1_agreement": 0.875}

    def measure(variant: quantised_quality.Variant, folder: Path, calibration: Path) -> dict[str, Any] | str:
        if "awq" in variant.name:
            return "no memory"
        answers = {"right": 116, "asked": 120}
        return {"weight_bytes": 5, "text": text, "reference": reference, "questions": answers, "device": "cpu",
                "seconds": 9.0 if variant.options else 0.0}  # fmt: skip

    monkeypatch.setattr(quantised_quality, "measure", measure)
    monkeypatch.setattr(quantised_quality, "calibration_text", lambda: "a text")
    notes, found = quantised_quality.run_quantised_quality(tmp_path)
    assert notes[0].startswith("4535 tokens of models/demo/text.txt in windows of 1024, stride 512; ")
    assert notes[1:] == ["w4a16 awq, quant_policy 0, was not measured: no memory"]
    told = capsys.readouterr().err
    assert "w4a16 awq, quant_policy 0, was not measured: no memory" in told
    assert "bf16, quant_policy 8: weights 5 bytes, perplexity 8.75, " in told
    first = {(record.name, record.unit): record.value for record in found if record.case == found[0].case}
    assert first["same top token", "%"] == 87.5 and first["right answers", "of 120"] == 116
    assert ("quantising", "s") not in first
    assert len({str(record.case) for record in found}) == len(quantised_quality.VARIANTS) - 1
    monkeypatch.setattr(quantised_quality, "measure", lambda *_: "no memory")
    assert CliRunner().invoke(app, ["quantised-quality", "--folder", str(tmp_path)]).exit_code == 1
    refused = CliRunner().invoke(app, ["quantised-quality", "--folder", str(tmp_path / "calibration.txt")])
    assert refused.exit_code == 2 and "is a file" in refused.output


def test_a_family_that_a_method_destroys_fails_the_check_of_families(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AWQ did with Mixtral; another family cannot be made with it."""

    def made_and_measured(model: Path, made: Path, *_: Any) -> dict[str, Any] | str:
        if made.name == "phi3-w4a16-awq":
            return "no groups"
        kl = {"rtn": 0.25, "awq": 1.0}.get(made.name.rpartition("-")[2], 0.5)
        return {"reference": {"kl_mean": kl, "top1_agreement": 0.5}}

    monkeypatch.setattr(quantised_quality, "write_small_model", lambda *_: None)
    monkeypatch.setattr(quantised_quality, "made_and_measured", made_and_measured)
    monkeypatch.setattr(quantised_quality, "calibration_text", lambda: "a text")
    notes, found = quantised_quality.run_families(tmp_path, ["mixtral", "phi3"])
    assert notes == ["phi3, w4a16 awq: no groups"]
    assert [one.case for one in found if one.met is False] == [
        {"family": "mixtral", "scheme": "w4a16", "method": "awq"}
    ]
    command = ["quantised-quality", "--folder", str(tmp_path), "--family"]
    assert CliRunner().invoke(app, [*command, "phi3"]).exit_code == 1
    assert CliRunner().invoke(app, [*command, "mixtral"]).exit_code == 1
    monkeypatch.setattr(quantised_quality, "WORSE", 5.0)
    assert CliRunner().invoke(app, [*command, "mixtral"]).exit_code == 0


def test_schemes_are_measured_with_the_installed_package_wherever_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "charonia").mkdir()
    (tmp_path / "charonia" / "__init__.py").write_text("raise SystemExit('the current folder')")
    monkeypatch.chdir(tmp_path)
    code, said = quantised_quality.charonia("--help")
    assert code == 0 and "benchmark" in said
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    code, said = quantised_quality.charonia("--help")
    assert code == 1 and "cannot be run" in said
