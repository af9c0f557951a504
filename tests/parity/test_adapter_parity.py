"""LoRA adapters: greedy tokens equal PEFT's in fp32, and log probabilities are within 1e-4, with 1 and 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from missing_tools import needed_module

torch = needed_module("torch")
peft = needed_module("peft")

from parity_models import VARIANTS, greedy, prompts_of, ranks, write_model  # noqa: E402

from charonia import Engine, Output, SamplingParams, UnsupportedError  # noqa: E402

NEW_TOKENS = 40
TIE = 1e-4
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
LLAMA = {"r": 8, "lora_alpha": 24, "target_modules": "all-linear"}
PATTERNS = {
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": True,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"layers.1.*v_proj": 9},
    "alpha_pattern": {"down_proj": 3},
}
CASES: dict[str, dict[str, Any]] = {
    "llama-biases": LLAMA,
    "qwen3": PATTERNS,
    "phi3": LLAMA,  # q, k and v are one module
    "gemma2": LLAMA,
    "deepseek-v2": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]},
    "lfm2": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj", "out_proj", "w1", "w2", "q_proj", "k_proj"]},
    "qwen3.5": {"r": 4, "lora_alpha": 8, "target_modules": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]},
}


def add_adapter(model: Any, config: dict[str, Any], folder: Path, seed: int) -> None:
    """Add a random adapter to the model, and save it in the folder."""
    torch.manual_seed(seed)
    made = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder)
    made.eval()


def compare(outputs: list[Output], references: list[Any]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        assert output.token_ids == reference.token_ids
        expected = reference.logprobs[torch.arange(NEW_TOKENS), torch.tensor(output.token_ids)]
        assert (torch.tensor(output.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_peft_with_1_and_2_ranks(name: str, tmp_path: Path) -> None:
    prompts = prompts_of(7, (1, 31, 65))
    for seed in range(20):
        folder, adapter = tmp_path / str(seed), tmp_path / f"adapter-{seed}"
        model = write_model(folder, VARIANTS[name], seed)
        plain = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
        add_adapter(model, CASES[name], adapter, seed)
        references = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
        if min(one.least_lead for one in references) >= TIE:
            break
    else:
        pytest.fail("every seed has a tie")
    assert [one.token_ids for one in plain] != [one.token_ids for one in references]
    for settings in ({}, ranks(2)):
        with Engine.from_pretrained(folder, threads=2, token_budget=48, **settings) as engine:
            engine.load_adapter("x", adapter)
            compare(engine.generate(prompts, GREEDY, lora="x"), references)


def test_experts_and_new_embeddings_are_rejected_by_name(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", VARIANTS["llama2-grouped"], 0)
    add_adapter(model, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, tmp_path / "saved", 0)
    model = write_model(tmp_path / "model", VARIANTS["llama2-grouped"], 0)
    add_adapter(model, {"r": 4, "target_modules": ["q_proj", "lm_head"]}, tmp_path / "head", 0)
    with Engine.from_pretrained(tmp_path / "model", threads=2) as engine:
        with pytest.raises(UnsupportedError, match="modules_to_save"):
            engine.load_adapter("saved", tmp_path / "saved")
        with pytest.raises(UnsupportedError, match=r"lm_head.* is not supported"):
            engine.load_adapter("head", tmp_path / "head")
