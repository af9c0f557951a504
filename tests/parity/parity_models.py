"""Small random models of every family, and their output in transformers, or in numpy for families it does not have."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy_models import NumpyFamily, NumpyModel, baichuan, internlm2, qwen
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)

from charonia import Engine, Output, SamplingParams
from charonia.bench.random_model import write_byte_tokenizer

# The models are tiny, so more threads would only wait for each other.
torch.set_num_threads(1)

VOCAB = 320


@dataclass(frozen=True)
class Variant:
    """A config of transformers, or a family of numpy_models, with changes to its config.json."""

    config: Any
    rewrite: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # keys of config.json that the family's original files do not have
    settings: dict[str, Any] = field(default_factory=dict)  # of the engine
    stepwise: bool = False  # the reference must generate token by token, because its output depends on this


def _variant(config: dict[str, Any], dropped: Sequence[str] = (), why: str = "", **other: Any) -> Variant:
    """Return an entry of variants.json. The keys of its config, or of its text part, are added to the ordinary keys."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    if "text_config" in keys:
        keys["text_config"] = _BASE | keys["text_config"]
    else:
        keys = _BASE | keys
    return Variant(CONFIG_MAPPING[config["model_type"]](**keys), dropped=tuple(dropped), **other)


def _variants() -> dict[str, Variant]:
    listed = _DATA["variants"]
    # Transformers 5.17, which machines with a GPU may have, does not have InternLM 3.
    missing = [name for name, one in listed.items() if one["config"]["model_type"] not in CONFIG_MAPPING]
    if missing and os.environ.get("CI") == "true":
        raise ImportError(f"transformers {transformers.__version__} lacks {missing}, which must not go untested unseen")
    return {name: _variant(**one) for name, one in listed.items() if name not in missing}


def changed_variant(name: str, **changes: Any) -> Variant:
    """Return an entry of variants.json with other values of its config."""
    entry = _DATA["variants"][name]
    return _variant(**{**entry, "config": {**entry["config"], **changes}})


_DATA = json.loads(Path(__file__).with_name("variants.json").read_text())
_BASE: dict[str, Any] = _DATA["base"]
_BEYOND = {"session_len": 512}  # beyond the trained length
VARIANTS = {
    **_variants(),
    "qwen1": Variant(qwen(trained=40)),
    "internlm2": Variant(internlm2(bias=False)),
    "internlm2-bias": Variant(internlm2(bias=True)),
    "internlm2-dynamic": Variant(internlm2(bias=False, trained=100, dynamic=True), settings=_BEYOND),
    "internlm2-log-n-by-setting": Variant(
        internlm2(bias=False, trained=40, with_log_n=True), settings={**_BEYOND, "use_logn_attn": 1}
    ),
    "baichuan-7b": Variant(baichuan(7, 1)),
    "baichuan-13b": Variant(baichuan(13, 1)),
    "baichuan2-7b": Variant(baichuan(7, 2)),
    "baichuan2-13b": Variant(baichuan(13, 2, heads=8)),
}


def _model(config: Any, **options: Any) -> PreTrainedModel:
    """Return a random model of a config; with images, the complete model."""
    text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "vision_config")
    causal = AutoModelForCausalLM if text else AutoModelForImageTextToText
    model: PreTrainedModel = causal.from_config(config, attn_implementation="eager", **options)
    return model.eval()


