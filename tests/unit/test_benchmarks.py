"""Records of benchmarks, kernels, static reports and the comparison with peers."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from charonia import _engine
from charonia.api.engine import Engine
from charonia.api.results import Chunk, Output, SamplingParams
from charonia.bench import adapters, peers, records, static
from charonia.bench.adapters import _figures, _Seconds, run_adapters
from charonia.bench.cli import _show, app, kernels
from charonia.bench.kernels import FORMATS, kernel_of, measure_kernels
from charonia.bench.peers import ENGINES, Result, peer_records
from charonia.bench.random_model import SHAPES, parse_shape, write_random_model
from charonia.bench.records import Record
from charonia.bench.static import Arrivals, Report, phases, print_report, run_batch
from charonia.engine_settings import Setting
from charonia.errors import EngineClosedError, InternalError, InvalidRequestError, UnsupportedError
from charonia.families import describe
from charonia.weights.convert import read_source

SOME = [
    Record.of("static", "decode", "tokens/s", [90, 120, 100], case={"batch": 1}, asked=110),
    Record.of("static", "decode", "tokens/s", [720.25], case={"batch": 8}),
    Record.of("static", "errors", "", 0, case={"batch": 8}, asked=0, at_most=True),
]


def printed(some: list[Record], width: int) -> list[list[str]]:
    """The words of each line that was printed."""
    console = Console(file=io.StringIO(), width=width)
    records.print_records(console, some)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
    return [line.replace("│", " ").replace("┃", " ").split() for line in lines]


def test_unknown_shape_is_rejected_with_the_names_the_sizes_and_the_prefixes() -> None:
    wanted = r"'llama-1,2' is not known; .* m05, .* KV heads, intermediate, .* follow gpt-oss-, qwen3.5-, "
    with pytest.raises(InvalidRequestError, match=wanted):
        parse_shape("llama-1,2")


def test_the_shape_of_qwen3_moe_has_the_experts_of_the_30b() -> None:
    config = describe(parse_shape("qwen3-moe-48,2048,32,4,768,151936").config(), "m").config
    assert (config.head_num, config.kv_head_num, config.size_per_head) == (32, 4, 128)
    assert (config.num_experts, config.experts_per_token) == (128, 8)


def test_the_shape_of_glm_has_an_mtp_layer(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", parse_shape("glm4-moe-2,64,4,2,96,320"))
    names = read_source(tmp_path / "m", mtp=True).checkpoint.tensors.keys()
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.15.up_proj.weight"} < names


def test_record_has_the_median_the_range_and_the_verdict() -> None:
    first = SOME[0]
    assert (first.value, first.minimum, first.maximum, first.repeats) == (100, 90, 120, 3)
    assert [record.met for record in SOME] == [False, None, True]


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    records.write(tmp_path / "figures.json", records.describe_run({"threads": 2}), SOME)
    run, found = records.read(tmp_path / "figures.json")
    assert found == SOME and run["settings"] == {"threads": 2} and run["machine"]["processor"]


def test_file_has_no_api_key_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["benchmark", "serving", "--api-key", "ck-one", "--seed", "4", "--api-key=ck-two"]
    monkeypatch.setattr("sys.argv", ["charonia", *asked])
    assert records.describe_run()["command"][3:] == ["--api-key", "***", "--seed", "4", "--api-key=***"]


def test_file_that_cannot_be_written_is_rejected_before_the_measurement(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none" / "x"):
        error = CliRunner().invoke(app, ["kernels", "--json", str(file)]).exception
        assert isinstance(error, InvalidRequestError) and f"{file} cannot be written" in str(error)


def test_table_has_a_row_for_each_case() -> None:
    [(title, headings, rows)] = records.tables(SOME)
    assert (title, headings) == ("static", ["batch", "decode, tokens/s", "errors"])
    assert rows == [["1", "100", "-"], ["8", "720.2", "0"]]
    assert ["8", "720.2", "0"] in printed(SOME, 80)


@pytest.mark.parametrize("verbose", [False, True])
def test_static_report_names_rejected_gemms_and_on_request_kernels(verbose: bool) -> None:
    console = Console(file=io.StringIO(), width=200)
    lines = ("device 0: a GPU, sm_90", "rows 1..8 n 64 k 32 bf16 -> bf16: cuBLASLt, 1.0 us")
    print_report(
        console, Report("m", "bf16", "cuda", "sm_90", 1, 1000, 4e12, 8e14, (SOME[0],), lines, 3), verbose=verbose
    )
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "built-in kernels computed 3 GEMMs" in text and "800 TFLOP/s" in text
    assert all((line in text) == verbose for line in (*lines,))


def test_kernels_leaves_out_fp8_caches_that_a_device_does_not_support(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Bench(_engine.KernelBench):
        def attention(self, *sizes: int) -> tuple[float, list[float]]:
            if sizes[3] == 16:
                raise UnsupportedError("quant_policy = 16 needs a newer GPU")
            return 1.0, [1.0]

    monkeypatch.setattr(_engine, "KernelBench", Bench)
    shape = parse_shape("1,128,4,2,256,300")
    found = measure_kernels(
        shape, device="cpu", threads=1, modes=[False], formats=[], rows=[], contexts=[70], batch=2, rounds=1
    )
    assert {one.case.get("KV cache") for one in found} == {None, "16 bits", "8 bits", "4 bits"}  # None: of limits
    assert "needs a newer GPU" in caplog.text


LIBRARY = ["kernels", "--shape", "1,128,4,2,256,300", "--rows", "3", "--context", "70", "--batch", "2", "--library"]


@pytest.mark.slow
def test_kernels_measures_the_operations_of_pytorch(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*LIBRARY, "torch", "--json", str(tmp_path / "torch.json")])
    assert done.exit_code == 0, done.output
    _, found = records.read(tmp_path / "torch.json")
    assert {one.case["format"] for one in found if one.benchmark == "gemm"} == {"bf16"}
    loads = {(one.case["sequences"], one.case["rows"]) for one in found if one.benchmark == "attention"}
    assert loads == {(1, 1), (2, 1), (1, 70)}
    assert all(one.value > 0 and one.case["library"] == "torch" for one in found)


@pytest.mark.slow
def test_kernels_names_each_operation_that_a_library_fails_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Humming(ModuleType):
        def HummingLayer(self, **options: object) -> None:
            raise TypeError(f"unexpected {sorted(options)[0]}")

    monkeypatch.setitem(sys.modules, "humming.layer", Humming("humming.layer"))
    error = CliRunner().invoke(app, [*LIBRARY, "humming", "--only", "gemm"]).exception
    assert isinstance(error, UnsupportedError) and "humming could not measure any operation" in str(error)
    first = "humming, weight qkv 256 x 128, format w4a16, rows 3: ERROR TypeError: unexpected shape_k"
    assert caplog.messages[0] == first and len(caplog.messages) == 4


def test_kernels_without_the_library_or_with_an_unknown_one_is_rejected() -> None:
    for name, wanted in (("humming", "humming cannot be imported: No module"), ("fa4", "expected one of torch, ")):
        error = CliRunner().invoke(app, [*LIBRARY, name]).exception
        assert isinstance(error, (UnsupportedError, InvalidRequestError)) and wanted in str(error)


@pytest.mark.slow
def test_kernels_measures_every_format_and_kind_of_cache(tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    done = CliRunner().invoke(
        app,
        ["kernels", "--shape", "1,128,4,2,256,300", "--rows", "1", "--rows", "9", "--context", "70", "--batch", "2",
         "--experts", "4,2,128,64", "--threads", "1", "--rounds", "2", "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    run, found = records.read(file)
    assert run["settings"]["device"] == "cpu"
    gemms = {(r.case["weight"], r.case["format"], r.case["rows"]) for r in found if r.benchmark == "gemm"}
    assert len(gemms) == 4 * 6 * 2 and ("down 128 x 256", "w8a8", 9) in gemms
    attention = [r.case for r in found if r.benchmark == "attention"]
    caches = {(case["KV cache"], case["sequences"], case["rows"]) for case in attention}
    kinds = ("16 bits", "fp8", "8 bits", "4 bits")
    assert caches == {(kind, *load) for kind in kinds for load in ((1, 1), (2, 1), (1, 70))}
    experts = [(r.case["experts"], r.case["format"], r.case["rows"]) for r in found if r.benchmark == "experts"]
    assert set(experts) == {
        ("2 of 4, 128 x 64", code, rows) for code in FORMATS if code not in ("bf16", "w4a16") for rows in (1, 9)
    }
    assert all(record.value > 0 for record in found) and {"limits", "attention"} < {r.benchmark for r in found}
    assert {r.case["format"] for r in found if r.benchmark == "gemm" and r.repeats == 2} == set(FORMATS)


def test_adapters_are_compared_with_the_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"], scale=0.2)
    settings: dict[str, Setting] = {"device": "cpu", "threads": 1, "enable_prefix_caching": True}
    settings["cache_block_seq_len"] = 4
    outputs: list[Chunk] = []
    generate, stream = Engine.generate, Engine.stream

    def kept(*given: Any, **more: Any) -> list[Output]:
        made = generate(*given, **more)
        outputs.extend(made)
        return made

    def kept_last(*given: Any, **more: Any) -> Iterator[Chunk]:
        made = list(stream(*given, **more))
        outputs.append(made[-1])
        return iter(made)

    monkeypatch.setattr(Engine, "generate", kept)
    monkeypatch.setattr(Engine, "stream", kept_last)
    measured = run_adapters(
        str(tmp_path / "m"), batch=2, rank=3, prompt=8, output=9, runs=2, settings=settings, console=Console(quiet=True)
    )
    records = [one for one in measured if one.repeats == 2]  # records of the first run have one repeat
    share = "% of the model alone"
    for at, phase in enumerate(("prefill", "decode")):
        of_phase = records[4 * at : 4 * at + 4]
        with_adapters = f"{phase} with adapters"
        expected = [
            (phase, "tokens/s"),
            (with_adapters, "tokens/s"),
            (with_adapters, share),
            (f"{with_adapters}, by CPU time", share),
        ]
        assert [(one.name, one.unit) for one in of_phase] == expected[: len(of_phase)]
        assert len(of_phase) == 4 or phase == "decode"
        assert all(one.value > 0 and one.repeats == 2 for one in of_phase)
    assert len(outputs) == 2 * 2 * 3 * 2 and not any(one.num_cached_tokens for one in outputs)


def test_adapters_can_check_that_tokens_do_not_depend_on_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"], scale=0.2)
    sizes = ["--batch-size", "2", "--rank", "3", "--prompt-tokens", "8", "--output-tokens", "6", "--runs", "1"]
    command = ["adapters", str(tmp_path / "m"), *sizes, "--check", "--device", "cpu", "--threads", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "prefill with adapters" in done.output
    monkeypatch.setattr(adapters, "tokens_are_equal_in_a_batch", lambda *model, **sizes: False)
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, InternalError) and "differ alone and in a batch" in str(error)


def test_cpu_time_of_decode_is_left_out_if_it_is_noise() -> None:
    alone = [_Seconds({"decode": 2.0}, {"prefill": 1.0, "decode": 3.0})]
    adapted = [_Seconds({"decode": 4.0}, {"prefill": 1.0, "decode": 4.0})]
    figures = [values for _, _, values in _figures("decode", 8, alone, adapted)]
    assert figures == [[4.0], [2.0], [50.0], [75.0]]
    for noise in (-0.5, 0.0, 0.5):
        short = [_Seconds({"decode": 4.0}, {"prefill": 1.0, "decode": noise})]
        assert len(list(_figures("decode", 8, alone, short))) == len(list(_figures("decode", 8, short, alone))) == 3


def test_kernel_of_reads_the_report_of_the_engine() -> None:
    report = [
        "device 0: a GPU, sm_90, 132 SMs; GEMMs: cublasLt 130200",
        "rows 1..8 n 64 k 32 bf16 -> bf16: cuBLASLt, padded to 16 rows, 1.0 us, 3.10 TB/s",
        "rows 9..16 n 64 k 32 bf16 -> bf16: own stream 16 x 32, 4 stages, by rule",
        "rows 1..16 n 64 k 48 bf16 -> bf16, int4, groups of 128: own tile 16 x 64, 6 stages, 2 blocks, 3.0 us, 1 TB/s",
    ]
    expected = {
        1: "cuBLASLt, padded to 16 rows",
        9: "own stream 16 x 32, 4 stages",
        512: "own stream 16 x 32, 4 stages",
    }
    assert {rows: kernel_of(report, 64, 32, rows) for rows in expected} == expected
    assert kernel_of(report, 64, 48, 2) == "own tile 16 x 64, 6 stages, 2 blocks"
    assert kernel_of([], 64, 32, 1) == ""


@pytest.mark.parametrize("text", ["4,2,128", "4,5,128,64", "4,2,128,0", "a,2,128,64"])
def test_invalid_sizes_of_experts_are_rejected(text: str) -> None:
    error = CliRunner().invoke(app, ["kernels", "--experts", text]).exception
    assert isinstance(error, InvalidRequestError) and text in str(error)


@pytest.mark.parametrize(("formats", "sizes"), [(["w4a16"], "4,2,128,64"), (["bf16"], "4,2,128,128")])
def test_experts_in_none_of_the_formats_are_rejected(formats: list[str], sizes: str) -> None:
    asked = [part for one in formats for part in ("--format", one)]
    error = CliRunner().invoke(app, ["kernels", "--experts", sizes, *asked]).exception
    assert isinstance(error, InvalidRequestError) and sizes in str(error)


def test_kernels_shows_and_writes_what_was_measured_before_an_error(tmp_path: Path) -> None:
    def measured(*_: object, **__: object) -> Iterator[Record]:
        yield Record.of("gemm", "time", "us", [1.0], case={"rows": 1})
        raise EngineClosedError("the device fails")

    file = tmp_path / "kernels.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("charonia.bench.kernels.measure_kernels", measured)
        done = CliRunner().invoke(app, ["kernels", "--json", str(file)])
    assert isinstance(done.exception, EngineClosedError) and "gemm" in done.output
    assert [record.value for record in records.read(file)[1]] == [1.0]


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_kernels_shows_progress_only_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TerminalStream() if terminal else io.StringIO()
    before = set(threading.enumerate())
    more = set[threading.Thread]()

    def measure(*_: Any, **__: Any) -> Iterator[Record]:
        for rows in (1, 8):
            more.update(set(threading.enumerate()) - before)
            yield Record.of("gemm", "time", "us", [1.0], case={"rows": rows})

    monkeypatch.setattr("charonia.bench.kernels.measure_kernels", measure)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then writes control codes into logs
    kernels(json_file=None)
    assert ("figures: 2, last: gemm 8 rows" in stream.getvalue()) is terminal
    assert ("\x1b" in stream.getvalue()) is terminal
    assert not more, "threads take time from the kernels"


@pytest.mark.parametrize("progress", [True, False])
def test_output_during_a_measurement_is_not_redirected(
    progress: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error is a terminal, and standard output is not."""

    def measure() -> Iterator[Record]:
        print("a figure")
        print("a warning", file=sys.stderr)
        yield Record.of("gemm", "time", "us", [1.0])

    monkeypatch.setattr(sys, "stderr", stream := TerminalStream())
    monkeypatch.setenv("TERM", "xterm")
    _show(None, {}, measure(), progress=progress)
    assert "a warning\n" in stream.getvalue() and "a figure" not in stream.getvalue()
    assert capsys.readouterr().out.startswith("a figure\n")


