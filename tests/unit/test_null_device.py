"""device = null in Python: the demo model's tokenizer, and words that no computation produced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from charonia import Engine, Guide, InvalidRequestError, SamplingParams
from charonia.quality.evaluate import evaluate

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(DEMO, device="null", stream_interval_ms=0) as engine:
        yield engine


def test_answers_are_words_until_their_length_is_reached(engine: Engine) -> None:
    assert engine.info.device == "null"
    [greedy] = engine.generate("Hello", SamplingParams(max_tokens=40, temperature=0))
    assert (greedy.finish_reason, len(greedy.token_ids)) == ("length", 40)
    assert greedy.text.isascii() and len(greedy.text.split()) > 10
    stream = list(engine.stream("Hello", SamplingParams(max_tokens=40, temperature=0)))
    assert "".join(chunk.text for chunk in stream) == greedy.text
    assert len(stream) >= 20
    word = greedy.text.split()[5]
    [stopped] = engine.generate("Hello", SamplingParams(max_tokens=40, temperature=0, stop=[word]))
    assert stopped.finish_reason == "stop" and word not in stopped.text
    assert greedy.text.startswith(stopped.text)


def test_a_grammar_holds(engine: Engine) -> None:
    pattern = "(yes|no)( (yes|no)){3}"
    [answer] = engine.generate("a", SamplingParams(max_tokens=40), guide=Guide.regex(pattern))
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.text)


def test_it_cannot_be_evaluated() -> None:
    with pytest.raises(InvalidRequestError, match="device = null computes nothing, so there is nothing to evaluate"):
        evaluate(str(DEMO), settings={"device": "null"}, save=False)
