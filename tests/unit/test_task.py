"""Which task a model's files name, and embeddings and scores that are rejected by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from charonia.bench.random_model import write_byte_tokenizer
from charonia.errors import InvalidRequestError, ModelError, UnsupportedError
from charonia.families import ModelSpec
from charonia.text.prompt_ids import encode_pair, encode_text, load_tokenizer
from charonia.text.tokenizer import copy_tokenizer, prepare_tokenizer
from charonia.weights.convert import read_config
from charonia.weights.task import setting_of

pytestmark = pytest.mark.fast

# As Qwen3-Embedding-0.6B and Qwen3-Reranker-0.6B, without keys that have no effect.
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 320,
}
POOLING = {
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def read(
    folder: Path,
    *modules: tuple[str, dict[str, Any]],
    config: dict[str, Any] | None = None,
    sentences: dict[str, Any] | None = None,
    transformer: dict[str, Any] | None = None,
    architecture: str = "Qwen3ForCausalLM",
    task: str = "auto",
) -> ModelSpec:
    """modules: each with the settings in its folder. sentences, transformer: files of sentence-transformers."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture], **(config or {})}))
    files = {"config_sentence_transformers.json": sentences, "sentence_bert_config.json": transformer}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content or {}))
    listed = [{"path": "", "type": "sentence_transformers.models.Transformer"}] if modules else []
    for number, (kind, settings) in enumerate(modules, 1):
        name = kind if "." in kind else f"sentence_transformers.models.{kind}"
        listed.append({"path": f"{number}_{kind}", "type": name})
        (folder / f"{number}_{kind}").mkdir(exist_ok=True)
        (folder / f"{number}_{kind}" / "config.json").write_text(json.dumps(settings))
    if modules:
        (folder / "modules.json").write_text(json.dumps(listed))
    return read_config(folder, task=task)


def test_task_follows_modules_then_architecture(tmp_path: Path) -> None:
    def found(name: str, *modules: tuple[str, dict[str, Any]], **other: Any) -> tuple[Any, ...]:
        (folder := tmp_path / name).mkdir()
        config = read(folder, *modules, **other).config
        assert config.pooling == "last"
        return config.model_task, config.normalize_embedding, config.score_labels, config.score_sigmoid

    assert found("text") == ("generate", True, 0, True)
    assert found("bare", architecture="Qwen3Model") == ("embed", True, 0, True)
    assert found("pooled", ("Pooling", POOLING)) == ("embed", False, 0, True)
    assert found("normal", ("Pooling", {"pooling_mode": "lasttoken"}), ("Normalize", {})) == ("embed", True, 0, True)
    assert found("one", ("LogitScore", {"true_token_id": 5})) == ("score", True, 1, True)
    assert found("two", ("LogitScore", {"true_token_id": 5, "false_token_id": 6})) == ("score", True, 2, True)
    head = {
        "id2label": {"0": "LABEL_0"},
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    }
    assert found("head", config=head, architecture="Qwen3ForSequenceClassification") == ("score", True, 1, False)
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    logit = ("LogitScore", {"true_token_id": 5, "module_input_name": "causal_logits"})
    assert found("logit", logit, sentences=identity) == ("score", True, 1, False)
    own = {"config": {"auto_map": {"AutoModel": "model.Own"}}, "architecture": "OwnModel"}
    assert found("own code", task="embed", **own) == ("embed", True, 0, True)
    assert found("other", ("Dense", {}), task="generate") == ("generate", True, 0, True)
    assert found("asked", task="embed") == ("embed", True, 0, True)
    assert found("not", ("Pooling", POOLING), task="generate") == ("generate", True, 0, True)


