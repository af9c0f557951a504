"""An FP8 KV cache with the scales of a checkpoint, compared with transformers over a cache of the same numbers, which
PyTorch rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from parity_models import VARIANTS, own_logprobs, prompts_of, ranks, write_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import DynamicCache, PreTrainedModel  # noqa: E402

from charonia import Engine, Output, SamplingParams  # noqa: E402
from charonia.weights.convert import convert, read_source  # noqa: E402

LARGEST = 448  # number of E4M3
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
Scales = dict[str, Tensor]  # by kind (k, v) and layer: "k0"
Make = Callable[[int, str], Tensor]  # of a layer, for k or v
PROMPTS = prompts_of(7, (1, 5, 31, 64, 150))
SAMPLING = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)


def fp8_cache(model: PreTrainedModel, scales: Scales) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    plain = cache.update

    def update(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        stored = (_rounded(states, scales[f"{kind}{layer}"]) for kind, states in (("k", keys), ("v", values)))
        return plain(*stored, layer, *args, **kwargs)

    cache.update = update
    return cache


def _rounded(states: Tensor, scale: Tensor) -> Tensor:
    """states: [batch, KV heads, tokens, head size]."""
    scale = scale.float().reshape(-1, 1, 1)
    return (states / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(states.dtype) * scale


def differences(model: PreTrainedModel, scales: Scales, outputs: list[Output]) -> Tensor:
    """Return how far the engine's log probabilities are from the reference's, [tokens of all outputs]."""
    expected = []
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            whole = torch.tensor([prompt + output.token_ids])
            logits = model(whole, past_key_values=fp8_cache(model, scales)).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.double(), dim=-1)
        expected.append(rows[torch.arange(len(rows)), torch.tensor(output.token_ids)])
    return (own_logprobs(outputs) - torch.cat(expected)).abs()


def add_scales(folder: Path, name: str, make: Make, said: dict[str, Any] | None) -> Scales:
    """Add scales to the attention layers of a model. name: of the tensor, with {} for k and v."""
    file = folder / "model.safetensors"
    tensors, scales = load_file(file), {}
    layers = sorted(key.removesuffix("o_proj.weight") for key in tensors if key.endswith("self_attn.o_proj.weight"))
    for number, module in enumerate(layers):
        for kind in "kv":
            scales[f"{kind}{number}"] = tensors[module + name.format(kind, kind)] = make(number, kind)
    save_file(tensors, file, {"format": "pt"})
    if said is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return scales


def of_layer(*shape: int) -> Make:
    return lambda number, kind: torch.full(shape, 0.002 + 0.0005 * number if kind == "v" else 0.004)


def in_bf16(number: int, kind: str) -> Tensor:
    return of_layer(1)(number, kind).bfloat16()


def of_both(number: int, kind: str) -> Tensor:
    return torch.tensor(0.002 + 0.0005 * number)


def of_heads(number: int, kind: str) -> Tensor:
    return torch.tensor([0.0015, 0.004]).reshape(2, 1, 1) * (1 + number) * (1 if kind == "v" else 2)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": SCHEME}


# Gemma 4 has layers that read the keys and values of others. The scales are so small that large keys and values
# saturate, so other scales would give other results. Measured: 0.000002 to 0.0003 on average; 0.02 at most, where a key
# or value lies between two numbers; 2 to 4 on average with scale 1 in the reference.
@pytest.mark.parametrize(
    ("variant", "name", "make", "said", "kind"),
    [
        ("llama3", "{}_scale", of_layer(1), COMPRESSED, "layer"),
        ("llama3", "{}_scale", of_heads, COMPRESSED, "head"),
        ("llama3", "{}_proj.{}_scale", of_layer(), None, "layer"),
        ("gpt-oss", "{}_proj.output_scale", of_layer(1), None, "layer"),
        ("gemma4", "{}_scale", of_layer(1), None, "layer"),
        ("phi3", "qkv_proj.{}_scale", in_bf16, None, "layer"),
        ("llama3", "kv_scale", of_both, None, "layer"),
    ],
    ids=[
        *("compressed-tensors", "a scale for each head", "names of ModelOpt", "names of Quark", "shared layers"),
        *("fused projections, bf16", "one scale for both"),
    ],
)
def test_fp8_cache_with_scales_of_the_checkpoint_equals_pytorch(
    variant: str, name: str, make: Make, said: dict[str, Any] | None, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    model = write_model(folder, VARIANTS[variant], 3)
    scales = add_scales(folder, name, make, said)
    assert read_source(folder).spec.config.kv_scales == kind
    convert(folder, tmp_path / "w")
    for path, more in ((folder, {}), (tmp_path / "w", {}), (folder, ranks(2))):
        settings: dict[str, Any] = {"threads": 2, "token_budget": 96, "quant_policy": 16, **more}
        with Engine.from_pretrained(path, **settings) as engine:
            assert not any("scale 1" in warning for warning in engine.info.warnings)
            outputs = engine.generate(PROMPTS, SAMPLING)
        found = differences(model, scales, outputs)
        assert found.mean() < 1e-3 and found.max() < 0.1, (float(found.mean()), float(found.max()))
        ones = {key: torch.ones(1) for key in scales}
        assert differences(model, ones, outputs).mean() > 0.5, "the scales make no difference"
