"""Structured output under made-up guides: schemas that are right, that are damaged and that are hostile. Every one is
taken or is an error of its request; what has ended is valid; nothing hangs, and memory stays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charonia import Engine, Guide, InvalidRequestError, OverloadedError, SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "model"
CASES = int(os.environ.get("CHARONIA_TEST_SCHEMAS", "320"))
AT_ONCE = 8
MAX_GROWTH_BYTES = 400 << 20
CACHE = "16MiB"

NAMES = st.sampled_from(["a", "b", "c", "a/b~", "é"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
NUMBERS = st.integers(-12, 12) | st.floats(-12, 12).map(lambda number: round(number, 3))
COUNTS = st.integers(0, 4)
LEAVES = st.one_of(
    st.just(True),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"type": st.sampled_from(["null", "boolean", "string", "array", "object"])}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={name: NUMBERS for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    ),
    st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.integers(1, 9)}),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNTS, "maxLength": COUNTS}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^a+$", "b", "^[a-c]{2,3}", "x|y"])}),
    st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(["date", "uuid", "ipv4", "own"])}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b"])}),
)
NEEDED = st.lists(NAMES, max_size=2, unique=True)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that have others in them, and combinations of keywords."""
    some = st.lists(inner, min_size=1, max_size=3)
    combined = {"allOf": some, "anyOf": some, "oneOf": some, "not": st.fixed_dictionaries({"required": NEEDED})}
    objects = {
        "properties": st.dictionaries(NAMES, inner, max_size=4),
        "required": NEEDED,
        "additionalProperties": st.booleans() | inner,
        "dependentRequired": st.dictionaries(NAMES, NEEDED, max_size=2),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "x-note": VALUES,
    }
    arrays = {"items": inner, "prefixItems": some, "minItems": COUNTS, "maxItems": COUNTS}
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object")}, optional=objects),
        st.fixed_dictionaries({"type": st.just("object")}, optional=objects | combined),
        st.fixed_dictionaries({"type": st.just("array")}, optional=arrays),
        st.fixed_dictionaries({}, optional=combined),
        st.fixed_dictionaries({}, optional={"type": st.sampled_from(["string", "integer", "object"]), **combined}),
    )


SCHEMAS = st.builds(
    lambda schema, a, b: {**schema, "$defs": {"a": a, "b": b}} if isinstance(schema, dict) else schema,
    st.recursive(LEAVES, larger, max_leaves=8),
    st.recursive(LEAVES, larger, max_leaves=3),
    LEAVES,
)
JUNK = st.sampled_from(
    [None, True, [], {}, "", "x", -1, 1.5, 10**30, 1e300, [{}], {"$ref": "#/$defs"}, {"not": {}}, "\x00", "type"]
)


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A schema in which a value or a keyword is another one."""
    schema = draw(SCHEMAS)
    at: Any = schema
    while isinstance(at, dict | list) and at:
        key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
        if not isinstance(at[key], dict | list) or not at[key] or draw(st.booleans()):
            if isinstance(at, dict) and draw(st.booleans()):
                at[draw(st.text(max_size=6) | st.sampled_from(["$id", "if", "typ", "items", "$ref"]))] = at.pop(key)
            else:
                at[key] = draw(JUNK)
            return schema
        at = at[key]
    return schema


def _deep(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


PIECES = st.lists(
    st.sampled_from([*"()[]{}|*+?.^$\\", "a", "é", "{2,99}", "\\d", "[^a", "(?=", '"', "::=", "root", "\n"])
)
HOSTILE = st.one_of(
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
    sampling: SamplingParams
    pool: ThreadPoolExecutor

    def one(self, guide: Guide) -> str:
        """What became of it."""
        try:
            answer = self.engine.generate("x", self.sampling, guide=guide, timeout=120)[0]
        except InvalidRequestError as error:
            assert len(str(error)) > 10
            return "refused"
        except OverloadedError as error:
            assert "waited" in str(error)  # behind grammars that take long
            return "to be sent again"
        if answer.finish_reason != "stop" or guide.type != "json_schema":
            return "cut off" if answer.finish_reason != "stop" else "other"
        schema, value = json.loads(guide.text), json.loads(answer.text)
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError:
            return "of a schema that is none"
        jsonschema.Draft202012Validator(schema).validate(value)
        return "valid"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    with (
        Engine.from_pretrained(DEMO, threads=1, guide_cache_size=CACHE, guide_timeout_s=5) as engine,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        closing = [i for i in range(engine.info.vocab_size) if re.search(rb'["}\]]', engine._open().token_bytes(i))]
        bias = dict.fromkeys(closing, 9.0) | dict.fromkeys(engine.info.end_ids, 12.0)
        yield Fuzz(engine, SamplingParams(max_tokens=60, temperature=2.0, logit_bias=bias, seed=1), pool)


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
    stats = fuzz.engine.stats()
    assert stats.num_running == stats.num_waiting == 0