MEAN = {**POOLING, "pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize("pooling", [MEAN, {"pooling_mode": "mean"}, {"pooling_mode": ["mean"]}])
def test_mean_pooling_has_three_spellings(pooling: dict[str, Any], tmp_path: Path) -> None:
    config = read(tmp_path, ("Pooling", pooling)).config
    assert (config.model_task, config.pooling) == ("embed", "mean")


@pytest.mark.parametrize(
    ("modules", "other", "says"),
    [
        ([("Pooling", {**MEAN, "pooling_mode_lasttoken": True})], {}, "lasttoken, mean_tokens is not supported"),
        ([("Pooling", {**MEAN, "include_prompt": False})], {}, "include_prompt = false leaves the tokens of prompts"),
        ([("Pooling", {"pooling_mode": "weightedmean"})], {}, "pooling weightedmean is not supported; supported: one"),
        ([("Pooling", {**POOLING, "pooling_mode_cls_token": True})], {}, "cls_token, lasttoken is not supported"),
        ([("Pooling", {**POOLING, "weights": 3})], {}, r"key weights \(3\) is not supported"),
        ([("Pooling", {**POOLING, "word_embedding_dimension": 1000})], {}, "hidden_size 1024"),
        ([("Pooling", POOLING), ("Dense", {})], {}, "module sentence_transformers.models.Dense is not s"),
        ([("other.models.Pooling", POOLING)], {}, "module other.models.Pooling is not supported"),
        ([("Pooling", POOLING), ("Pooling", POOLING)], {}, "Transformer, Pooling, Pooling are not supported together"),
        ([("Normalize", {}), ("Pooling", POOLING)], {}, "not supported together; supported: Transformer or T"),
        ([], {"architecture": "Qwen3BidirectionalModel"}, "architecture Qwen3BidirectionalModel with model_type qwen3"),
        ([], {"architecture": "LlamaForSequenceClassification"}, "set task = score if both compute the same"),
        ([("Pooling", POOLING)], {"config": {"auto_map": {"AutoModel": "model.Qwen3Model"}}}, "auto_map names"),
        ([("LogitScore", {"true_token_id": 5, "bias": 2})], {}, r"key bias \(2\) is not supported"),
        ([("LogitScore", {"true_token_id": 5, "module_input_name": "x"})], {}, "module_input_name 'x' is not s"),
        ([("Pooling", POOLING)], {"transformer": {"processing_kwargs": {"a": 1}}}, "key processing_kwargs"),
        ([("Pooling", POOLING)], {"transformer": {"do_lower_case": True}}, "key do_lower_case"),
        (
            [("Pooling", POOLING)],
            {"transformer": {"modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}}},
            "modality_config.text = ",
        ),
        ([("LogitScore", {"true_token_id": 320})], {}, "must be token ids below 320"),
        (
            [("Pooling", POOLING)],
            {"sentences": {"prompts": {"query": "Find: "}, "default_prompt_name": "query"}},
            "default_prompt_name 'query' puts 'Find: ' before every text",
        ),
        ([("Pooling", POOLING)], {"sentences": {"truncate_dim": 5}}, r"key truncate_dim \(5\) is not supported"),
        ([], {"architecture": "Qwen3ForSequenceClassification"}, "classifier with 2 labels"),
        (
            [],
            {
                "architecture": "Qwen3ForSequenceClassification",
                "config": {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            },
            "activation_fn 'torch.nn.Tanh' is not supported",
        ),
    ],
)
def test_unsupported_pooling_is_rejected_by_name(
    modules: list[Any], other: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises((UnsupportedError, ModelError), match=says):
        read(tmp_path, *modules, **other)


def test_unknown_task_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="task = 'rank' is not valid: it takes auto"):
        setting_of({"task": "rank"})


def test_score_without_module_needs_the_tokens_no_and_yes(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 320)
    with pytest.raises(UnsupportedError, match="needs the tokens no and yes"):
        read(tmp_path, task="score")
    Tokenizer(models.WordLevel({"no": 7, "yes": 4, "x": 0}, "x")).save(str(tmp_path / "tokenizer.json"))
    spec = read(tmp_path, task="score")
    assert (spec.score_tokens, spec.config.score_labels) == ((7, 4), 2)


def test_a_length_that_only_sentence_transformers_limits_is_noted(tmp_path: Path) -> None:
    spec = read(tmp_path, ("Pooling", POOLING), transformer={"max_seq_length": 512})
    assert any("set session_len = 512 to reject longer texts" in note for note in spec.notes)
    assert not read(tmp_path, ("Pooling", POOLING), transformer={"max_seq_length": 32768}).notes


def write_llama_tokenizer(folder: Path, *, begins: bool) -> None:
    write_byte_tokenizer(folder, 320)
    file = folder / "tokenizer_config.json"
    of_llama = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": begins, "add_eos_token": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **of_llama}))


@pytest.mark.parametrize("begins", [True, False])
def test_tokens_around_texts_and_pairs_equal_transformers(begins: bool, tmp_path: Path) -> None:
    write_llama_tokenizer(tmp_path, begins=begins)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": begins, "add_eos_token": True}
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    spec, tokenizer = read(tmp_path, architecture="Qwen3Model"), load_tokenizer(tmp_path)
    prepare_tokenizer(tmp_path, tokenizer, spec)
    copy_tokenizer(tmp_path, tokenizer, tmp_path / "copy", ends=True)
    for one in (tokenizer, load_tokenizer(tmp_path / "copy")):
        assert encode_text(one, "input", "ab").token_ids == reference("ab")["input_ids"]
        assert encode_pair(one, PAIR).token_ids == reference("q?", "d")["input_ids"]
    assert reference("q?", "d")["input_ids"].count(2) == 2


def test_a_head_after_another_token_than_the_last_is_rejected(tmp_path: Path) -> None:
    write_llama_tokenizer(tmp_path, begins=True)
    config = {"num_labels": 1, "pad_token_id": 2}
    head: dict[str, Any] = {"architecture": "Qwen3ForSequenceClassification", "config": config}
    with pytest.raises(UnsupportedError, match="ends with token 2, which is pad_token_id"):
        prepare_tokenizer(tmp_path, load_tokenizer(tmp_path), read(tmp_path, **head))
    config["pad_token_id"] = 0
    prepare_tokenizer(tmp_path, load_tokenizer(tmp_path), read(tmp_path, **head))


PAIR = [{"role": "query", "content": "q?"}, {"role": "document", "content": "d"}]


def test_pairs_use_the_template_or_are_two_texts(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 320)
    tokenizer = load_tokenizer(tmp_path)
    pair = PAIR
    assert encode_pair(tokenizer, pair).token_ids == tokenizer("q?", "d")["input_ids"]
    instructed = [{"role": "system", "content": "Be fair"}, *pair]
    with pytest.raises(ValueError, match="no template for an instruction"):
        encode_pair(tokenizer, instructed)
    for wrong in (
        pair[:1],
        [*pair, pair[0]],
        [pair[0], {"role": "user", "content": "d"}],
        [{**pair[0], "content": ""}],
    ):
        with pytest.raises(ValueError, match="send one message each with the roles query and document"):
            encode_pair(tokenizer, wrong)
    scored = read(tmp_path, ("LogitScore", {"true_token_id": 5}))
    mistral = replace(scored, config=replace(scored.config, model_family="mistral"))
    with pytest.raises(ModelError, match="family mistral has none: convert the model with --chat-template"):
        prepare_tokenizer(tmp_path, tokenizer, mistral)
    prepare_tokenizer(tmp_path, tokenizer, scored)
    default = encode_pair(tokenizer, pair).text
    assert "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n" in default
    assert default.endswith("<Query>: q?\n<Document>: d<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "<Instruct>: Be fair\n<Query>: q?" in encode_pair(tokenizer, instructed).text
    tokenizer.chat_template = "{{ messages[-2].content }} {{ messages[-1].content }}{# 'query' 'document' #}"
    assert encode_pair(tokenizer, pair).text == "q? d"
    with pytest.raises(ValueError, match="does not print an instruction; leave the instruction out"):
        encode_pair(tokenizer, instructed)


def test_default_prompt_of_a_reranker_is_its_default_instruction(tmp_path: Path) -> None:
    """As in Qwen3-Reranker since sentence-transformers 5.4."""
    write_byte_tokenizer(tmp_path, 320)
    tokenizer = load_tokenizer(tmp_path)
    prompts = {"prompts": {"query": 'Say "é😀"\nor not'}, "default_prompt_name": "query"}
    prepare_tokenizer(tmp_path, tokenizer, read(tmp_path, ("LogitScore", {"true_token_id": 5}), sentences=prompts))
    assert '<Instruct>: Say "é😀"\nor not\n<Query>: q?' in encode_pair(tokenizer, PAIR).text
    instructed = [{"role": "system", "content": "Be fair"}, *PAIR]
    assert "<Instruct>: Be fair\n<Query>: q?" in encode_pair(tokenizer, instructed).text
    head = read(tmp_path, sentences=prompts, architecture="Qwen3ForSequenceClassification", config={"num_labels": 1})
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ModelError, match="the chat template has no roles query and document: set it to null"):
        prepare_tokenizer(tmp_path, load_tokenizer(tmp_path), head)