def sized(name: str, **other: int) -> Variant:
    """Return a variant whose sizes are multiples of two groups, for two ranks."""
    config = VARIANTS[name].config
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    sizes |= other
    widths = {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
        "hidden_size_per_layer_input": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    sizes |= {key: width for key, width in widths.items() if config.to_dict().get(key)}
    if "kv_lora_rank" in config.to_dict():
        # With 16, the last group of rows of kv_a_proj_with_mqa is short.
        rotated = 16 if name == "deepseek-v3" else 32
        sizes |= {"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": rotated}
        sizes |= {"head_dim": rotated, "v_head_dim": 32, "q_lora_rank": 64 if config.q_lora_rank else None}
    return replace(VARIANTS[name], config=type(config)(**{**config.to_dict(), **sizes}))


def write_model(
    folder: Path, variant: Variant, seed: int, dtype: torch.dtype = torch.float32, *, scale: float = 0.2
) -> PreTrainedModel:
    """Write a model of transformers and return it, with its weights rounded to `dtype` and stored in fp32.

    Weights are large enough that logits spread over several units and the most likely token is clear. scale: their
    standard deviation; a wider model needs a smaller one.
    """
    generator = torch.Generator().manual_seed(seed)
    model = _model(variant.config)
    gemma = "gemma" in variant.config.model_type
    adds_one = gemma and "gemma4" not in variant.config.model_type
    delta = variant.config.model_type.startswith(("qwen3_5", "qwen3_next"))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if re.search(r"norm\d*\.weight$", name):
                # Gemma's norms add 1. Without this, its scaled and tied embedding would outweigh the layers, and the
                # model would repeat every token.
                center = 8 if gemma and ".post_" in name else 0 if adds_one else 1
                # Qwen3.5's norms add 1 too, except the norm of a gated delta net.
                center = center if ".linear_attn." in name or not delta else 0
                weight.copy_(center + 0.2 * noise)
            elif name.endswith("A_log"):
                weight.copy_(noise - 3)  # states that last for many tokens
            elif name.endswith("scale"):  # of Gemma 4's router
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith(("bias", "sinks")):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(scale * noise)
        for name, bias in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
            elif name.endswith("layer_scalar"):  # transformers computes with this number in `dtype`
                bias.copy_((1 + 0.3 * torch.randn(bias.shape, generator=generator)).to(dtype))
    # Not model.to(dtype), which would also round the rotary frequencies, which no checkpoint contains.
    for name, parameter in model.named_parameters():
        if not _stays_fp32(model, name):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **variant.rewrite}
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in variant.dropped}))
    write_byte_tokenizer(folder, VOCAB)
    # Gemma's embedding factor is rounded like the weights.
    scaling = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scaling is not None:
        scaling.copy_(scaling.to(dtype))
    return model.to(torch.float32)


def _stays_fp32(model: PreTrainedModel, name: str) -> bool:
    """Whether the family keeps a weight in fp32, such as the router's."""
    return any(kept in name for kept in model._keep_in_fp32_modules_strict or ())


def load_model(folder: Path, variant: Variant, dtype: torch.dtype) -> PreTrainedModel:
    """Load a written model like users of transformers: computed in `dtype`, except for values that transformers keeps
    in fp32, such as the rotary frequencies."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=variant.config, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    assert model.dtype == dtype
    return model.eval()


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Reference:
    """Greedy tokens, the log probabilities of the whole vocabulary at each, and the smallest lead of a top token."""

    token_ids: list[int]
    logprobs: torch.Tensor  # [tokens, vocab], float64
    least_lead: float


def _reference(token_ids: list[int], logprobs: torch.Tensor) -> Reference:
    top = logprobs.topk(2).values
    return Reference(token_ids, logprobs, float((top[:, 0] - top[:, 1]).min()))


def greedy(model: PreTrainedModel, prompt: list[int], tokens: int) -> Reference:
    """Generate with transformers, one prompt at a time and without an end token."""
    _forget_lengths(model)
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
    return _reference(out.sequences[0, len(prompt) :].tolist(), logprobs)


def logprobs_of(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[answer, vocab]: the model's log probabilities at each token of the given answer."""
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad():
        for piece in _pieces(model, prompt, answer):
            logits.append(model(torch.tensor([piece], device=model.device), past_key_values=cache).logits[0])
    return torch.log_softmax(torch.cat(logits)[len(prompt) - 1 : -1].double(), dim=-1)


