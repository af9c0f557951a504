"""Structured output in this process: texts that end follow the guide. Other libraries check it too."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import charonia_client
import jsonschema
import openai.types.beta
import openai.types.chat
import openai.types.responses
import pytest
import test_tiktoken_vocabulary
from charonia_answers.ebnf import to_lark
from guide_walks import Walks
from pydantic import BaseModel
from tokenizers import decoders, normalizers, pre_tokenizers

from charonia import Engine, Guide, InvalidRequestError, Output, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
sys.path.append(str(DEMO.parents[2] / "tests" / "stack"))

import tiny_models  # noqa: E402

MAX_SCHEMA_BYTES = 5000


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(DEMO, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def hasty(engine: Engine) -> SamplingParams:
    """Random tokens. Tokens that close or end something are more likely."""
    closing = [i for i in range(engine.info.vocab_size) if re.search(rb'["}\]-]', engine._open().token_bytes(i))]
    bias = dict.fromkeys(closing, 8.0) | dict.fromkeys(engine.info.end_ids, 10.0)
    return SamplingParams(max_tokens=300, temperature=2.0, logit_bias=bias)


@pytest.fixture(scope="module")
def walks(engine: Engine) -> Walks:
    return Walks(engine)


def schemas() -> list[Any]:
    """Return real schemas: pydantic's schemas of OpenAI's own objects."""
    classes = {
        one
        for module in (openai.types.chat, openai.types.responses, openai.types.beta)
        for one in vars(module).values()
        if inspect.isclass(one) and issubclass(one, BaseModel)
    }
    made = [one.model_json_schema() for one in sorted(classes, key=lambda one: one.__qualname__)]
    return [one for one in made if len(json.dumps(one)) <= MAX_SCHEMA_BYTES]


def generate(engine: Engine, guide: Guide, sampling: SamplingParams, seed: int = 0) -> Output:
    params = SamplingParams(**{**vars(sampling), "seed": seed})
    return engine.generate("x", params, guide=guide)[0]


@pytest.mark.slow
def test_answers_that_have_ended_are_valid_under_two_hundred_schemas(engine: Engine, hasty: SamplingParams) -> None:
    found = schemas()[:220]
    assert len(found) >= 200
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda schema: generate(engine, Guide.json_schema(schema), hasty, seed=1), found))
    ended = 0
    for schema, answer in zip(found, answers, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
            ended += 1
    assert ended >= 60  # the others were cut off by max_tokens


SCHEMAS: list[Any] = [
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[a-z]+-[0-9]{2,4}$"},
    {"type": "string", "format": "date-time"},
    {"type": "number", "minimum": -3.5, "exclusiveMaximum": 12.25},
    {"type": "integer", "exclusiveMinimum": -7, "maximum": 1234},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "string"}], "items": {"const": {"a": [1]}}},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "null"}}},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "minProperties": 1},
    {"type": "object", "unevaluatedProperties": False},
    {"enum": ['/"\\\n', 1.5, None, {"x": "é"}, -0.1, 1e-7]},
    {"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [{"const": 0}, {"type": "array", "items": {"$ref": "#/$defs/t"}}]}}},
    {"oneOf": [{"type": "string"}, {"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"type": "object"},
    {"type": "array"},
    True,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_responses_that_end_are_valid_under_their_schema(
    engine: Engine, hasty: SamplingParams, walks: Walks, schema: Any
) -> None:
    guide = Guide.json_schema(schema)
    params = [hasty] * 4 + [walks.params(seed, max_tokens=90) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: generate(engine, guide, params[seed], seed), range(8)))
    ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
    assert ended
    validator = jsonschema.Draft202012Validator
    for text in ended:
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


def is_pairs(text: str) -> bool:
    """Whether a text consists of name=value pairs. A value is a number or pairs in brackets."""
    pair = re.match(r"[a-zé]+=", text)
    if not pair:
        return False
    rest = text[pair.end() :]
    if rest.startswith("["):
        ends = (at for at, char in enumerate(rest) if char == "]")
        return any(is_pairs(rest[1:at]) and (not rest[at + 1 :] or is_more(rest[at + 1 :])) for at in ends)
    number = re.match(r"[0-9]{1,3}", rest)
    return bool(number) and (number.end() == len(rest) or is_more(rest[number.end() :]))


def is_more(text: str) -> bool:
    return text.startswith(",") and is_pairs(text[1:])


def test_texts_of_a_grammar_follow_it(engine: Engine, hasty: SamplingParams) -> None:
    in_lark = 'start: pair ("," pair)*\npair: NAME "=" ("[" start "]" | /[0-9]{1,3}/)\nNAME: /[a-zé]+/'
    in_ebnf = 'root ::= pair ("," pair)*\npair ::= name "=" ("[" root "]" | [0-9]{1,3})\nname ::= [a-zé]+'
    for grammar in (in_lark, to_lark(in_ebnf)):
        answers = [generate(engine, Guide.grammar(grammar), hasty, seed) for seed in range(8)]
        ended = [answer.text for answer in answers if answer.finish_reason == "stop"]
        assert ended and all(is_pairs(text) for text in ended), ended
    with pytest.raises(InvalidRequestError, match="this is EBNF, and Lark is expected"):
        engine.generate("x", guide=Guide.grammar(in_ebnf))


def write_metaspace(folder: Path) -> int:
    """Write a tokenizer with the byte-fallback vocabulary, but without its normalizer. Returns the end id."""
    made = tiny_models.build_tokenizer("byte_fallback", tiny_models.byte_fallback_vocabulary())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    made.save(str(folder / "tokenizer.json"))
    return int(made.token_to_id(tiny_models.EOS))


def write_tiktoken(folder: Path) -> int:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ranks = test_tiktoken_vocabulary.vocabulary()
    test_tiktoken_vocabulary.write(folder, ranks)
    return len(ranks)


@pytest.mark.parametrize("write", [write_metaspace, write_tiktoken])
def test_other_kinds_of_vocabularies_follow_a_guide(write: Callable[[Path], int], tmp_path: Path) -> None:
    tiny_models.write_model(tmp_path, "byte_fallback", "babbler", hidden=128, positions=512)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": write(tmp_path)}))
    word = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"naïve 日": word, "b": word}, "required": ["naïve 日"]}
    sampling = SamplingParams(max_tokens=300, temperature=2.0)
    with Engine.from_pretrained(tmp_path, threads=1) as engine:
        answers = [generate(engine, Guide.json_schema(schema), sampling, seed) for seed in range(4)]
    ended = [json.loads(answer.text) for answer in answers if answer.finish_reason == "stop"]
    assert ended
    for answer in ended:
        jsonschema.Draft202012Validator(schema).validate(answer)
    assert any(not text.isascii() for answer in ended for text in answer.values())


def test_wrong_guide_is_an_error_of_the_request(engine: Engine) -> None:
    for guide, says in (
        (Guide.json_schema({"properties": {"a": {"not": {}}}}), "at /properties/a: Unimplemented keys"),
        (Guide.json_schema("{"), "is not JSON"),
        (Guide.regex("("), "regex"),
        (Guide.choice([]), "at least one text"),
        (Guide("xml"), "guided_decoding_guide_type = 'xml'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError, match=re.escape(says)):
            engine.generate("x", guide=guide)
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        Guide.json_schema({"a": object()})
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        engine.generate("x", guide=Guide.regex("\ud800"))
    with pytest.raises(TypeError, match=r"guide = '\[0-9\]\+' is not valid: use Guide.regex"):
        engine.generate("x", guide="[0-9]+")  # type: ignore[arg-type]


def test_guides_of_the_client_library_equal_those_of_the_engine() -> None:
    schema = {"type": "object", "properties": {"é": {"const": 1}}}
    made: list[tuple[str, tuple[Any, ...]]] = [
        ("json", ()),
        ("json_schema", (schema,)),
        ("json_schema", ("{}",)),
        ("json_schema", (True,)),
        ("regex", ("[0-9]+",)),
        ("grammar", ('start: "é"',)),
        ("structural_tag", ({"format": {"type": "any_text"}},)),
        ("choice", (("yes", "é"),)),
    ]
    assert {name for name, _ in made} == {name for name, one in vars(Guide).items() if isinstance(one, classmethod)}
    for name, arguments in made:
        ours, theirs = getattr(Guide, name)(*arguments), getattr(charonia_client.Guide, name)(*arguments)
        assert (ours.type, ours.text) == (theirs.type, theirs.text)
    for kind in (Guide, charonia_client.Guide):
        for wrong in ("yes", ["yes", 1]):
            with pytest.raises(TypeError, match=r"choice = .*'?yes'?.* is not valid: it must be a list of texts"):
                kind.choice(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot be written as JSON"):
            kind.json_schema({"a": object()})


def test_a_stream_of_several_ends_with_its_grammar(engine: Engine) -> None:
    texts = [""] * 3
    for chunk in engine.stream("x", SamplingParams(n=3, seed=1), guide=Guide.choice(["eins", "zwei"])):
        texts[chunk.index] += chunk.text
    assert set(texts) <= {"eins", "zwei"}
