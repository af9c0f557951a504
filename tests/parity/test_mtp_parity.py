"""The layer for multi-token prediction (MTP) has the same logits as a reference in fp32.

transformers has no such layer. The reference follows the formula of DeepSeek-V3's report. It takes a decoder layer of
transformers, and computes the whole text for every logit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from parity_models import VARIANTS, VOCAB, Variant, check_proposals_change_nothing, prompts_of, sized, write_model  # noqa: E402
from quantised_models import quantise  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from charonia import _engine  # noqa: E402
from charonia.families.names import MtpNames  # noqa: E402
from charonia.families.qwen3_5 import MTP_NAMES  # noqa: E402
from charonia.weights.convert import convert, link_workspace  # noqa: E402
from charonia.weights.workspace import WEIGHTS  # noqa: E402

NAMES = (
    "glm4-moe", "glm4-moe-groups", "deepseek-v3", "deepseek-v3-other", "glm4-moe-lite", "qwen3.5", "qwen3.5-moe",
    "qwen3-next",
)  # fmt: skip


def names_of(variant: Variant) -> MtpNames:
    config = variant.config
    names = MTP_NAMES if config.model_type.startswith("qwen3") else MtpNames()
    return MtpNames(*(name.format(config.num_hidden_layers) for name in astuple(names)))


def added_to_norms(variant: Variant) -> int:
    return int(variant.config.model_type.startswith("qwen3"))


def write_mtp_model(folder: Path, variant: Variant) -> None:
    """Write a model with a random MTP layer. Its tensors have the names of the released files."""
    model = write_model(folder, variant, 3)
    layers, file = model.config.num_hidden_layers, folder / "model.safetensors"
    tensors, random = load_file(file), np.random.default_rng(5)
    hidden = model.config.hidden_size

    def noise(scale: float, *shape: int) -> Any:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    last, names, one_added = f"model.layers.{layers - 1}.", names_of(variant), added_to_norms(variant)
    for one, values in list(tensors.items()):
        if one.startswith(last):
            center = 1 - one_added if "norm" in one else 0
            tensors[names.layer + one.removeprefix(last)] = center + noise(0.2, *values.shape)
    for norm in (names.embedding_norm, names.hidden_norm, names.norm):
        tensors[f"{norm}.weight"] = 1 - one_added + noise(0.2, hidden)
    tensors[f"{names.join}.weight"] = noise(0.2, hidden, 2 * hidden)
    if not one_added:  # these models have copies that are not read
        tensors[f"{names.layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors[f"{names.layer}shared_head.head.weight"] = tensors["lm_head.weight"].copy()
    save_file(tensors, file, {"format": "pt"})


def reference(folder: Path, variant: Variant, tokens: list[int], drafted: list[int]) -> Any:
    """Return the logits [tokens - 1 + drafted, vocab]."""
    config = variant.config
    layers = config.num_hidden_layers
    changes: dict[str, Any] = {"num_hidden_layers": layers + 1}
    if one_added := added_to_norms(variant):
        changes["layer_types"] = [*config.layer_types, "full_attention"]
    else:
        changes["mlp_layer_types"] = ["dense"] + ["sparse"] * layers
    longer, names = type(config)(**{**config.to_dict(), **changes}), names_of(variant)
    file = load_file(folder / "model.safetensors")
    with TemporaryDirectory() as renamed:  # transformers finds the layer after the last one
        shutil.copytree(folder, renamed, dirs_exist_ok=True)
        last = f"model.layers.{layers}."
        save_file(
            {one.replace(names.layer, last): x for one, x in file.items()},
            Path(renamed, "model.safetensors"),
            {"format": "pt"},
        )
        model: Any = AutoModelForCausalLM.from_pretrained(
            renamed, config=longer, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
    own = {one: torch.from_numpy(values) for one, values in file.items()}
    parts = model.model
    layer = parts.layers[layers]
    parts.layers = parts.layers[:layers]

    def norm(x: Any, which: str) -> Any:
        scale = (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * (one_added + own[f"{which}.weight"])

    with torch.no_grad():
        hidden = parts(torch.tensor([tokens])).last_hidden_state[0, :-1]
        text = tokens[1:]
        while True:
            embedded = parts.embed_tokens(torch.tensor(text))
            joined = torch.cat([norm(embedded, names.embedding_norm), norm(hidden, names.hidden_norm)], dim=-1)
            x = (joined @ own[f"{names.join}.weight"].T)[None]
            positions = torch.arange(len(text))[None]
            mask = torch.full((len(text), len(text)), float("-inf")).triu(1)[None, None]
            rotation = parts.rotary_emb(x, positions)
            out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
            after = norm((out[0] if isinstance(out, tuple) else out)[0], names.norm)
            if not drafted:
                return after @ own["lm_head.weight"].T
            hidden, text, drafted = torch.cat([hidden, after[-1:]]), [*text, drafted[0]], drafted[1:]


@pytest.mark.parametrize("make", [convert, link_workspace])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(name: str, make: Callable[..., Path], tmp_path: Path) -> None:
    write_mtp_model(tmp_path / "model", VARIANTS[name])
    made = make(tmp_path / "model", tmp_path / "workspace", settings={"speculative_method": "mtp"})
    for tokens, drafted in ((prompts_of(3, [70])[0], [9, 4, 200]), ([5, 6], []), ([5, 6, 7], [8])):
        check_logits(made, tmp_path / "model", VARIANTS[name], tokens, drafted)


def check_logits(made: Path, folder: Path, variant: Variant, tokens: list[int], drafted: list[int]) -> None:
    found = torch.tensor(_engine.draft_logits(made / WEIGHTS, tokens, drafted, {"speculative_method": "mtp"}))
    expected = reference(folder, variant, tokens, drafted)
    assert found.shape == expected.shape == (len(tokens) - 1 + len(drafted), VOCAB)
    difference = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
    # Measured: 0.0001 at most, with kernels of AVX-512, of AVX2 and portable ones. Ten times the norms' epsilon makes
    # 0.0036 at least.
    assert difference < 5e-4, float(difference)


@pytest.mark.parametrize(("name", "form"), [("glm4-moe", "awq"), ("deepseek-v3", "fp8 of DeepSeek")])
def test_logits_of_a_quantised_layer_equal_the_reference(name: str, form: str, tmp_path: Path) -> None:
    variant, dense = sized(name), tmp_path / "dense"
    write_mtp_model(dense, variant)
    meant = quantise(dense, tmp_path / "quantised", form)
    made = convert(tmp_path / "quantised", tmp_path / "workspace", dtype="fp32", settings={"speculative_method": "mtp"})
    save_file({key: value.numpy() for key, value in meant.items()}, dense / "model.safetensors", {"format": "pt"})
    check_logits(made, dense, variant, prompts_of(3, [40])[0], [9, 4])


@pytest.mark.usefixtures("all_proposals")
@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3", "qwen3.5"])
def test_tokens_are_the_same_with_proposals_of_the_layer(name: str, tmp_path: Path) -> None:
    write_mtp_model(tmp_path, VARIANTS[name])
    check_proposals_change_nothing(tmp_path, speculative_method="mtp")
