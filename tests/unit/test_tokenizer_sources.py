"""Token ids follow tokenizer.json, or SentencePiece's tokenizer.model, whatever other files the folder has."""

from __future__ import annotations

import functools
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizer_kinds import KINDS, LLAMA, SPECIAL, TEKKEN, TEXTS, TRAINING, split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from charonia.bench.random_model import write_byte_tokenizer
from charonia.errors import ModelError
from charonia.families import FAMILIES
from charonia.text import prompt_ids
from charonia.text.sentencepiece_model import convert, read_model
from charonia.text.token_split import build_token_split
from charonia.text.token_table import build_token_table, byte_alphabet
from charonia.text.tokenizer import copy_tokenizer, load_tokenizer, prepare_tokenizer, source_notes
from charonia.weights.convert import read_config

TYPES = [model_type for family in FAMILIES for model_type in family.model_types]


def _rebuilds(name: str) -> bool:
    found = getattr(transformers, name, None)
    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerFast) and "__init__" in vars(found)


# Every class that builds its own tokenizer, and three that do not.
CLASSES = sorted(
    name
    for name in {*TOKENIZER_MAPPING_NAMES.values(), "LlamaTokenizer", "LlamaTokenizerFast"}
    if name and _rebuilds(name)
)
CLASSES += ["PreTrainedTokenizerFast", "TokenizersBackend", "OwnTokenizer"]


def write(folder: Path, model_type: str | None, settings: dict[str, Any]) -> Path:
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    encoded: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return encoded


