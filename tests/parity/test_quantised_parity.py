"""Quantised models give the results of transformers with the dequantised weights, in fp32 arithmetic.

The dequantised weights come from compressed-tensors, from transformers for GPT-OSS' MXFP4, or from numpy for the other
formats (tests/quantised_models.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from parity_models import (  # noqa: E402
    VOCAB,
    Variant,
    chosen_logprobs,
    load_model,
    logprobs_of,
    own_logprobs,
    prompts_of,
    ranks,
    sized,
    write_model,
)
from quantised_models import FORMATS, GPT_OSS, quantise, round_to_nearest  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from charonia import Engine, Output, SamplingParams  # noqa: E402
from charonia.weights.convert import convert  # noqa: E402

NEW_TOKENS = 32
LENGTHS = (1, 5, 31, 65)
# A smaller lead is a tie that rounding may decide either way.
TIE = 1e-4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)


def make(variant: Variant, form: str, folder: Path, seed: int = 3) -> tuple[Path, PreTrainedModel]:
    """Create a quantised folder and the dense model of its dequantised weights."""
    dense, quantised, meant = folder / "dense", folder / "quantised", folder / "meant"
    write_model(dense, variant, seed)
    tensors = quantise(dense, quantised, form)
    shutil.copytree(dense, meant, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, meant / "model.safetensors", metadata={"format": "pt"})
    return quantised, load_model(meant, variant, torch.float32)


def answers(folder: Path, variant: Variant, **settings: Any) -> list[Output]:
    with Engine.from_pretrained(folder, dtype="fp32", **{"threads": 2, **variant.settings, **settings}) as engine:
        return engine.generate(prompts_of(7, LENGTHS), GREEDY)


def errors(outputs: list[Output], model: PreTrainedModel) -> torch.Tensor:
    """Return the errors of the log probabilities of the generated tokens."""
    return (own_logprobs(outputs) - chosen_logprobs(model, prompts_of(7, LENGTHS), outputs)).abs()


def differences(outputs: list[Output], model: PreTrainedModel) -> torch.Tensor:
    """Return `errors`. Fails if a clear greedy token differs."""
    for prompt, output in zip(prompts_of(7, LENGTHS), outputs, strict=True):
        expected = logprobs_of(model, prompt, output.token_ids)
        leads = expected.topk(2).values
        clear = leads[:, 0] - leads[:, 1] > TIE
        assert torch.equal(expected.argmax(-1)[clear], torch.tensor(output.token_ids)[clear])
    return errors(outputs, model)


WEIGHT_ONLY = [name for name in FORMATS if not name.startswith("w8a8")]


@pytest.mark.parametrize("form", WEIGHT_ONLY)
def test_every_format_gives_the_logits_of_its_dequantised_weights(form: str, tmp_path: Path) -> None:
    variant = sized("llama3")
    folder, model = make(variant, form, tmp_path)
    assert differences(answers(folder, variant), model).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "w4a16 zeros") for name in ("qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mixtral")),
        *((name, form) for name in ("phi3", "qwen3-moe-dense-layers") for form in ("awq", "gptq", "fp8 of DeepSeek")),
        *((name, GPT_OSS) for name in ("mixtral", "qwen3-moe-dense-layers", "gpt-oss")),
        *(("gpt-oss", form) for form in ("w4a16", "fp8 channels", "mxfp4")),
        *(("qwen2-moe", form) for form in ("w4a16 zeros", "gptq")),
        *(("glm4-moe", form) for form in ("awq", "fp8 of DeepSeek")),
        *(("deepseek-v2", form) for form in ("w4a16", "awq")),
        *(("deepseek-v3", form) for form in ("fp8 of DeepSeek", "gptq")),
        # Interleaved rotation: with AWQ, rows cannot be permuted during loading.
        *(("ernie4.5", form) for form in ("awq", "gptq")),
        ("qwen3", "fp8 in blocks of 128"),
        *(("gemma4", form) for form in ("w4a16 zeros", "gptq", "awq")),
        ("gemma4-31b", "fp8 channels"),
        *(("qwen3.5", form) for form in ("w4a16 zeros", "awq", "gptq", "fp8 of DeepSeek")),
        *(("qwen3-next", form) for form in ("awq", "fp8 of DeepSeek")),
        ("qwen3.5-moe", "fp8 of DeepSeek"),
    ],
)
def test_family_gives_the_logits_of_dequantised_weights_with_1_and_2_ranks(
    name: str, form: str, tmp_path: Path
) -> None:
    # With blocks of 128, the last of 192 columns is short. With blocks of 256, a rank may have half a block. As in
    # GPT-OSS with four ranks, 5 groups of an expert's columns cannot be shared equally.
    sizes = {"intermediate_size": 160} if name == "gpt-oss" else {}
    sizes |= {"hidden_size": 192, "head_dim": 64, "intermediate_size": 256} if form.endswith("of 128") else {}
    variant = sized(name, **sizes)
    folder, model = make(variant, form, tmp_path)
    assert differences(answers(folder, variant), model).max() < 1e-4
    with Engine.from_pretrained(convert(folder, tmp_path / "w1", dtype="fp32"), threads=2) as engine:
        assert differences(engine.generate(prompts_of(7, LENGTHS), GREEDY), model).max() < 1e-4
    halves = answers(folder, variant, **ranks(2), reproducible=True)
    assert differences(halves, model).max() < 1e-4
    halves_kept = convert(folder, tmp_path / "w2", tp=2, dtype="fp32")
    with Engine.from_pretrained(halves_kept, threads=2, **ranks(2), reproducible=True) as engine:
        assert engine.generate(prompts_of(7, LENGTHS), GREEDY)[2].logprobs == halves[2].logprobs


def rounded_to_int8(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Round activations to 8 bits. scale: one scale for all; None: each row's largest magnitude."""
    step = x.abs().amax(-1, keepdim=True) / 127 if scale is None else torch.tensor(scale)
    codes = torch.where(step > 0, x / step, 0).round().clamp(-127, 127)
    return codes * step