def chosen_logprobs(model: PreTrainedModel, prompts: list[list[int]], outputs: list[Output]) -> torch.Tensor:
    """Return the model's log probability of each token that the engine chose, [tokens of all outputs]."""
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = logprobs_of(model, prompt, output.token_ids).cpu()
        found.append(expected[torch.arange(len(expected)), torch.tensor(output.token_ids)])
    return torch.cat(found)


def own_logprobs(outputs: list[Output]) -> torch.Tensor:
    """Return the engine's log probabilities of the same tokens."""
    return torch.tensor([value for output in outputs for value in output.logprobs], dtype=torch.float64)


def check_proposals_change_nothing(model: Path, **speculation: str) -> None:
    """Assert that tokens and log probabilities are the same without and with proposals, greedy and sampled. The test
    needs the fixture all_proposals."""
    prompts = prompts_of(7, (1, 5, 31, 64, 150))
    for temperature in (0.0, 1.0):
        sampling = [
            SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True, logprobs=2)
            for seed in range(len(prompts))
        ]
        outputs = []
        for settings in ({"speculative_method": "off"}, speculation):
            with Engine.from_pretrained(
                model, threads=2, token_budget=48, cache_block_seq_len=16, **settings
            ) as engine:
                found = engine.generate(prompts, sampling)
                assert (engine.stats().proposed_tokens > 0) == (settings is speculation)
            outputs.append([(one.token_ids, one.logprobs, one.top_logprobs) for one in found])
        assert outputs[0] == outputs[1]


def _pieces(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[list[int]]:
    """Split the sequence if longrope changes to its long factors within the answer; otherwise return it whole.

    A step beyond the original length uses the long factors for rotation, all others use the short ones. (When it
    generates, transformers computes a sequence again there, which needs a prefill of twice the length for one token.)
    """
    whole = prompt + answer
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", "") != "longrope":
        return [whole]
    turn: int = model.config.rope_parameters["original_max_position_embeddings"]
    return [whole[:turn], whole[turn:]] if len(prompt) <= turn < len(whole) else [whole]


def _forget_lengths(model: PreTrainedModel) -> None:
    """Reset dynamic scaling, which remembers the longest sequence, before each prompt."""
    rotary = getattr(model.model, "rotary_emb", None)
    if rotary is not None and getattr(rotary, "rope_type", "") == "dynamic":
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.inv_freq = rotary.original_inv_freq.clone()


class ReferenceModel:
    """A model of a variant in a folder, and its expected output."""

    def __init__(self, variant: Variant, folder: Path, seed: int) -> None:
        self._stepwise = variant.stepwise
        self._numpy: NumpyModel | None = None
        self._torch: PreTrainedModel | None = None
        if isinstance(variant.config, NumpyFamily):
            self._numpy = NumpyModel(variant.config, folder, seed)
            write_byte_tokenizer(folder, VOCAB)
        else:
            self._torch = write_model(folder, variant, seed)

    def expected(self, prompt: list[int], answer: list[int]) -> Reference:
        """Return the greedy answer with the length of `answer`.

        Unless it must be generated, it is computed by giving `answer` to the model. If each of its tokens is the most
        likely one, it is the greedy answer. Otherwise the first other token is the difference.
        """
        if self._numpy is not None:
            logprobs = torch.from_numpy(self._numpy.logprobs(prompt, answer))
        elif self._stepwise:
            assert self._torch is not None
            return greedy(self._torch, prompt, len(answer))
        else:
            assert self._torch is not None
            logprobs = logprobs_of(self._torch, prompt, answer)
        return _reference(logprobs.argmax(-1).tolist(), logprobs)


def ranks(count: int) -> dict[str, int | str]:
    """Return settings for this number of ranks: each on its own GPU if there are enough, otherwise all on the first."""
    settings: dict[str, int | str] = {"tensor_para_size": count}
    if os.environ.get("CHARONIA_DEVICE") == "cuda" and torch.cuda.device_count() < count:
        settings["device_ids"] = ",".join(["0"] * count)
    return settings