def test_file_has_each_record_at_once_and_the_last_one_of_a_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    first, other, again = (
        Record.of("gemm", "time", "us", value, case={"rows": rows}) for value, rows in ((1.0, 1), (2.0, 8), (3.0, 1))
    )
    seen = [(found, records.read(file)[1]) for found in records.keep(file, {}, [first, other, again])]
    assert seen == [([first], [first]), ([first, other], [first, other]), ([again, other], [again, other])]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert capsys.readouterr().err.splitlines()[1] == "gemm 8 rows: time, us 2"


def test_a_record_is_named_in_words() -> None:
    cases: dict[str, dict[str, object]] = {
        "gemm qkv 2560 x 1536, w4a16, 1 row": {"weight": "qkv 2560 x 1536", "format": "w4a16", "rows": 1, "kernel": ""},
        "attention 8 bits, context 512, 16 sequences": {"KV cache": "8 bits", "context": 512, "sequences": 16},
        "limits": {},
    }
    for words, case in cases.items():
        assert Record.of(words.split()[0], "time", "us", 1.0, case=case).subject == words


def test_static_writes_the_cases_before_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"])

    def measure(engine: Engine, batch: int, *_: object) -> list[static.Phases]:
        if batch == 3:
            raise EngineClosedError("the device fails")
        return [static.Phases(1.0, 2.0, 3.0)]

    monkeypatch.setattr(static, "_measure", measure)
    command = ["static", str(tmp_path / "m"), "--case", "2,8,5", "--case", "3,8,5", "--device", "cpu", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "static.json")])
    assert isinstance(done.exception, EngineClosedError)
    _, found = records.read(tmp_path / "static.json")
    assert [(one.value, one.case["batch"]) for one in found if one.name == "decode"] == [(4.0, 2)]


