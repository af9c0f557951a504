"""Tests that need a GPU: shapes with special kernels, results that do not depend on the batch, guides, memory.

They run with CHARONIA_DEVICE=cuda on a GPU, or on the emulated device (`scripts/gpu_check.sh --emulated`), which runs
the kernels as plain C++. That is slow, so requests are fewer and shorter there.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from missing_tools import needed_module

torch = needed_module("torch")
sys.path.append(str(Path(__file__).resolve().parents[1] / "parity"))

from parity_models import Variant, chosen_logprobs, greedy, own_logprobs, prompts_of, write_model  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from charonia import CharoniaError, Engine, Guide, Output, SamplingParams  # noqa: E402

DEVICE = os.environ.get("CHARONIA_DEVICE", "")
pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="CHARONIA_DEVICE is not cuda (scripts/gpu_check.sh)")
TORCH_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EMULATED = TORCH_DEVICE == "cpu"
# Lengths next to the edges of blocks and tiles, and far beyond both.
LENGTHS = (1, 17, 70) if EMULATED else (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 300, 513, 1000)
NEW_TOKENS = 4 if EMULATED else 24
TIE = 1e-4

# (head_dim, heads, KV heads) of real models.
HEADS = [(64, 8, 8), (64, 14, 2), (128, 8, 8), (128, 8, 2), (128, 8, 1), (80, 4, 2), (96, 4, 4)]
if EMULATED:
    HEADS = [(64, 2, 1)]


def variant(head_dim: int, heads: int, kv_heads: int) -> Variant:
    return Variant(
        LlamaConfig(
            vocab_size=320,
            hidden_size=head_dim * heads,
            intermediate_size=104 if EMULATED else 704,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        ),
        {},
    )


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0, **changes})


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "x".join(map(str, heads)))
def test_greedy_tokens_equal_transformers_with_heads_as_models_have_them(
    heads: tuple[int, int, int], tmp_path: Path
) -> None:
    prompts = prompts_of(5, LENGTHS)
    for seed in range(20):
        folder = tmp_path / str(seed)
        model = write_model(folder, variant(*heads), seed, scale=0.06).to(TORCH_DEVICE)
        references = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
        if min(reference.least_lead for reference in references) >= TIE:
            break
    else:
        pytest.fail("every seed has a tie")
    with Engine.from_pretrained(folder, token_budget=256) as engine:
        assert engine.info.device == DEVICE
        outputs = engine.generate(prompts, sampling())
    for output, reference in zip(outputs, references, strict=True):
        assert output.token_ids == reference.token_ids
        expected = reference.logprobs.cpu()[torch.arange(NEW_TOKENS), torch.tensor(output.token_ids)]
        assert (torch.tensor(output.logprobs, dtype=torch.float64) - expected).abs().max() < 2e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "x".join(map(str, heads)))
def test_logprobs_with_16_bit_weights_are_as_exact_as_in_transformers(
    heads: tuple[int, int, int], dtype: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path, variant(*heads), 3, getattr(torch, dtype), scale=0.06).to(TORCH_DEVICE)
    prompts = prompts_of(6, LENGTHS)
    with Engine.from_pretrained(tmp_path, token_budget=256) as engine:
        outputs = engine.generate(prompts, sampling())
    ours, exact = own_logprobs(outputs), chosen_logprobs(model, prompts, outputs)
    theirs = chosen_logprobs(model.to(getattr(torch, dtype)), prompts, outputs)
    assert (ours - exact).abs().mean() < 1.1 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() < 4 * (theirs - exact).abs().max()


# Types that stay quantised, types that the device dequantises, and both in weights that are computed together.
QUANTISED = {"ffn_gate": "MXFP4", "ffn_up": "MXFP4", "attn_output": "Q8_0", "ffn_down": "Q5_0", "token_embd": "IQ4_NL"}
DEQUANTISED = {"attn_output": "Q5_1", "ffn_gate": "Q2_K", "ffn_up": "Q2_K", "ffn_down": "Q3_K", "token_embd": "Q4_K"}
MIXED = {"attn_q": "Q4_K", "attn_k": "Q8_0", "attn_output": "Q5_K", "ffn_up": "Q4_0", "ffn_down": "Q8_0"}


@pytest.mark.parametrize(
    "kinds",
    [{**QUANTISED, "else": "Q4_0"}, {**DEQUANTISED, "else": "Q4_1"}, {**MIXED, "else": "Q6_K"}],
    ids=["quantised", "dequantised", "mixed"],
)
def test_gguf_files_give_the_results_of_the_cpu(
    kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_module("gguf")
    from gguf_models import write_pair

    monkeypatch.setenv("CHARONIA_RUN_DIR", str(tmp_path / "run"))
    file = tmp_path / "m.gguf"
    write_pair(file, tmp_path / "dense", kinds)
    prompts = prompts_of(7, LENGTHS)
    for dtype in ("fp32", "bf16"):
        found = {}
        for device in ("cpu", DEVICE):
            with Engine.from_pretrained(file, dtype=dtype, device=device, token_budget=256) as engine:
                assert engine.info.device == device
                warned = any("groups of 16 columns" in warning for warning in engine.info.warnings)
                assert warned == (device == "cuda" and kinds["else"] != "Q4_0")
                found[device] = engine.generate(prompts, sampling())
        for ours, theirs in zip(found[DEVICE], found["cpu"], strict=True):
            if dtype == "fp32":
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            else:
                assert ours.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, variant(*HEADS[0] if EMULATED else (128, 8, 2)), 1, torch.bfloat16, scale=0.06)
    yield folder


def answer(output: Output) -> tuple[list[int], list[float]]:
    return output.token_ids, output.logprobs


def test_reproducible_results_do_not_depend_on_the_batch(model: Path) -> None:
    prompts = prompts_of(8, LENGTHS if EMULATED else LENGTHS * 3)
    requests = [sampling(temperature=index % 2, seed=index) for index in range(len(prompts))]
    with Engine.from_pretrained(model, reproducible=True, token_budget=192, max_batch_size=64) as engine:
        alone = [
            answer(engine.generate([prompt], request)[0]) for prompt, request in zip(prompts, requests, strict=True)
        ]
        together = [answer(output) for output in engine.generate(prompts, requests)]
        again = [answer(output) for output in engine.generate(prompts[::-1], requests[::-1])][::-1]
    assert together == alone
    assert again == alone


def test_captured_steps_give_the_results_of_issued_steps(model: Path) -> None:
    prompts = prompts_of(9, LENGTHS)
    given = {}
    for graphs in (True, False):
        with Engine.from_pretrained(model, cuda_graphs=graphs, reproducible=True) as engine:
            given[graphs] = [answer(output) for output in engine.generate(prompts, sampling())]
    assert given[True] == given[False]


def test_guided_responses_follow_their_guides_and_change_no_other_response(model: Path) -> None:
    schema = {"type": "object", "properties": {"k": {"enum": [1, 20]}, "l": {"type": "boolean"}}, "required": ["k"]}
    guides = [Guide.regex("(ab|c){3,5}z"), Guide.choice(["yes", "né"]), Guide.json_schema(schema)]
    prompts = prompts_of(10, LENGTHS)
    seeds = 1 if EMULATED else 8
    guided = [SamplingParams(max_tokens=40, temperature=1, seed=seed, n=2) for seed in range(seeds)]
    with Engine.from_pretrained(model, reproducible=True, token_budget=192) as engine, ThreadPoolExecutor(4) as pool:
        alone = [answer(output) for output in engine.generate(prompts, sampling())]
        found = [pool.submit(engine.generate, [prompts[0]] * seeds, guided, guide=guide) for guide in guides]
        assert [answer(output) for output in engine.generate(prompts, sampling())] == alone
        texts = [[(output.finish_reason, output.text) for output in one.result()] for one in found]
        engine.check_integrity()
    assert all(reason == "stop" for outputs in texts for reason, _ in outputs)
    matched, chosen, written = ([text for _, text in outputs] for outputs in texts)
    assert len(matched) == 2 * seeds and all(re.fullmatch("(ab|c){3,5}z", text) for text in matched), matched
    assert set(chosen) <= {"yes", "né"}
    for value in map(json.loads, written):
        assert value["k"] in (1, 20) and set(value) <= {"k", "l"} and isinstance(value.get("l", True), bool), value


def test_cache_that_does_not_fit_is_rejected_with_numbers_and_setting(model: Path) -> None:
    with pytest.raises(
        CharoniaError, match=r"takes 1000000000 blocks of .* free beside the model .*Lower cache_max_entry_count"
    ):
        Engine.from_pretrained(model, cache_max_entry_count=1_000_000_000).close()


def test_an_engine_gives_its_memory_back(model: Path) -> None:
    for _ in range(3):
        with Engine.from_pretrained(model, cache_max_entry_count=0.6) as engine:
            assert engine.generate([[5, 6, 7]], sampling())[0].finish_reason == "length"


def test_kernels_are_measured_in_both_modes_and_named(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from charonia.bench.cli import app
    from charonia.bench.records import read

    file = tmp_path / "kernels.json"
    shape = "1,128,4,2,256,300" if EMULATED else "1,4096,32,8,14336,300"
    done = CliRunner().invoke(
        app,
        ["kernels", "--device", "cuda", "--shape", shape, "--format", "bf16", "--format", "w4a16", "--rows", "1",
         "--rows", "16", "--context", "70", "--batch", "2", "--experts", "4,2,128,128", "--rounds", "1", "--json",
         str(file)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    experts = [one.case for one in read(file)[1] if one.benchmark == "experts" and one.name == "time"]
    kernels = [(case["kernel"], case["rows"]) for case in experts]
    assert kernels[:2] == [("stream", 1), ("tiles", 16)] and kernels[2:] in ([], [("wgmma", 16)])
    if EMULATED:
        assert bool(kernels[2:]) == (os.environ.get("CHARONIA_CUDA_UNPROVEN") == "1")
    gemms = [one.case for one in read(file)[1] if one.benchmark == "gemm" and one.name == "time"]
    modes = {(case["weight"].split()[0], case["format"], case["rows"], case["mode"]) for case in gemms}
    assert len(modes) == 4 * 2 * 2 * 2 and ("o", "bf16", 16, "reproducible") in modes
    assert all(case["kernel"] for case in gemms)
    assert all(case["kernel"].startswith("own ") for case in gemms if case["mode"] == "reproducible")
