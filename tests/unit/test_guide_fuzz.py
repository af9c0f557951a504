"""Structured output under random guides: valid, damaged and hostile schemas. The engine accepts each guide or rejects
its request. Responses that end are valid. Nothing hangs, and memory does not grow."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import psutil
import pytest
from guide_walks import Walks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia import Engine, Guide, InvalidRequestError, OverloadedError, SamplingParams

sys.path.append(str(Path(__file__).resolve().parents[1] / "stack"))

from made_up_schemas import PIECES, SCHEMAS, damaged

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
CASES = int(os.environ.get("CHARONIA_TEST_SCHEMAS", "320"))
AT_ONCE = 8
MAX_GROWTH_BYTES = 400 << 20


def _deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


def _patterns(count: int) -> list[str]:
    """Return patterns whose intersection costs llguidance twice as much for each of them."""
    return [f"[a-z].{{{index}}}[0-9]" for index in range(count)]


HOSTILE = st.one_of(
    st.sampled_from([7, 997, 999_983]).map(lambda number: Guide.json_schema({"type": "integer", "multipleOf": number})),
    st.builds(
        lambda count: Guide.json_schema({"allOf": [{"type": "string", "pattern": one} for one in _patterns(count)]}),
        st.sampled_from([2, 40]),
    ),
    st.builds(
        lambda count: Guide.json_schema({"patternProperties": {f"^{index}x": True for index in range(count)}}),
        st.sampled_from([16, 1000]),
    ),
    st.builds(
        lambda count: Guide(
            "ebnf_grammar",
            "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(count)) + f'A{count}: "a"',
        ),
        st.sampled_from([10, 3000]),
    ),
    st.builds(lambda levels: Guide("json_schema", _deep(levels)), st.integers(30, 4000)),
    st.builds(
        lambda count, kind: Guide.json_schema({"type": "array", "minItems": count, "items": {"type": kind}}),
        st.sampled_from([50, 10**5, 10**9]),
        st.sampled_from(["array", "string"]),
    ),
    st.builds(
        lambda count: Guide.json_schema(
            {"type": "object", "properties": {f"p{index}": {"type": "null"} for index in range(count)}}
        ),
        st.sampled_from([60, 900, 1800]),
    ),
    st.builds(
        lambda options, depth: Guide.json_schema(
            {"allOf": [{"anyOf": [{"type": "object", "properties": {f"p{a}": True}} for a in range(options)]}] * depth}
        ),
        st.integers(2, 20),
        st.integers(2, 12),
    ),
    st.builds(lambda text: Guide("json_schema", text), st.text(max_size=30)),
    st.builds(lambda pieces: Guide("regex", "".join(pieces) or "a"), PIECES),
    st.builds(lambda pieces: Guide("ebnf_grammar", "root ::= " + "".join(pieces)), PIECES),
    st.builds(
        lambda schema, begin, trigger: Guide.structural_tag(
            {
                "structures": [{"begin": begin, "schema": schema, "end": "</f>"}],
                "triggers": [trigger],
            }
        ),
        SCHEMAS,
        st.sampled_from(["<f>", "", "<"]),
        st.sampled_from(["<f", "", "x"]),
    ),
)
GUIDES = st.one_of(
    SCHEMAS.map(Guide.json_schema), SCHEMAS.map(Guide.json_schema), damaged().map(Guide.json_schema), HOSTILE
)


@dataclass
class Fuzz:
    engine: Engine
    walks: list[SamplingParams]
    pool: ThreadPoolExecutor

    def one(self, guide: Guide) -> str:
        """Generate with a guide and return the kind of result."""
        params = self.walks[len(guide.text) % len(self.walks)]
        try:
            answer = self.engine.generate("x", params, guide=guide, timeout=120)[0]
        except InvalidRequestError as error:
            assert len(str(error)) > 10
            return "refused"
        except OverloadedError as error:
            assert "waited" in str(error)  # it waited for grammars that take long
            return "to be sent again"
        if answer.finish_reason != "stop" or guide.type != "json_schema":
            return "cut off" if answer.finish_reason != "stop" else "other"
        schema, value = json.loads(guide.text), json.loads(answer.text)
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            return "of a schema that is none"
        validator = jsonschema.Draft202012Validator
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
        return "valid"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    with (
        Engine.from_pretrained(DEMO, threads=1) as engine,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        walks = Walks(engine)
        yield Fuzz(engine, [walks.params(seed, max_tokens=60) for seed in range(64)], pool)


@pytest.mark.slow
def test_made_up_guides_are_kept_or_refused(fuzz: Fuzz) -> None:
    counts: dict[str, int] = {}

    @settings(max_examples=CASES // AT_ONCE, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(GUIDES, min_size=AT_ONCE, max_size=AT_ONCE))
    def run(guides: list[Guide]) -> None:
        for became in fuzz.pool.map(fuzz.one, guides):
            counts[became] = counts.get(became, 0) + 1

    before = psutil.Process().memory_info().rss
    run()
    growth = psutil.Process().memory_info().rss - before
    print(counts, f"{growth >> 20} MiB")
    assert counts["valid"] >= CASES // 20 and counts["refused"] >= CASES // 20, counts
    assert growth < MAX_GROWTH_BYTES
    fuzz.engine.check_integrity()
    # A response arrives before the counts exclude its request.
    while fuzz.engine.stats().num_running + fuzz.engine.stats().num_waiting:
        time.sleep(0.01)
