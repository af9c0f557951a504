"""The output of `charonia plan` before anything is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from charonia import Engine
from charonia.bench.random_model import SHAPES, parse_shape, write_random_model
from charonia.errors import CharoniaError, InvalidRequestError, UnsupportedError
from charonia.serve.triton import has_gpu
from charonia.units import spell_bytes
from charonia.weights.convert import convert
from charonia.weights.plan import Plan, make_plan

PLAIN = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200"}
SMALL = Plan(
    model_name="small",
    weight_type="bf16",
    data_type="bf16",
    group_size=0,
    ranks=1,
    device="cpu",
    device_note="",
    weight_bytes=10,
    activation_bytes=10,
    kv_token_bytes=10,
    kv_block_bytes=640,
    free_bytes=100_000,
    num_blocks=100,
    cache_block_seq_len=64,
    session_len=4096,
    max_batch_size=64,
    token_budget=512,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    write_random_model(folder, SHAPES["tiny"], scale=0.2)
    return folder


def plan(*arguments: str | Path) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "charonia", "plan", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=PLAIN)
    return done.returncode, done.stdout, done.stderr


def test_users_and_contexts_follow_from_the_blocks() -> None:
    assert SMALL.most_users(64) == 100
    assert SMALL.most_users(65) == 50
    assert SMALL.most_users(4096) == 1
    assert SMALL.most_users(4097) == 0
    assert SMALL.longest_context(1) == 4096
    assert SMALL.longest_context(3) == 33 * 64
    assert SMALL.longest_context(101) == 0
    assert SMALL.contexts() == [2048, 4096]
    assert replace(SMALL, session_len=40000).contexts() == [2048, 8192, 32768, 40000]
    assert SMALL.user_counts() == [1, 4, 16, 64]


def test_plan_that_does_not_fit_is_rejected_with_the_numbers() -> None:
    assert SMALL.refusal(None, None) is None
    assert SMALL.refusal(50, 128) is None
    refusal = SMALL.refusal(51, 128)
    assert refusal is not None
    for part in ("51 users with 128 tokens", "102 KV blocks", "there are 100", "50 users with 128", "51 with 64"):
        assert part in refusal
    assert "--session-len 4097" in str(SMALL.refusal(None, 4097))
    assert "--max-batch-size 65" in str(SMALL.refusal(65, None))
    broken = replace(SMALL, num_blocks=0, warnings=["a warning", "the model does not fit"])
    assert broken.refusal(None, None) == "the model does not fit"


def test_layers_with_a_window_need_blocks_for_the_window_only() -> None:
    windowed = replace(SMALL, window=1024, kv_window_block_bytes=3200, num_window_blocks=40)
    assert windowed.kv_cache_bytes == 100 * 640 + 40 * 3200
    assert windowed.most_users(512) == 5
    assert windowed.most_users(2048) == 2  # 17 window blocks each
    assert windowed.longest_context(2) == 50 * 64
    assert windowed.longest_context(8) == 5 * 64
    refusal = str(windowed.refusal(3, 2048))
    assert "need 96 KV blocks and 51 window blocks (219 KiB)" in refusal
    assert "there are 100 KV blocks and 40 window blocks (188 KiB)" in refusal
    assert windowed.refusal(2, 2048) is None


def test_plan_counts_the_draft_model(model: Path, tmp_path: Path) -> None:
    settings = {"device": "cpu", "cache_max_entry_count": 0.5, "max_batch_size": 100_000}
    without = make_plan(model, {**settings, "speculative_method": "ngram"}, memory="2GiB")
    made = make_plan(model, {**settings, "speculative_model": str(model)}, memory="2GiB")
    assert without.speculative_bytes == 0 < made.weight_bytes < made.speculative_bytes
    assert made.fixed_bytes == without.fixed_bytes + made.speculative_bytes
    fewer = without.num_blocks - made.num_blocks
    assert fewer == pytest.approx(made.speculative_bytes / 2 / made.kv_block_bytes, abs=1)
    assert "draft model, MTP layer or EAGLE-3 head" in plan(model, "--speculative-model", model)[1]
    assert not [one for one in made.warnings if "vocab_size" in one]
    other = tmp_path / "other"
    write_random_model(other, parse_shape("1,64,2,1,64,333"))
    warnings = make_plan(model, {**settings, "speculative_model": str(other)}, memory="2GiB").warnings
    assert f"{other} has vocab_size = 333, and the model has 320: the engine uses it only if" in " ".join(warnings)
    unused = make_plan(model, {**settings, "speculative_model": "m", "speculative_method": "ngram"}, memory="2GiB")
    assert unused.speculative_bytes == 0 and "speculative_model = m has no effect" in unused.warnings[-1]


def test_plan_names_the_draft_model_that_was_given(model: Path, tmp_path: Path) -> None:
    states = tmp_path / "states"
    write_random_model(states, parse_shape("qwen3.5-4,64,2,1,64,320"))
    with pytest.raises(UnsupportedError, match=f"speculative_model = {states}: a draft model with recurrent layers"):
        make_plan(model, {"device": "cpu", "speculative_model": str(states)})


def test_plan_with_windows_equals_the_engines_sizes(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"], scale=0.2)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "model_type": "mistral", "sliding_window": 128}))
    settings = {"device": "cpu", "cache_users": 2, "token_budget": 64, "cache_block_seq_len": 16}
    made = make_plan(tmp_path / "m", settings)
    # Each of the two sequences has 9 blocks for its window, and one step has 5.
    assert (made.window, made.num_blocks, made.num_window_blocks) == (128, 2 * 128, 2 * 9 + 5)
    assert made.kv_block_bytes == 0, "all layers have a window"
    assert made.most_users(2048) == 2
    assert make_plan(tmp_path / "m", {**settings, "session_len": 128}).window == 0, "the window frees nothing"
    with Engine.from_pretrained(tmp_path / "m", **settings) as engine:
        assert (engine.info.num_blocks, engine.info.num_window_blocks) == (256, 23)
        assert engine.info.kv_cache_bytes == made.kv_cache_bytes == 23 * made.kv_window_block_bytes


def test_states_of_recurrent_layers_count_in_the_size_of_the_cache() -> None:
    recurrent = replace(SMALL, state_bytes=5000, num_states=70)
    assert recurrent.kv_cache_bytes == 100 * 640 + 70 * 5000
    assert recurrent.most_users(512) == SMALL.most_users(512)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.50 KiB"),
        (13 << 30, "13.0 GiB"),
        (300 << 20, "300 MiB"),
        (5 << 40, "5.00 TiB"),
    ],
)
def test_bytes_are_spelled_with_three_digits(count: int, text: str) -> None:
    assert spell_bytes(count) == text


def test_plan_equals_the_engines_sizes(model: Path, tmp_path: Path) -> None:
    settings = {"device": "cpu", "cache_users": 3, "cache_user_tokens": 100, "cache_block_seq_len": 16}
    workspace = convert(model, tmp_path / "w", dtype="bf16")
    for source in (model, workspace):
        made = make_plan(source, settings, dtype="bf16" if source == model else "auto")
        with Engine.from_pretrained(workspace, **settings) as engine:
            assert made.num_blocks == engine.info.num_blocks == 21
            assert made.kv_cache_bytes == engine.info.kv_cache_bytes
            # A plan has the requested value; the engine lowers it to the capacity of the blocks.
            assert min(made.session_len, 21 * 16) == engine.info.session_len
            assert made.weight_type == engine.info.weight_type == "bf16"
            assert made.data_type == engine.info.data_type == "bf16"
            assert made.group_size == engine.info.group_size == 0
            assert made.token_budget == engine.info.token_budget == 512
            assert made.max_batch_size == engine.info.max_batch_size == 64
        assert made.refusal(3, 100) is None
        assert made.refusal(4, 100) is not None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_quantised_cache_takes_the_documented_bytes_of_each_head(model: Path, device: str) -> None:
    plain, int8, int4, fp8 = (
        make_plan(model, {"device": device, "cache_size": "16MiB", "quant_policy": policy}, dtype="bf16", memory="1GiB")
        for policy in (0, 8, 4, 16)
    )
    shape = SHAPES["tiny"]
    heads = 2 * shape.layers * shape.kv_heads
    size = shape.hidden // shape.heads
    assert plain.kv_token_bytes == heads * size * 2
    assert int8.kv_token_bytes == heads * (size + 4)
    assert int4.kv_token_bytes == heads * (size // 2 + 4)
    assert fp8.kv_token_bytes == heads * size
    assert int4.num_blocks > fp8.num_blocks > int8.num_blocks > plain.num_blocks
    with pytest.raises(InvalidRequestError, match=r"quant_policy = '3'.*0 \| 4 \| 8 \| 16"):
        make_plan(model, {"device": device, "quant_policy": 3}, memory="1GiB")


def test_plan_names_the_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    write_random_model(tmp_path / "m", SHAPES["tiny"], scale=0.2)
    (tmp_path / "m" / "generation_config.json").write_text('{"temperature": 0.6}')
    line = "requests use the sampling defaults of generation_config.json: temperature = 0.6. "
    assert [text.startswith(line) for text in make_plan(tmp_path / "m").warnings] == [True]
    assert make_plan(tmp_path / "m", {"generation_config": "none"}).warnings == []


def test_a_gpu_that_is_elsewhere_is_planned_from_its_memory(model: Path) -> None:
    made = make_plan(model, {"device": "cuda", "tensor_para_size": 2}, memory="80GiB")
    assert (made.device, made.ranks, made.free_bytes) == ("cuda", 2, 160 << 30)
    # The number of SMs is unknown, so the plan assumes an H100.
    assert (made.token_budget, made.max_batch_size) == (2048, 256)
    small = make_plan(model, {"device": "cuda", "token_budget": 99}, memory="8GiB")
    assert (small.token_budget, small.max_batch_size) == (99, 64)
    assert made.num_blocks > 0
    with pytest.raises(InvalidRequestError, match="80 gigs"):
        make_plan(model, {"device": "cuda"}, memory="80 gigs")


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_missing_gpu_is_reported_with_the_remedy(model: Path) -> None:
    with pytest.raises(CharoniaError, match="--memory 80GiB"):
        make_plan(model, {"device": "cuda"})


@pytest.mark.skipif(not has_gpu(), reason="there is no GPU")
def test_a_gpu_that_is_here_is_planned_from_its_free_memory(model: Path) -> None:
    made = make_plan(model, {"device": "cuda"})
    assert made.device == "cuda" and made.free_bytes > 0


@pytest.mark.slow
def test_the_command_prints_tables_or_json_and_the_goals(model: Path) -> None:
    code, out, err = plan(model, "--device", "cpu")
    assert code == 0, err
    steps = "Steps of at most 512 tokens (token_budget) and 64 sequences (max_batch_size)."
    for part in ("weights", "KV of one token", "Maximum number of users", "Longest context", steps):
        assert part in out
    asked = ("--device", "cpu", "--cache-max-entry-count", "10", "--cache-block-seq-len", "8")
    code, out, err = plan(model, *asked, "--users", "2", "--context", "40")
    assert code == 0 and "10 of 10 blocks" in out, err
    code, out, err = plan(model, *asked, "--users", "3", "--context", "40")
    assert code == 1 and "15 KV blocks" in err and "there are 10" in err
    code, out, _ = plan(model, *asked, "--users", "3", "--context", "40", "--json")
    answer = json.loads(out)
    assert code == 1 and answer["fits"] is False and answer["num_blocks"] == 10
    assert answer["most_users"] == [{"context": 40, "users": 2}]
    assert answer["longest_context"] == [{"users": 3, "context": 24}]
    code, out, _ = plan(model, *asked, "--users", "2", "--json")
    assert code == 0 and json.loads(out)["longest_context"] == [{"users": 2, "context": 40}]
