"""Embeddings and scores equal transformers' with pooling in numpy: in fp32 within 1e-5, in bf16 within bounds.

The reference is the last hidden state of transformers, or its logits for a classifier.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from missing_tools import needed_module

torch = needed_module("torch")

from parity_models import VARIANTS, prompts_of, ranks, write_model  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer  # noqa: E402

from charonia import Engine  # noqa: E402
from charonia.bench.random_model import write_byte_tokenizer  # noqa: E402
from charonia.errors import UnsupportedError  # noqa: E402
from charonia.quantize.command import check_source  # noqa: E402

LENGTHS = (1, 5, 31, 64, 65, 150)
TEXTS = ["Instruct: find it\nQuery: a", "a", "海螺 blows", "one text that is a bit longer than the others"]
SETTINGS: dict[str, Any] = {"threads": 2, "token_budget": 96, "cache_block_seq_len": 16}


def write_json(file: Path, value: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))


def write_bare(folder: Path, name: str, dtype: Any = torch.float32) -> Any:
    """Write a model as embedding models are published: without an output layer, with names without `model.`, with the
    files of sentence-transformers, and with an end token after every text. Return transformers' model."""
    bare = write_model(folder / "whole", VARIANTS[name], 3, dtype).model
    bare.config.architectures = [type(bare).__name__]
    bare.to(dtype).save_pretrained(folder)
    write_byte_tokenizer(folder, bare.config.vocab_size)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    write_json(folder / "modules.json", listed)
    pooling = {
        "word_embedding_dimension": bare.config.hidden_size,
        "pooling_mode_mean_tokens": False,
        "pooling_mode_lasttoken": True,
    }
    write_json(folder / "1_Pooling/config.json", pooling)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Q: "}, "default_prompt_name": None})
    return bare.float()


def expected(
    model: Any, prompts: list[list[int]], dimensions: int | None = None, *, mean: bool = False
) -> np.ndarray[Any, Any]:
    rows = []
    for prompt in prompts:
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        row = (states.mean(axis=0) if mean else states[-1])[:dimensions]
        rows.append(row / np.linalg.norm(row))
    return np.array(rows)