def test_static_rejects_a_malformed_case_and_a_case_beside_lengths() -> None:
    for options, wanted in (
        (["--case", "1,32"], "--case 1,32: expected BATCH,PROMPT,OUTPUT"),
        (["--case", "1,32,x"], "--case 1,32,x: expected BATCH,PROMPT,OUTPUT"),
        (["--case", "1,2,3", "--batch-size", "2"], "--case cannot be combined with --batch-size"),
    ):
        error = CliRunner().invoke(app, ["static", "m", *options]).exception
        assert isinstance(error, InvalidRequestError) and wanted in str(error)


def test_static_measures_each_case_with_one_engine(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"])
    cases = ["--case", "1,8,4", "--case", "3,2,5"]
    command = ["static", str(tmp_path / "m"), *cases, "--runs", "1", "--device", "cpu", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--json", str(tmp_path / "static.json")])
    assert done.exit_code == 0, done.output
    _, found = records.read(tmp_path / "static.json")
    assert [one.case for one in found if one.name == "decode"] == [
        {"batch": 1, "prompt": 8, "output": 4}, {"batch": 3, "prompt": 2, "output": 5}
    ]  # fmt: skip


def test_tokens_of_sequences_that_decode_while_others_prefill_are_not_in_the_rate_of_decoding() -> None:
    early = Arrivals([100, 200, 1000, 1400], [1, 4, 5, 9])  # 4 tokens after its first one before the other has one
    late = Arrivals([1000, 1400, 1600], [1, 5, 9])  # its last 4 appear without the other one, at twice the speed
    ended = Arrivals([100, 200], [1, 9])
    for sequences, expected in (
        ([early, late], (1.0, 0.8, 1.6)),  # 16 tokens, at the rate of 8 in 0.4 s
        ([Arrivals([5, 25], [1, 3])], (0.005, 0.02, 0.025)),  # alone: all its tokens
        ([ended, late], (1.0, 1.2, 1.6)),  # 16 tokens, at the rate of 8 in 0.6 s
    ):
        found = phases(sequences)
        assert (found.prefill, found.decode, found.total) == pytest.approx(expected)


def test_rate_of_decoding_counts_the_tokens_after_the_last_prompt(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"])
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "token_budget": 64, "session_len": 128}
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    with Engine.from_pretrained(str(tmp_path / "m"), max_batch_size=8, stream_interval_ms=0, **settings) as engine:
        sequences = run_batch(engine, [[3 + index] * 60 for index in range(8)], sampling)
    found = phases(sequences)
    begins = 1e3 * found.prefill
    ends = [one.times[-1] for one in sequences]
    until = min(ends) if min(ends) > begins else max(ends)

    def arrived(ms: float) -> int:
        return sum(
            max([n for at, n in zip(one.times, one.tokens, strict=True) if at <= ms], default=0) for one in sequences
        )

    assert arrived(begins) > 8  # each prompt needs a step, in which the sequences before it decode
    counted = (until - begins) / 1e3 * 8 * 59 / found.decode
    # A chunk has several tokens if the text waits for the rest of a character.
    most = sum(max(b - a for a, b in pairwise(one.tokens)) for one in sequences)
    assert counted == pytest.approx(arrived(until) - arrived(begins), abs=most)


def test_kernels_with_unknown_format_is_rejected() -> None:
    error = CliRunner().invoke(app, ["kernels", "--format", "int3"]).exception
    assert isinstance(error, InvalidRequestError) and "bf16, w4a16" in str(error)


def test_peers_are_compared_with_the_best_one() -> None:
    engines = [one for one in ENGINES if one.bits == 16]
    ours = Result(engines[0], "charonia", info={"weight_mb_per_step": 100.0}, prefill_s={512: [1.0, 0.5, 2.0]},
                  decode_s={1: [1.1, 1.0, 1.2], 8: [2.0, 2.0, 2.0]}, peak_mb=400.0)  # fmt: skip
    fast = Result(engines[1], "llama_cpp 1.2", prefill_s={512: [0.8] * 3}, decode_s={1: [2.0] * 3, 8: [2.5] * 3})
    slow = Result(engines[2], "openvino 3", prefill_s={512: [0.9] * 3}, decode_s={1: [2.1] * 3, 8: [2.4] * 3})
    absent = Result(engines[3], "transformers", missing="pip install failed")
    found = {
        (record.case["engine"], record.name, record.unit): record.value
        for record in peer_records("m", [ours, fast, slow, absent], [9e9, 10e9], 101)
    }
    assert found["charonia", "prefill of 512", "tokens/s"] == 512
    assert found["charonia", "prefill of 512", "times the best peer"] == pytest.approx(0.8)
    assert found["charonia", "decode, batch 1", "tokens/s"] == pytest.approx(100 / 1.1)
    assert found["charonia", "decode, batch 1", "% of the read limit"] == pytest.approx(100 / 1.1)
    assert found["charonia", "decode, batch 8", "times the best peer"] == pytest.approx(1.2)
    assert found["openvino 3", "decode, batch 8", "tokens/s"] == pytest.approx(8 * 100 / 2.4)
    assert not any(engine == "transformers" for engine, *_ in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "bits", "own", "others"),
    [
        ("tiny", "16", "charonia", {"llama_cpp", "openvino", "transformers"}),
        ("gpt-oss-1,64,4,2,64,320", "4", "charonia_mxfp4", {"llama_cpp_mxfp4"}),
        ("qwen3.5-4,64,2,1,64,320", "16", "charonia", {"llama_cpp", "openvino", "transformers"}),
        ("gemma4-10,64,2,1,64,320", "16", "charonia", {"llama_cpp", "openvino", "transformers"}),
    ],
)
def test_peers_without_installation_measures_charonia_and_names_the_others(
    shape: str, bits: str, own: str, others: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "peers.json"
    done = CliRunner().invoke(
        app,
        ["peers", "--shape", shape, "--bits", bits, "--prompt", "64", "--tokens", "8", "--rounds", "1", "--no-install",
         "--threads", "1", "--folder", str(tmp_path), "--json", str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    run, found = records.read(file)
    figures = {(record.name, record.unit): record.value for record in found if record.case == {"engine": own}}
    assert {name for name, _ in figures} == {"prefill of 64", "decode, batch 1", "decode, batch 8", "peak memory"}
    assert min(figures.values()) > 0 and len(found) == len(figures)
    assert set(run["settings"]["missing"]) == others
    assert f"{min(others)} was not measured: it is not installed" in done.output


def test_a_failed_command_of_a_peer_is_explained_by_its_last_error() -> None:
    code = "import sys; print('error: first', file=sys.stderr); raise ValueError('the reason')"
    with pytest.raises(peers.PeerError, match=r"^it failed with status 1: ValueError: the reason$"):
        peers._call([sys.executable, "-c", code], "it failed")


def test_peers_with_unknown_name_is_rejected_before_anything_is_installed(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["peers", "--bits", "8", "--peer", "none", "--folder", str(tmp_path)]).exception
    assert isinstance(error, InvalidRequestError) and "llama_cpp_q8_0" in str(error)
    assert not list(tmp_path.iterdir()) and asdict(ENGINES[0])["kind"] == "charonia"


def test_peer_environment_with_other_packages_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example an environment of an earlier version, which lacks a package."""
    installed: list[list[object]] = []

    def call(command: Sequence[object], *_: object, **__: object) -> str:
        installed.extend([list(command)] if "install" in command else [])
        return "1.0\n"

    monkeypatch.setattr(peers, "_call", call)
    monkeypatch.setattr("venv.create", lambda place, **_: place.mkdir(exist_ok=True))
    peer = next(one for one in ENGINES if one.kind == "ctranslate2")
    for packages in (("ctranslate2",), ("ctranslate2", "torch"), ("ctranslate2", "torch")):
        monkeypatch.setitem(peers._PACKAGES, peer.kind, packages)
        assert peers._environment(peer, tmp_path, True, print)[1] == "ctranslate2_int8 1.0"
    assert [command[-1] for command in installed] == ["ctranslate2", "torch"]
    monkeypatch.setitem(peers._PACKAGES, peer.kind, ("ctranslate2", "numpy"))
    with pytest.raises(peers.PeerError, match="not installed with ctranslate2, numpy, and --no-install"):
        peers._environment(peer, tmp_path, False, print)
