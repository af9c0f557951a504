"""Small random models of every family, made with transformers, and what transformers says they generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
)

from charonia.benchmark.random_model import write_byte_tokenizer

# The models are tiny: more threads would only wait for each other.
torch.set_num_threads(1)

VOCAB = 320
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Variant:
    """A config of transformers, and what to change in the config.json that it writes."""

    config: Any
    rewrite: dict[str, Any]


def _variant(config_class: type[Any] = LlamaConfig, rewrite: dict[str, Any] | None = None, **changes: Any) -> Variant:
    return Variant(config_class(**{**_BASE, **changes}), rewrite or {})


VARIANTS = {
    "llama1": _variant(num_key_value_heads=6, rms_norm_eps=1e-6),
    "llama2-grouped": _variant(),
    "llama3": _variant(rope_parameters=_LLAMA3_ROPE),
    "llama-tied": _variant(tie_word_embeddings=True),
    "llama-biases": _variant(attention_bias=True, mlp_bias=True),
    "llama-head-dim": _variant(head_dim=32),
    "mistral": _variant(MistralConfig, sliding_window=None, head_dim=16),
    "qwen2": _variant(Qwen2Config, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "yi": _variant(rewrite={"model_type": "Yi"}, rope_parameters={"rope_type": "default", "rope_theta": 5000000.0}),
    # transformers has no class for InternLM 1: it is Llama with biases on q, k, v and o.
    "internlm": _variant(
        rewrite={"model_type": "internlm", "bias": True, "attention_bias": None},
        num_key_value_heads=6,
        attention_bias=True,
    ),
}


def write_model(
    folder: Path, variant: Variant, seed: int, dtype: torch.dtype = torch.float32, *, scale: float = 0.2
) -> PreTrainedModel:
    """Writes the model and returns it, its weights rounded to `dtype` and held in fp32.

    Weights are large enough that logits spread over several units and the likeliest token is clear. scale: their
    standard deviation, which a wider model needs less of.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(variant.config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith(".bias"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(scale * noise)
    # Not model.to(dtype): that would round the rotary frequencies too, which no checkpoint holds.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **variant.rewrite}
    file.write_text(json.dumps(config))
    write_byte_tokenizer(folder, VOCAB)
    return model.to(torch.float32)


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, the log probabilities of the whole vocabulary at each, and the least lead of a likeliest token."""

    token_ids: list[int]
    logprobs: torch.Tensor  # [tokens, vocab], float64
    least_lead: float


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> Reference:
    """transformers' own generate, one prompt at a time and without an end token."""
    with torch.no_grad():
        out: Any = model.generate(
            torch.tensor([prompt], device=model.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logprobs = torch.log_softmax(torch.cat(out.logits).double(), dim=-1)
    top = logprobs.topk(2).values
    return Reference(out.sequences[0, len(prompt) :].tolist(), logprobs, float((top[:, 0] - top[:, 1]).min()))


def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[answer, vocab]: what the model says at each token of an answer that is given to it."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer], device=model.device)).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), dim=-1)