def cosines(a: Any, b: Any) -> Any:
    return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_embeddings_equal_last_hidden_states_with_1_and_2_ranks(name: str, tmp_path: Path) -> None:
    model = write_bare(tmp_path, name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [*prompts_of(7, LENGTHS), *(tokenizer(text)["input_ids"] for text in TEXTS)]
    assert prompts[-1][-1] == 2
    inputs = [*prompts[: len(LENGTHS)], *TEXTS]
    for settings in ({}, ranks(2)):
        with Engine.from_pretrained(tmp_path, **SETTINGS, **settings) as engine:
            found = engine.embed(inputs)
            assert np.abs(found - expected(model, prompts)).max() < 1e-5
            assert cosines(found, expected(model, prompts)).min() > 0.99999
            short = engine.embed(inputs, dimensions=8)
            assert short.shape == (len(inputs), 8)
            assert np.abs(short - expected(model, prompts, 8)).max() < 1e-5
            # One input at a time, with hits of the prefix cache, which the calls before filled.
            hits = engine.stats().prefix_hit_tokens
            assert hits > 0
            assert (np.concatenate([engine.embed(one) for one in inputs]) == found).all()
            engine.check_integrity()  # after the last step, whose hits are counted then
            assert engine.stats().prefix_hit_tokens > hits and engine.stats().generation_tokens == 0


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_means_of_all_tokens_equal_those_of_last_hidden_states(name: str, tmp_path: Path) -> None:
    model = write_bare(tmp_path, name)
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": "mean"})
    prompts = prompts_of(7, LENGTHS)
    for settings in ({}, ranks(2)):
        with Engine.from_pretrained(tmp_path, **SETTINGS, **settings) as engine:
            found = engine.embed(prompts)
            assert np.abs(found - expected(model, prompts, mean=True)).max() < 1e-5
            assert np.abs(found - expected(model, prompts)).max() > 0.01
            short = engine.embed(prompts, dimensions=8)
            assert np.abs(short - expected(model, prompts, 8, mean=True)).max() < 1e-5
            # Batches, chunks and other prompts in the cache change no bit.
            assert (np.concatenate([engine.embed([one]) for one in prompts]) == found).all()
            assert engine.stats().generation_tokens == 0


def test_bf16_embeddings_are_near(tmp_path: Path) -> None:
    model = write_bare(tmp_path, "qwen3", torch.bfloat16)
    prompts = prompts_of(7, LENGTHS)
    with Engine.from_pretrained(tmp_path, **SETTINGS) as engine:
        assert engine.info.data_type == "bf16"
        found = engine.embed(prompts)
    assert cosines(found, expected(model, prompts)).min() > 0.999
    assert np.abs(found - expected(model, prompts)).max() < 0.02
    with pytest.raises(UnsupportedError, match="task = embed, and only models for text can be quantised"):
        check_source(tmp_path)


def test_whole_model_gives_same_embeddings_with_setting(tmp_path: Path) -> None:
    bare = write_bare(tmp_path, "qwen3")
    prompts = prompts_of(7, LENGTHS)
    with Engine.from_pretrained(tmp_path / "whole", task="embed", **SETTINGS) as engine:
        assert np.abs(engine.embed(prompts) - expected(bare, prompts)).max() < 1e-5


@pytest.mark.parametrize("tokens", [(9, 12), (None, 12)])
def test_scores_from_tokens_equal_transformers_logits(tokens: tuple[int | None, int], tmp_path: Path) -> None:
    model = write_model(tmp_path, VARIANTS["qwen3"], 3)
    settings = {"true_token_id": tokens[1], "false_token_id": tokens[0]}
    kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    write_json(tmp_path / "modules.json", listed)
    write_json(tmp_path / "1_LogitScore/config.json", settings)
    pairs = [("What is it?", "A shell."), ("What is it?", "海螺 and more of it"), ("x", "y")]
    instruction = "Say what it is"
    for settings in ({}, ranks(2)):
        with Engine.from_pretrained(tmp_path, **SETTINGS, **settings) as engine:
            for query, document in pairs:
                prompt = (
                    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
                    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
                    f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
                    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
                )
                with torch.no_grad():
                    logits = model(torch.tensor([engine.encode(prompt)])).logits[0, -1].double()
                low = 0.0 if tokens[0] is None else float(logits[tokens[0]])
                reference = 1 / (1 + np.exp(low - float(logits[tokens[1]])))
                [score] = engine.score(query, [document], instruction=instruction)
                assert score == pytest.approx(reference, abs=1e-5)
            assert engine.score("a", ["b", "c"]) == [engine.score("a", [one])[0] for one in "bc"]


@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_scores_of_classification_head_equal_transformers(activation: str, tmp_path: Path) -> None:
    config = VARIANTS["qwen3"].config
    whole = write_model(tmp_path / "whole", VARIANTS["qwen3"], 3)
    config = type(config)(**{**config.to_dict(), "num_labels": 1, "pad_token_id": 0})
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.model.load_state_dict(whole.model.state_dict())
    model.config.sentence_transformers = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
    model.save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path, config.vocab_size)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    documents = ["A shell.", "海螺 and more of it", "y"]
    with torch.no_grad():
        logits = [float(model(**tokenizer("What?", one, return_tensors="pt")).logits) for one in documents]
    reference = [1 / (1 + np.exp(-one)) if activation == "Sigmoid" else one for one in logits]
    for settings in ({}, ranks(2)):
        with Engine.from_pretrained(tmp_path, **SETTINGS, **settings) as engine:
            assert engine.score("What?", documents) == pytest.approx(reference, abs=1e-5)
