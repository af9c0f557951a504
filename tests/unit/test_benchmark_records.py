"""The records of all benchmarks: their file and their tables."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from charonia.bench import records
from charonia.bench.cli import app
from charonia.bench.program import run_program
from charonia.bench.records import Record
from charonia.errors import InvalidRequestError

ROOT = Path(__file__).resolve().parents[2]

SOME = [
    Record.of("static", "decode", "tokens/s", [90, 120, 100], case={"batch": 1}, asked=110),
    Record.of("static", "decode", "tokens/s", [720.25], case={"batch": 8}),
    Record.of("static", "errors", "", 0, case={"batch": 8}, details={"texts": ["a | b"]}),
]


def test_a_record_is_the_median_with_its_range() -> None:
    first = SOME[0]
    assert (first.value, first.minimum, first.maximum, first.repeats) == (100, 90, 120, 3)
    assert first.met is False
    assert SOME[1].met is None


def test_a_file_comes_back_and_every_line_of_it_is_json(tmp_path: Path) -> None:
    file = tmp_path / "figures.jsonl"
    run = records.describe_run({"threads": 2})
    records.write(file, run, SOME)
    assert records.read(file) == (run, SOME)
    assert [json.loads(line).get("unit") for line in file.read_text().splitlines()] == [
        None,
        "tokens/s",
        "tokens/s",
        "",
    ]
    assert run["machine"]["processor"] and run["settings"] == {"threads": 2}


def test_a_file_has_no_api_key_of_its_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["benchmark", "soak", "--api-key", "ck-one", "--seconds", "4", "--api-key=ck-two", "--api-key", "ck-three"]
    monkeypatch.setattr("sys.argv", ["charonia", *asked])
    command = records.describe_run()["command"]
    assert not any("ck-" in argument for argument in command)
    assert command[3:] == ["--api-key", "***", "--seconds", "4", "--api-key=***", "--api-key", "***"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("{}\n", 1),
        ('{"run": 5}\n', 1),
        ('{"run": {"machine": null}}\n', 1),
        ('{"run": {"stages": {"ops": 5}}}\n', 1),
        ('{"run": {}}\n{"name": "x"}\n', 2),
        ('{"run": {}}\nnone\n', 2),
        ('{"run": {}}\n' + json.dumps({**vars(SOME[1]), "value": "x"}), 2),
        ('{"run": {}}\n' + json.dumps({**vars(SOME[1]), "case": None}), 2),
    ],
)
def test_another_file_is_refused_with_the_line(text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "some.json")]).exception
    assert isinstance(refused, InvalidRequestError)
    assert re.search(rf"some.json, line {line}: .*charonia benchmark --json", str(refused))


def test_a_file_that_is_no_text_is_refused_and_one_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequestError, match=r"some.json: .*utf-8.*charonia benchmark --json"):
        records.read(tmp_path / "some.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        records.write(tmp_path / "folder", {}, [])
    assert {file.name for file in tmp_path.iterdir()} == {"some.json", "folder"}
    # Before anything is measured.
    for file, why in ((tmp_path / "folder", "is a folder"), (tmp_path / "none" / "x", "there is no folder")):
        refused = CliRunner().invoke(app, ["program", "/none", "--json", str(file)]).exception
        assert isinstance(refused, InvalidRequestError) and f"{file} cannot be written: " in str(refused)
        assert why in str(refused)


def test_a_table_has_a_line_for_each_case_and_says_what_was_not_measured() -> None:
    [grid] = records.grids(SOME)
    heading, rule, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in grid.markdown())
    assert all(cell.endswith("-:") for cell in rule)
    assert heading == ["batch", "decode, tokens/s", "errors"]
    assert lines == [["1", "100", "-"], ["8", "720.2", "0"]]


def test_many_figures_are_lines_and_their_cases_columns() -> None:
    many = [Record.of("x", f"figure {index}", "ms", index, case={"a": 1, "b": "c"}) for index in range(12)]
    [grid] = records.grids(many)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in grid.markdown()]
    assert lines[0] == ["a, b", "1 c"]
    assert lines[-1] == ["figure 11, ms", "11"]


BARS = [
    Record.of("bar 2", "decode", "tokens/s", [200, 210, 250]),
    Record.of("bar 1", "share", "%", [75, 70, 81], case={"stage": "bench1"}, asked=80),
    Record.of("guides", "longer", "%", 2, asked=3, at_most=True),
]


def test_bars_are_in_a_table_of_their_own_with_what_is_asked() -> None:
    assert [grid.title for grid in records.grids(BARS)] == ["guides"]  # of which something is asked
    [grid] = records.bar_grids([*SOME[1:], *BARS])
    assert grid.headings == ("bar", "stage", "what", "asked", "measured", "")
    assert grid.rows == [
        ("1", "bench1", "share", "80 %", "75 %", "NOT MET"),
        ("2", "", "decode", "", "210 tokens/s", ""),
        ("guides", "", "longer", "at most 3 %", "2 %", "met"),
    ]
    [grid] = records.bar_grids(BARS, rehearsal=True, ranges=True)
    assert not any(row[-1] for row in grid.rows)
    assert [row[-2] for row in grid.rows] == ["75 (70 to 81) %", "210 (200 to 250) tokens/s", "2 %"]
    assert not list(records.bar_grids(SOME[1:]))


def test_a_report_has_what_the_file_has_and_nothing_of_what_it_lacks(tmp_path: Path) -> None:
    failure = {"where": "test_a", "text": "0.5\n0.1", "weight": 1}
    stage = {
        "status": "failed",
        "summary": "1 | 2",
        "seconds": 7.25,
        "sources": "1ab",
        "at": "2026-11-26",
        "failures": [failure],
    }
    run = {
        "title": "A GPU",
        "command": ["charonia", "benchmark", "a b"],
        "machine": {"processor": "P", "processors": 2, "load": 0.5, "python": "3.11.7 (/bin/python)"},
        "commit": "abc",
        "notes": ["What one should know."],
        "rehearsal": True,
        "settings": {"faults": ["3 blocks are lost"], "errors": [{"suite": "gemm", "error": "no memory"}]},
        "stages": {"ops": stage, "late": {}},
    }
    kernel = {
        "suite": "rows",
        "kernel": "embed",
        "shape": {"rows": 1},
        "variant": "a",
        "pdl": True,
        "microseconds": 3.0,
    }
    timed = Record.of("kernels", "embed", "us", 3.0, details={**kernel, "share": 0.25})
    bare = replace(timed, details={})
    noise = Record.of("mixed", "longer", "ms", [-3, -1, 2], difference=True)
    records.write(tmp_path / "some.json", run, [*SOME, *BARS, timed, bare, noise])
    records.write(tmp_path / "empty.json", {}, [])
    asked = ["report", str(tmp_path / "some.json"), str(tmp_path / "empty.json"), "--markdown", "--ranges"]
    page = [" ".join(line.split()) for line in CliRunner().invoke(app, asked).output.splitlines() if line]
    titles = [line for line in page if line.startswith("#")]
    assert titles == [
        "# A GPU", "## static", "## guides", "## kernels", "## mixed", "## rows", "## Bars", "## Stages",
        "## Failures", "# empty",
    ]  # fmt: skip
    assert page[1:6] == [
        "`charonia benchmark 'a b'`, commit abc",
        "P, 2 processors, load 0.5; Python 3.11.7.",
        "A rehearsal: the models are tiny, so the figures say nothing.",
        "What one should know.",
        *records.noise_notes([noise]),
    ]
    assert "| 1 | 100 (90 to 120) | - |" in page
    assert "| embed | rows 1 | a | 3.0 | 25 % | |" in page
    assert "| 1 | bench1 | | share | 80 % | 75 (70 to 81) % | |" in page
    assert "| ops | failed | 7 | 1 \\| 2 | 1ab | 2026-11-26 |" in page and "| late | | | | | |" in page
    assert [rule for rule in page if rule.startswith("|-")][-1].endswith("-|")  # hashes and dates are no numbers
    assert page[page.index("## Failures") + 1 : -2] == [
        *("- test_a", "0.5", "0.1"), *("- fault", "3 blocks are lost"),
        *("- error", '{"suite": "gemm", "error": "no memory"}'), *("- static", "a | b"),
    ]  # fmt: skip
    shown = " ".join(CliRunner().invoke(app, asked[:3]).output.split())
    for text in (
        "A GPU",
        "A rehearsal",
        "What one should know.",
        "test_a: 0.5 0.1",
        "fault: 3 blocks",
        "empty commit unknown",
    ):
        assert text in shown


def test_the_committed_files_are_records_and_their_pages_the_reports() -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert len(files) > 5
    for file in files:
        run, found = records.read(file)
        assert run["command"] and run["commit"] and found
    for name in ("cpu_peers", "nvidia-h200"):
        file = ROOT / "benchmarks" / "results" / f"{name}.json"
        page, _, calls = file.with_suffix(".md").read_text().partition("\n## Calls\n")
        assert CliRunner().invoke(app, ["report", "--markdown", str(file)]).output == page
        assert bool(calls) == (name == "nvidia-h200")  # gpu_check.sh adds them


def test_no_word_of_a_heading_is_cut_in_80_columns() -> None:
    units = {
        "prefill": "tokens/s",
        "decode": "tokens/s",
        "output in all": "tokens/s",
        "GEMMs": "% of their rate",
        "weights": "% of the bandwidth",
        "weights and KV": "% of the bandwidth",
    }
    case = {"batch": 16, "prompt": 1024, "output": 256}
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, [Record.of("static", *item, 12345.6, case=case) for item in units.items()])
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    words = {word for item in units.items() for word in ", ".join(item).split()}
    assert words | set(case) <= set(text.split()) and "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_nine_cases_are_shown_in_full_in_80_columns_as_several_tables() -> None:
    cases = [(level, target) for level in (1, 8, 64) for target in ("in-process", "triton", "gateway")]
    names = ["requests", "output", *(f"time per output token, {rank}th" for rank in range(90, 99))]
    values = {
        (name, case): 1000 * (1 + column) + line for line, name in enumerate(names) for column, case in enumerate(cases)
    }
    some = [
        Record.of("compare", name, "ms", value, case={"requests at once": case[0], "target": case[1]})
        for (name, case), value in values.items()
    ]
    console = Console(file=io.StringIO(), width=80)
    records.print_records(console, some)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80 and "\N{HORIZONTAL ELLIPSIS}" not in text
    words = text.split()
    assert sorted(int(word) for word in words if word.isdigit() and int(word) >= 1000) == sorted(values.values())
    tables = words.count("compare")
    assert tables > 1 and [words.count(target) for target in ("in-process", "triton", "gateway")] == [3, 3, 3]
    assert words.count("requests,") == words.count("98th,") == tables


def test_a_program_prints_records_and_what_is_none_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"

    def printing(text: str, code: int = 0) -> Path:
        program.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        program.chmod(0o755)
        return program

    line = json.dumps({**vars(SOME[1]), "case": {"load": "no room"}})
    assert run_program(printing(line), ["1"]) == [replace(SOME[1], case={"load": "no room"})]
    with pytest.raises(InvalidRequestError, match="ended with exit code 2"):
        run_program(printing(line, 2), [])
    for other in ("running 256", "[1]", '{"name": "x"}'):
        with pytest.raises(InvalidRequestError, match="is no benchmark of benchmarks/"):
            run_program(printing(other), [])
    with pytest.raises(InvalidRequestError, match="cannot be run"):
        run_program(tmp_path / "none", [])
