"""The logits of an EAGLE-3 head equal a reference in fp32, which computes the whole text for every logit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from eagle3_heads import Head  # noqa: E402
from parity_models import VARIANTS, VOCAB, check_proposals_change_nothing, prompts_of, write_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from charonia import _engine  # noqa: E402
from charonia.weights.convert import convert, link_workspace  # noqa: E402
from charonia.weights.workspace import WEIGHTS  # noqa: E402

HEADS = {
    "own embedding": Head(target=96),
    "speculators": Head(target=96, speculators=True, before_residual=True, own={"model_type": "qwen3"}),
    "the model's embedding": Head(target=96, hidden=96, embeds=False, layers=[0, 1, 1], own={"head_dim": 16}),
    "before the residual": Head(target=96, before_residual=True, layers=[2, 0, 1]),
    "a norm before fc": Head(target=96, speculators=True, outer={"norm_before_fc": True, "norm_output": True}),
    "norms before fc": Head(target=96, outer={"fc_norm": True}),
    "the last output": Head(target=96, layers=[0, 2, -1]),
    "all tokens": Head(target=96, drafts=VOCAB, own={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
}


def rotated(x: Any, head: Head) -> Any:
    """Rotate x [tokens, heads, 16] by the position of each token."""
    factor = (head.own.get("rope_scaling") or {}).get("factor", 1.0)
    frequencies = head.layer["rope_theta"] ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = (torch.arange(len(x))[:, None] / factor * frequencies).repeat(1, 2)[:, None]
    turned = torch.cat([-x[..., 8:], x[..., :8]], dim=-1)
    return (x * angles.cos() + turned * angles.sin()).float()


def reference(folder: Path, head: Head, weights: dict[str, Any], tokens: list[int], drafted: list[int]) -> Any:
    """Return the logits [tokens - 1 + drafted, drafts], and the token of each column."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    model.model.norm = torch.nn.Identity()  # so that the last of hidden_states is the output of the last layer
    place = "layers.0." if head.speculators else "midlayer."
    own = {name.removeprefix(place).removesuffix(".weight"): torch.from_numpy(one) for name, one in weights.items()}

    def norm(x: Any, which: str) -> Any:
        return x / (x.pow(2).mean(-1, keepdim=True) + head.layer["rms_norm_eps"]).sqrt() * own[which]

    def heads_of(x: Any, which: str) -> Any:
        out = (x @ own[f"self_attn.{which}_proj"].T).view(len(x), -1, 16)
        return norm(out, f"self_attn.{which}_norm") if f"self_attn.{which}_norm" in own else out

    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        read = [states[layer][0, :-1] for layer in head.layers]
        if head.outer.get("fc_norm"):
            read = [norm(one, f"fc_norm.{part}") for part, one in enumerate(read)]
        joined = torch.cat(read, dim=-1)
        hidden = (norm(joined, "input_norm") if head.outer.get("norm_before_fc") else joined) @ own["fc"].T
        embedding = own.get("embed_tokens", model.get_input_embeddings().weight)
        text = tokens[1:]
        while True:
            g = norm(hidden, "hidden_norm")
            x = torch.cat([norm(embedding[torch.tensor(text)], "input_layernorm"), g], dim=-1)
            q, k = (rotated(heads_of(x, which), head) for which in "qk")
            v = heads_of(x, "v")
            groups = q.shape[1] // k.shape[1]
            k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / 4
            scores += torch.full((len(text), len(text)), float("-inf")).triu(1)
            attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(text), -1)
            out = (g if head.before_residual else hidden) + attended @ own["self_attn.o_proj"].T
            y = norm(out, "post_attention_layernorm")
            gated = torch.nn.functional.silu(y @ own["mlp.gate_proj"].T) * (y @ own["mlp.up_proj"].T)
            out = out + gated @ own["mlp.down_proj"].T
            if not drafted:
                return norm(out, "norm") @ own["lm_head"].T, torch.arange(head.drafts) + own["d2t"]
            last = norm(out[-1:], "norm") if head.outer.get("norm_output") else out[-1:]
            hidden, text, drafted = torch.cat([hidden, last]), [*text, drafted[0]], drafted[1:]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("model", ["qwen3", "gemma3", "deepseek-v3"])
def test_logits_equal_the_reference(name: str, model: str, tmp_path: Path) -> None:
    count = write_model(tmp_path / "model", VARIANTS[model], 3).config.num_hidden_layers
    head = replace(HEADS[name], layers=[one % (count + 1) for one in HEADS[name].layers])  # -1: after the last layer
    weights = head.write(tmp_path / "head", binary=name == "all tokens")
    made = link_workspace(tmp_path / "model", tmp_path / "workspace")
    copies = [
        convert(tmp_path / "head", tmp_path / "copied"),
        link_workspace(tmp_path / "head", tmp_path / "linked", head=True),
    ]
    for tokens, drafted in ((prompts_of(3, [70])[0], [9, 4, 200]), ([5, 6], []), ([5, 6, 7], [8])):
        expected, ids = reference(tmp_path / "model", head, weights, tokens, drafted)
        for copy in copies:
            settings = {"speculative_method": "eagle3", "speculative_model": str(copy)}
            found = torch.tensor(_engine.draft_logits(made / WEIGHTS, tokens, drafted, settings))
            assert found.shape == (len(tokens) - 1 + len(drafted), VOCAB)
            difference = (found[:, ids].log_softmax(-1) - expected.log_softmax(-1)).abs().max()
            # The inputs of layers are not normalised, so their rounding errors are larger than in MTP's hidden states.
            # Measured: 0.00034 at most, with portable kernels. Ten times the norms' epsilon makes 0.0014 at least.
            assert difference < 1e-3, float(difference)
            others = torch.ones(VOCAB, dtype=torch.bool)
            others[ids] = False
            assert (found[:, others] < -1e29).all()


@pytest.mark.usefixtures("all_proposals")
@pytest.mark.parametrize("name", ["own embedding", "speculators"])
def test_tokens_are_the_same_with_proposals_of_the_head(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", VARIANTS["qwen3"], 3)
    HEADS[name].write(tmp_path / "head")
    check_proposals_change_nothing(
        tmp_path / "model", speculative_method="eagle3", speculative_model=str(tmp_path / "head")
    )
