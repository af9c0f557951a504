"""Perplexity with a sliding window equals the computation in transformers' documentation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from charonia import Engine  # noqa: E402
from charonia.bench.random_model import SHAPES, write_random_model  # noqa: E402
from charonia.quality.evaluate import default_text  # noqa: E402
from charonia.quality.perplexity import compare, perplexity  # noqa: E402

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def documented(model: torch.nn.Module, ids: list[int], max_length: int, stride: int) -> float:
    """The loop of "Perplexity of fixed-length models", with the model's own loss."""
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, len(ids), stride):
        end_loc = min(begin_loc + max_length, len(ids))
        input_ids = torch.tensor([ids[begin_loc:end_loc]])
        labels = input_ids.clone()
        labels[:, : -(end_loc - prev_end_loc)] = -100
        with torch.inference_mode():
            loss = model(input_ids, labels=labels).loss
        counted = int((labels != -100).sum()) - 1
        nll_sum += float(loss) * counted
        n_tokens += counted
        prev_end_loc = end_loc
        if end_loc == len(ids):
            break
    return math.exp(nll_sum / n_tokens)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_perplexity_equals_transformers(name: str, tmp_path: Path) -> None:
    folder, text = DEMO / "model", (DEMO / "text.txt").read_text(encoding="utf-8")
    if name == "tiny":
        folder, text = tmp_path / name, default_text().read_text(encoding="utf-8")
        write_random_model(folder, SHAPES["tiny"], scale=0.1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with Engine.from_pretrained(folder, dtype="fp32", cache_max_entry_count=60) as engine:
        ids = engine.encode(text)[:2000]
        for length, stride in ((512, 256), (700, 700)):
            expected = documented(reference, ids, length, stride)
            assert perplexity(engine, ids, length, stride) == pytest.approx(expected, rel=1e-5)
            # Arithmetic in 16 bits rounds; the weights are equal.
            with Engine.from_pretrained(folder, dtype="bf16", cache_max_entry_count=60) as half:
                found = compare(half, engine, ids, length, stride)
            print(name, expected, found)
            assert found.reference_perplexity == pytest.approx(expected, rel=1e-5)
            assert found.perplexity == pytest.approx(expected, rel=1e-3)
