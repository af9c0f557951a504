"""Jump-forward of structured output in this process: responses are the same as step by step with the same grammar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from charonia_answers.lark import grammars_of

from charonia import Engine, Guide, Output, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
PROMPT = "A call, as JSON:"
NAMES = ("temperature_celsius", "relative_humidity", "wind_speed_kmh", "visibility_km")
WEATHER = {"type": "object", "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in NAMES}}
WEATHER["required"] = list(NAMES)
CALL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tool": {"enum": ["get_weather", "send_message", "get_weather_now"]},
        "number": {"type": "number"},
    },
    "required": ["name", "tool", "number"],
}
GUIDES = {
    "weather": Guide.json_schema(WEATHER),
    "call": Guide.json_schema(CALL),
    "regex": Guide.regex(r"The answer( to the question)? is [0-9]{1,4}, isn't it\? (Yes|No)\.  \n\nThat's all\."),
    "choice": Guide.choice(["the first of two long texts", "the first of two others"]),
    "not ascii": Guide.regex("Der Fluß heißt (Isar|Donau), glaube ich sehr fest"),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(DEMO, threads=1, device="cpu", jump_forward=True) as engine:
        assert not [warning for warning in engine.info.warnings if "jump_forward" in warning]
        yield engine


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": 1, **given})


def step_by_step(sampling: SamplingParams) -> SamplingParams:
    """Disable jump-forward: log probabilities need a step for each token."""
    return dataclasses.replace(sampling, logprobs=0)


def told(output: Output) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.num_output_tokens, output.num_input_tokens


def expect_same(engine: Engine, sampling: SamplingParams, guide: Guide, prompt: str = PROMPT) -> list[Output]:
    fast = engine.generate(prompt, sampling, guide=guide)
    slow = engine.generate(prompt, step_by_step(sampling), guide=guide)
    assert [told(output) for output in fast] == [told(output) for output in slow]
    return fast


@pytest.mark.parametrize("name", GUIDES)
def test_responses_and_streams_equal_step_by_step_generation(engine: Engine, name: str) -> None:
    """engine/tests/engine_forced_test.cpp does this for every end of a response, for sessions and with preemptions."""
    for seed in range(3):
        expect_same(engine, params(seed=seed, n=2, repetition_penalty=1.2 if seed else 1.0), GUIDES[name])
    for sampling in (params(), params(max_tokens=9), params(stop=['":'])):
        [whole] = expect_same(engine, sampling, GUIDES[name])
        chunks = list(engine.stream(PROMPT, sampling, guide=GUIDES[name]))
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        assert chunks[-1].finish_reason == whole.finish_reason


def test_responses_take_fewer_steps_and_are_valid(engine: Engine) -> None:
    before = engine.stats().num_steps
    [answer] = engine.generate(PROMPT, params(), guide=GUIDES["weather"])
    steps = engine.stats().num_steps - before
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), WEATHER)
    assert 2 * steps < answer.num_output_tokens
    assert answer.token_ids[:-1] == engine.tokenizer.backend_tokenizer.encode(answer.text, add_special_tokens=False).ids


def test_a_token_that_a_grammar_names_is_a_choice_beside_certain_text(engine: Engine) -> None:
    [free] = engine.generate(PROMPT, params(max_tokens=1, temperature=0.0))
    [most_likely] = free.token_ids
    named = Guide.grammar(f'start: <[{most_likely}]> " and so on" | "Xylophones of another kind, and of a third"')
    [answer] = expect_same(engine, params(temperature=0.0), named)
    assert answer.token_ids[0] == most_likely
    alone = Guide.grammar(f'start: <[{most_likely}]> " and this is certain, and so is this" /[0-9]/')
    before = engine.stats().jump_forward_tokens
    [answer] = expect_same(engine, params(), alone)
    assert answer.finish_reason == "stop"
    assert engine.stats().jump_forward_tokens > before


def test_text_behind_a_special_token_is_certain_too(engine: Engine) -> None:
    elements = [
        {"type": "token", "token": "<|assistant|>"},
        {"type": "const_string", "value": '{"name": "get_weather", "arguments": {"the_place": "'},
        {"type": "regex", "pattern": "[a-z]{3,9}"},
        {"type": "const_string", "value": '"}}'},
        {"type": "token", "token": "<|user|>"},
    ]
    tokens = {str(token): number for number, token in engine.tokenizer.added_tokens_decoder.items()}
    tag = Guide("structural_tag", grammars_of({"type": "sequence", "elements": elements}, "tag", tokens))
    before = engine.stats()
    [answer] = engine.generate(PROMPT, params(), guide=tag)
    now = engine.stats()
    assert now.jump_forward_tokens - before.jump_forward_tokens > 5
    assert now.num_steps - before.num_steps < answer.num_output_tokens - 5
    assert answer.text.startswith('{"name": "get_weather", ') and answer.finish_reason == "stop"
    for seed in range(3):
        expect_same(engine, params(seed=seed), tag)


@pytest.mark.usefixtures("all_proposals")
def test_speculation_proposes_certain_text_and_changes_no_token() -> None:
    plain = Engine.from_pretrained(DEMO, threads=1, device="cpu")
    speculating = Engine.from_pretrained(DEMO, threads=1, device="cpu", speculative_method="ngram")
    with plain, speculating:
        for name in GUIDES:
            for sampling in (params(n=2), params(temperature=0.0), params(logprobs=1, bad_words=["x"])):
                expected = plain.generate(PROMPT, sampling, guide=GUIDES[name])
                got = speculating.generate(PROMPT, sampling, guide=GUIDES[name])
                assert [told(output) for output in got] == [told(output) for output in expected]
                assert [output.logprobs for output in got] == [output.logprobs for output in expected]
        assert speculating.stats().accepted_tokens > 0


def test_without_the_setting_nothing_is_forced() -> None:
    with Engine.from_pretrained(DEMO, threads=1, device="cpu") as plain:
        before = plain.stats().num_steps
        [answer] = plain.generate(PROMPT, params(), guide=GUIDES["weather"])
        assert plain.stats().num_steps - before >= answer.num_output_tokens
        expect_same(plain, params(), GUIDES["call"])