def parts(tokenizer: Tokenizer) -> dict[str, Any]:
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return {key: definition[key] for key in ("normalizer", "pre_tokenizer", "decoder")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_tokenizer_json_for_every_family_and_class(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [file.encode(text, add_special_tokens=False).ids for text in TEXTS]
    decoded = [file.decode(token_ids, skip_special_tokens=False) for token_ids in expected]
    plain = PreTrainedTokenizerFast(tokenizer_object=file)
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    cases = [("llama", name) for name in CLASSES]
    cases += [(model_type, None) for model_type in (*TYPES, None)]
    cases += itertools.product(("llama", "qwen2", "gemma3_text", "mistral"), ("Qwen2Tokenizer", "GPT2Tokenizer"))
    for model_type, name in cases:
        (tmp_path / "config.json").unlink(missing_ok=True)
        folder = write(tmp_path, model_type, named | ({"tokenizer_class": name} if name else {}))
        tokenizer = load_tokenizer(folder)
        where = (kind, model_type, name)
        assert [ids(tokenizer, text) for text in TEXTS] == expected, where
        assert parts(tokenizer.backend_tokenizer) == parts(file), where
    assert [tokenizer.decode(token_ids) for token_ids in expected] == decoded
    assert build_token_split(tokenizer) == build_token_split(plain)
    if kind != "unigram":  # the table may not support its decoder
        table = build_token_table(tokenizer, len(tokenizer))
        assert table == build_token_table(plain, len(plain))
        for token_ids, text in zip(expected, decoded, strict=True):
            ordinary = [token for token in token_ids if not table.special[token]]
            joined = table.text(ordinary).decode(errors="replace")
            assert (joined.removeprefix(" ") if table.strip_leading_space else joined) == file.decode(ordinary), text


@pytest.mark.parametrize(("kind", "name"), [("gpt2", "Qwen2Tokenizer"), ("llama 2", "GemmaTokenizer")])
def test_a_copied_tokenizer_gives_equal_ids(kind: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    KINDS[kind]().save(str(tmp_path / "source" / "tokenizer.json"))
    source = write(tmp_path / "source", "qwen2", {"tokenizer_class": name, "eos_token": "</s>"})
    tokenizer = load_tokenizer(source)
    copy_tokenizer(source, tokenizer, tmp_path / "copy")
    again = prompt_ids.load_tokenizer(tmp_path / "copy")
    assert [ids(again, text) for text in TEXTS] == [ids(tokenizer, text) for text in TEXTS]
    assert again.eos_token == "</s>"


# Kinds whose file equals the one that a class builds, so that AutoTokenizer keeps it.
SAME = {
    "qwen": ("qwen3", "Qwen2Tokenizer"),
    "gemma": ("gemma2", "GemmaTokenizer"),
    "llama 3": ("llama", "TokenizersBackend"),
}
ADDED = {"content": "<plain>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}
STYLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "strings": (
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "chat_template": "{{ bos_token }}!"},
        {},
    ),
    "objects": ({"eos_token": {"__type": "AddedToken", **ADDED, "content": "</s>"}}, {}),
    # All special tokens of the file, although the class forgets the others.
    "decoder": (
        {
            "eos_token": "</s>",
            "added_tokens_decoder": {
                str(index): {**ADDED, "content": token, "rstrip": token == "<plain>", "special": token != "<plain>"}
                for index, token in enumerate([*SPECIAL, "<plain>"])
            },
        },
        {},
    ),
    "additional": ({"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<new>"]}, {}),
    "extra list": ({"eos_token": "</s>", "extra_special_tokens": ["<|im_start|>"]}, {}),
    "extra dict": ({"eos_token": "</s>", "extra_special_tokens": {"image_token": "<|im_start|>"}}, {}),
    "map": (
        {"clean_up_tokenization_spaces": True},
        {"special_tokens_map.json": json.dumps({"eos_token": {**ADDED, "content": "</s>"}, "bos_token": "<s>"})},
    ),
    "legacy": ({"eos_token": "</s>"}, {"added_tokens.json": json.dumps({"<old>": 700})}),
    "template file": ({"chat_template": "no"}, {"chat_template.jinja": "{{ messages[0].content }}"}),
    "templates": ({"eos_token": "</s>"}, {"additional_chat_templates/tool_use.jinja": "t", "chat_template.jinja": "d"}),
    "template list": ({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}, {}),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", SAME)
def test_special_tokens_and_templates_equal_transformers(kind: str, style: str, tmp_path: Path) -> None:
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    model_type, name = SAME[kind]
    settings, files = STYLES[style]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    write(tmp_path, model_type, {**settings, "tokenizer_class": name})
    reference, tokenizer = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for attribute in ("bos_token", "eos_token", "chat_template", "clean_up_tokenization_spaces"):
        assert getattr(tokenizer, attribute) == getattr(reference, attribute), attribute
    for attribute in ("eos_token_id", "bos_token_id"):
        assert getattr(tokenizer, attribute) == getattr(reference, attribute), attribute
    known = tokenizer.get_added_vocab()
    assert known.items() <= reference.get_added_vocab().items()
    texts = [*TEXTS, " ".join(f"a {token} b" for token in known)]
    assert [ids(tokenizer, text, special=True) for text in texts] == [
        ids(reference, text, special=True) for text in texts
    ]


def test_a_named_class_gives_its_default_tokens_if_the_vocabulary_has_them(tmp_path: Path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(write(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer"}))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", "<unk>")
    size = len(tokenizer)
    tokenizer = load_tokenizer(write(tmp_path, "gemma2", {"tokenizer_class": "GemmaTokenizer", "eos_token": None}))
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<bos>", None, size)
    tokenizer = load_tokenizer(write(tmp_path, "cohere", {"tokenizer_class": "CohereTokenizer"}))
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == (None, None, size)


@pytest.mark.parametrize(
    ("name", "flag", "template", "begins"),
    [
        ("LlamaTokenizerFast", True, None, True),  # DeepSeek
        ("LlamaTokenizer", False, "<s> $A", False),
        ("LlamaTokenizer", None, "<s> $A", True),
        ("LlamaTokenizer", None, None, False),
        ("LlamaTokenizer", True, "<s> $A </s>", True),
        ("Qwen2Tokenizer", True, None, False),
        ("PreTrainedTokenizerFast", False, "<s> $A", True),
    ],
)
def test_add_bos_token_decides_with_the_classes_that_follow_it(
    name: str, flag: bool | None, template: str | None, begins: bool, tmp_path: Path
) -> None:
    made = KINDS["llama 3"]()
    if template:
        special = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ 'x' }}"}
    folder = write(tmp_path, "llama", settings if flag is None else settings | {"add_bos_token": flag})
    tokenizer = load_tokenizer(folder)
    ends = bool(template and template.endswith("</s>"))
    inner = made.encode("Hello", add_special_tokens=False).ids
    assert ids(tokenizer, "Hello", special=True) == [1] * begins + inner + [2] * ends
    assert ids(tokenizer, "Hello") == inner
    chat = prompt_ids.encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])
    assert chat.token_ids == made.encode("x", add_special_tokens=False).ids
    follows = any("follows add_bos_token" in note for note in source_notes(folder, tokenizer))
    assert follows == (begins != bool(template))


