"""Generated JSON schemas, some of them damaged, and pieces of expressions, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c", "a/b~", "é"])
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-20, 20) | st.floats(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
# Numbers that double precision cannot distinguish from others, or that are written with an exponent.
LARGE = st.sampled_from([2**53 + 1, 10**19, -(2**64), [10**30], {"a": [2**53 + 1]}])
NUMBERS = st.integers(-12, 12) | st.floats(-12, 12).map(lambda number: round(number, 3))
COUNTS = st.integers(0, 4)
LEAVES = st.one_of(
    st.just(True),
    st.fixed_dictionaries({"const": VALUES | LARGE}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4) | st.lists(LARGE, min_size=1, max_size=1)}),
    st.fixed_dictionaries({"type": st.sampled_from(["null", "boolean", "string", "array", "object"])}),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={name: NUMBERS for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    ),
    st.fixed_dictionaries({"type": st.just("integer"), "multipleOf": st.integers(1, 9)}),
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNTS, "maxLength": COUNTS}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^a+$", "b", "^[a-c]{2,3}", "x|y"])}),
    st.fixed_dictionaries(
        {"type": st.just("string"), "format": st.sampled_from(["date", "time", "uuid", "ipv4", "own"])}
    ),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b"])}),
)
NEEDED = st.lists(NAMES, max_size=2, unique=True)
# Names of properties, also with spellings that are almost right.
NAMED = st.sampled_from(
    [
        {},
        {"description": "d"},
        {"title": "t", "type": "string"},
        {"pattern": "^a+$"},
        {"maxLength": 2},
        {"minLength": 1, "type": "string", "x-note": 1},
        {"format": "date"},
        {"format": "own"},
        {"patern": "^a$"},
        {"maxlength": 1},
    ]
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested schemas, and combinations of keywords."""
    some = st.lists(inner, min_size=1, max_size=3)
    absent = st.fixed_dictionaries({"required": NEEDED | st.lists(NAMES, min_size=1, max_size=1)})
    exclusive = st.fixed_dictionaries({"oneOf": st.lists(inner | absent, min_size=1, max_size=3)})
    options = some | st.lists(inner | exclusive, min_size=1, max_size=2)
    combined = {"allOf": some, "anyOf": options, "oneOf": options, "not": absent}
    objects = {
        "properties": st.dictionaries(NAMES, inner, max_size=4),
        "required": NEEDED,
        "additionalProperties": st.booleans() | inner,
        "dependentRequired": st.dictionaries(NAMES, NEEDED, max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner | absent, max_size=1),
        "unevaluatedProperties": st.just(False),
        "minProperties": COUNTS,
        "maxProperties": COUNTS,
        "x-note": VALUES,
    }
    unnamed = {
        "additionalProperties": st.booleans() | inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "^k\\d$", "b"]), inner, min_size=1, max_size=1),
        "propertyNames": NAMED,
        "unevaluatedProperties": st.just(False),
        "minProperties": st.integers(0, 2),
        "maxProperties": COUNTS,
        "properties": st.just({}),
    }
    # Each keyword alone and with one other keyword.
    open_objects = st.lists(st.sampled_from(sorted(unnamed)), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({"type": st.just("object"), **{name: unnamed[name] for name in names}})
    )
    some_properties = {"properties": objects["properties"]}
    others = {name: kind for name, kind in objects.items() if name != "properties"}
    without_type = st.fixed_dictionaries(some_properties, optional=others)
    arrays = {"items": inner, "prefixItems": some, "minItems": COUNTS, "maxItems": COUNTS}
    return st.one_of(
        open_objects,
        st.fixed_dictionaries({"type": st.just("object")}, optional=objects),
        st.fixed_dictionaries({"type": st.just("object")}, optional=objects | combined),
        # Without a type, values that are not objects are also valid.
        st.fixed_dictionaries(some_properties, optional=others | combined),
        st.fixed_dictionaries({"oneOf": st.tuples(without_type, LEAVES).map(list)}),
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
    """A schema in which a value or a keyword is replaced."""
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


PIECES = st.lists(
    st.sampled_from([*"()[]{}|*+?.^$\\", "a", "é", "{2,99}", "\\d", "[^a", "(?=", '"', "::=", "root", "\n"])
)