# Measured on average: 0.001 to 0.014 from a model with equally, dynamically rounded activations (other rounding of a
# sum in fp32 may change a code), and 0.12 to 0.31 from one without rounding. With a static scale, which clips here:
# 1e-6 to 0.002, and 3.2 to 3.5.
@pytest.mark.parametrize("form", ["w8a8 dynamic", "w8a8 static"])
@pytest.mark.parametrize("name", ["llama3", "phi3", "mixtral"])
def test_int8_activations_are_rounded_as_in_the_checkpoint(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = sized(name)
    folder, model = make(variant, form, tmp_path)
    if name == "mixtral":
        model.set_experts_implementation("eager")
    outputs = answers(folder, variant)
    exact = errors(outputs, model)
    scale = float(torch.tensor(0.03, dtype=torch.bfloat16)) if form.endswith("static") else None
    linear = torch.nn.functional.linear
    dense = (VOCAB, getattr(variant.config, "num_local_experts", VOCAB))  # rows of the output layer and of the router

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x if len(weight) in dense else rounded_to_int8(x, scale), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    alike = errors(outputs, model)
    assert alike.mean() < 0.2 * exact.mean(), (float(alike.mean()), float(exact.mean()))


def tokens_of(folder: Path, variant: Variant, **settings: Any) -> list[tuple[list[int], list[float]]]:
    with Engine.from_pretrained(folder, **{"threads": 2, **variant.settings, **settings}) as engine:
        return [(one.token_ids, one.logprobs) for one in engine.generate(prompts_of(7, LENGTHS), GREEDY)]


# The widths of rows are multiples of two groups of 128, so that two ranks have whole groups.
WIDE = {"head_dim": 64, "intermediate_size": 256}


@pytest.mark.parametrize("scheme", ["fp8", "w8a8", "w8a16", "w4a16"])
def test_rounding_at_load_gives_the_bits_of_a_rounded_checkpoint_with_1_and_2_ranks(
    scheme: str, tmp_path: Path
) -> None:
    variant = sized("llama3", **WIDE)
    dense, rounded = tmp_path / "dense", tmp_path / "rounded"
    write_model(dense, variant, 3, torch.bfloat16)
    round_to_nearest(dense, rounded, scheme, group=128)
    expected = tokens_of(rounded, variant)
    assert tokens_of(dense, variant, quantization=scheme) == expected
    kept = convert(dense, tmp_path / "w1", settings={"quantization": scheme})
    assert tokens_of(kept, variant) == expected
    halves = tokens_of(rounded, variant, **ranks(2), reproducible=True)
    assert tokens_of(dense, variant, quantization=scheme, **ranks(2), reproducible=True) == halves
    halves_kept = convert(dense, tmp_path / "w2", tp=2, settings={"quantization": scheme})
    assert tokens_of(halves_kept, variant, **ranks(2), reproducible=True) == halves


@pytest.mark.parametrize(
    ("name", "scheme", "group"),
    [
        ("phi3", "w8a8", 0),
        ("gemma4", "w8a16", 0),
        ("mixtral", "w4a16", 64),
        ("qwen2-moe", "w8a16", 0),
        ("gpt-oss", "w8a16", 0),
        ("gpt-oss", "fp8", 0),
        ("deepseek-v3", "w4a16", 64),
        ("qwen3.5", "w8a16", 0),
        ("lfm2-moe", "w8a16", 0),
    ],
)
def test_rounding_at_load_gives_the_bits_of_a_rounded_checkpoint_of_each_family(
    name: str, scheme: str, group: int, tmp_path: Path
) -> None:
    variant = sized(name)
    dense, rounded = tmp_path / "dense", tmp_path / "rounded"
    write_model(dense, variant, 3, torch.bfloat16)
    round_to_nearest(dense, rounded, scheme, group)
    assert tokens_of(dense, variant, quantization=scheme) == tokens_of(rounded, variant)