def test_a_tokenizer_loads_though_transformers_cannot_read_config_json(tmp_path: Path) -> None:
    """The first files of Phi-3 call their scaling `su`."""
    KINDS["llama 2"]().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "phi3", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"})
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="rope"):
        AutoTokenizer.from_pretrained(tmp_path)
    assert ids(load_tokenizer(tmp_path), "Hello") == KINDS["llama 2"]().encode("Hello", add_special_tokens=False).ids


@functools.cache
def tekken(pattern: str, first_byte: int = 1000, size: int = 131_072) -> Tokenizer:
    """A vocabulary with Tekken's layout. Some tokens span a change from small to capital letters."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = [f"<special {index}>" for index in range(first_byte)]
    tokens += [letters[byte] for byte in range(256)]
    merges = [("l", "o"), ("W", "o"), ("lo", "Wo"), ("2", "0"), ("20", "2")]
    tokens += [left + right for left, right in merges]
    tokens += [f"filler {index}" for index in range(size - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(pattern), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("config", "first_byte", "repaired"),
    [
        ({"model_type": "mistral", "transformers_version": "4.42.0"}, 1000, True),
        ({"model_type": "mistral3", "text_config": {"vocab_size": 131_072}}, 1000, True),
        ({"model_type": "mistral", "transformers_version": "5.2.0"}, 1000, False),
        ({"model_type": "mistral", "transformers_version": "4.42.0"}, 3, False),  # another vocabulary than Tekken's
        ({"model_type": "llama", "transformers_version": "4.42.0"}, 1000, False),
    ],
)
def test_tekkens_split_pattern_is_repaired_as_transformers_does(
    config: dict[str, Any], first_byte: int, repaired: bool, tmp_path: Path
) -> None:
    tekken(LLAMA, first_byte).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, None, {"tokenizer_class": "PreTrainedTokenizerFast"})
    config = config if "text_config" in config else {**config, "vocab_size": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = tekken(TEKKEN if repaired else LLAMA, first_byte)
    tokenizer = load_tokenizer(tmp_path)
    texts = ["HelloWorld", "2024", "a/b\n"]
    assert [ids(tokenizer, text) for text in texts] == [expected.encode(text).ids for text in texts]
    if repaired:
        (note,) = source_notes(tmp_path, tokenizer)
        assert "uses Tekken's pattern" in note


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """tokenizer.model of several kinds."""
    root = tmp_path_factory.mktemp("sentencepiece")
    identity = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True}
    kinds: dict[str, dict[str, Any]] = {
        "llama": {"model_type": "bpe", "byte_fallback": True, **identity},
        "gemma": {
            "model_type": "bpe",
            "byte_fallback": True,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<extra>", "\n\n"],
            **identity,
        },
        "normalized": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
        "without bytes": {"model_type": "bpe", **identity},
        "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"},
        "no end": {"model_type": "bpe", "byte_fallback": True, "bos_id": -1, "eos_id": 1, **identity},
        "spaces behind words": {"model_type": "bpe", "treat_whitespace_as_suffix": True, **identity},
    }
    (root / "text").write_text("\n".join(line for text in TRAINING for line in text.splitlines()))
    for kind, options in kinds.items():
        (root / kind).mkdir()
        sentencepiece.SentencePieceTrainer.train(
            input=str(root / "text"),
            model_prefix=str(root / kind / "tokenizer"),
            hard_vocab_limit=False,
            minloglevel=2,
            **{"vocab_size": 550, **options},
        )
    return {kind: root / kind / "tokenizer.model" for kind in kinds}


SENTENCEPIECE_KINDS = ("llama", "gemma", "normalized", "without bytes", "unigram", "no end")


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_ids_of_tokenizer_model_equal_sentencepiece(kind: str, trained: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained[kind].read_bytes())
    reference = sentencepiece.SentencePieceProcessor(model_file=str(trained[kind]))
    texts = [text for text in TEXTS if "</s>" not in text]  # SentencePiece does not tokenize special tokens
    expected = [reference.encode(text) for text in texts]
    for model_type, name in [
        ("llama", "LlamaTokenizer"),
        ("gemma2", "GemmaTokenizer"),
        ("qwen2", None),
        (None, "T5Tokenizer"),
    ]:
        for legacy in (True, False):
            if not legacy and kind in ("normalized", "unigram"):
                continue  # the prefix of a text without its first spaces: same as in transformers
            write(tmp_path, model_type, {"legacy": legacy} | ({"tokenizer_class": name} if name else {}))
            tokenizer = load_tokenizer(tmp_path)
            found = [ids(tokenizer, text) for text in texts]
            if kind == "unigram":  # the two may choose different segmentations of equal probability
                assert list(map(sorted, found)) == list(map(sorted, expected)), (model_type, name)
            else:
                assert found == expected, (kind, model_type, name, legacy)
    assert tokenizer.eos_token_id == reference.eos_id() and tokenizer.bos_token_id == (
        None if reference.bos_id() < 0 else reference.bos_id()
    )
    copy_tokenizer(tmp_path, tokenizer, tmp_path / "copy")
    again = prompt_ids.load_tokenizer(tmp_path / "copy")
    assert [ids(again, text, special=True) for text in texts] == [ids(tokenizer, text, special=True) for text in texts]
    if kind != "without bytes":
        assert [tokenizer.decode(token_ids) for token_ids in expected] == [reference.decode(one) for one in expected]
    table = build_token_table(tokenizer, len(tokenizer))
    assert all(table.tokens[token] for token in expected[0])


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
        ({}, False),
    ],
)
def test_text_of_tokenizer_model_begins_as_its_class_defines(
    settings: dict[str, Any], begins: bool, trained: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained["llama"].read_bytes())
    tokenizer = load_tokenizer(write(tmp_path, "llama", settings))
    assert ids(tokenizer, "Hello", special=True) == [1] * begins + ids(tokenizer, "Hello")


def test_end_token_of_tokenizer_model_is_in_the_workspace(trained: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained["llama"].read_bytes())
    tokenizer = load_tokenizer(write(tmp_path, "llama", {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}))
    spec = read_config(Path(__file__).parents[2] / "models" / "demo" / "model", task="embed")
    prepare_tokenizer(tmp_path, tokenizer, spec)
    copy_tokenizer(tmp_path, tokenizer, tmp_path / "copy", ends=True)
    again = prompt_ids.load_tokenizer(tmp_path / "copy")
    inner = ids(again, "Hello")
    assert ids(again, "Hello", special=True) == ids(tokenizer, "Hello", special=True) == [1, *inner, 2]


def test_a_damaged_tokenizer_model_is_rejected(trained: dict[str, Path], tmp_path: Path) -> None:
    content = trained["llama"].read_bytes()
    for damaged in (content[:-3], content[:5000], b"\n\x05ab", b"\n\x05\x15\0\0\0\0"):
        (tmp_path / "tokenizer.model").write_bytes(damaged)
        with pytest.raises(ModelError, match="download it again"):
            read_model(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert read_model(tmp_path / "tokenizer.model") is None


def test_a_model_max_length_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 320)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": "long"}))
    with pytest.raises(ModelError, match='model_max_length is "long"; it must be a number'):
        load_tokenizer(tmp_path)


def test_a_tokenizer_model_with_spaces_behind_words_is_rejected(trained: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained["spaces behind words"].read_bytes())
    with pytest.raises(ModelError, match="treat_whitespace_as_suffix"):
        load_tokenizer(tmp_path)


def test_a_folder_whose_sources_disagree_is_named(
    trained: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KINDS["llama 3"]().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "llama", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"})
    with caplog.at_level(logging.WARNING):
        (note,) = source_notes(tmp_path, load_tokenizer(tmp_path))
    assert "transformers' GPT2Tokenizer differs" in note and "uses tokenizer.json" in note
    write(tmp_path, "llama", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    assert source_notes(tmp_path, load_tokenizer(tmp_path)) == []
    (tmp_path / "tokenizer.model").write_bytes(trained["llama"].read_bytes())
    (note,) = source_notes(tmp_path, load_tokenizer(tmp_path))
    assert "tokenizer.model differs" in note
    model = read_model(trained["llama"])
    assert model is not None
    convert(model, legacy=True).save(str(tmp_path / "tokenizer.json"))
    assert source_notes(tmp_path, load_tokenizer(tmp_path)) == []


def test_the_comparison_prints_no_warnings_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers warns about the class and the scaling in config.json, which Charonia does not use."""
    write_byte_tokenizer(tmp_path, 320)
    tokenizer, levels = load_tokenizer(tmp_path), []
    before = transformers.logging.get_verbosity()

    def by_class(folder: Path) -> Any:
        levels.append(transformers.logging.get_verbosity())
        raise ValueError(f"{folder} cannot be loaded by its class")

    monkeypatch.setattr(prompt_ids, "load_by_class", by_class)
    assert source_notes(tmp_path, tokenizer) == []
    assert levels == [logging.ERROR] and transformers.logging.get_verbosity() == before
