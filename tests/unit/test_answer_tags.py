"""Grammars of forced calls, and the parser: both use one description of a format, and must agree. The engine samples
random responses from the grammars."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_guides import schemas

from charonia import Engine, Guide, InvalidRequestError, SamplingParams
from charonia.text.token_table import build_token_table

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("charonia/text", "postprocessing", "preprocessing")]
sys.path.append(str(ROOT / "tests" / "stack"))

import answer_formats  # noqa: E402
import answer_guide  # noqa: E402
import tiny_models  # noqa: E402
from answer_guide import ToolChoice  # noqa: E402
from charonia_answers import beside_calls, formats  # noqa: E402
from charonia_answers.lark import grammars_of  # noqa: E402
from charonia_answers.reading import Reader  # noqa: E402
from charonia_answers.tag_parts import NoTagError  # noqa: E402
from charonia_answers.xml import text_parameters  # noqa: E402
from context_length import GUIDE_MAX_BYTES  # noqa: E402
from detokenize import TokenTable  # noqa: E402
from prompt_ids import PromptError  # noqa: E402

# harmony has its own test file.
CALL_FORMATS, REASONING_FORMATS = (
    {name: one for name, one in formats.items() if name != "harmony"}
    for formats in (formats.CALL_FORMATS, formats.REASONING_FORMATS)
)
BEGINS = sorted({mark for one in CALL_FORMATS.values() for mark in one.begin if " " not in mark and "><" not in mark})
MARKS = [
    *{*BEGINS, "<|action_start|>", "<|plugin|>", "<|action_end|>"},
    *{
        mark
        for one in CALL_FORMATS.values()
        for mark in (one.end, one.quote, one.arguments_mark)
        if mark and "\n" not in mark
    },
    *{mark for one in CALL_FORMATS.values() for mark in one.each if mark},
    *{mark for one in CALL_FORMATS.values() if one.xml for mark in one.xml.marks if mark not in ("", ">")},
    *{mark for one in REASONING_FORMATS.values() for mark in one.markup},
]
JOINED = [mark for one in CALL_FORMATS.values() for mark in one.begin if "><" in mark]
# Some functions and parameters have reserved names, or markup as a name: the parser must treat it as a name.
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": ["integer", "null"]},
        "unit": {"enum": ["C", 'F"', "<tool_call>", 1, None]},
        "notes": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}},
    },
    "required": ["city", "near"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"at": {"type": "number"}}}]}},
}
# A structural tag in its older form, and the pattern of its tags in free text.
OLDER_TAG = {"structures": [{"begin": "(", "schema": {"type": "null"}, "end": ")"}], "triggers": ["("]}
TAGGED = r"\(null\)"
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": STRICT, "strict": True},
    {"name": "get", "parameters": {"type": "object", "properties": {"q": {"not": {}}}}},
    {"name": "<tool_call>", "strict": True},
    {"name": "confirm", "strict": True},
]


def functions_of(format: str) -> list[dict[str, Any]]:
    """Return the functions whose names are valid in a format."""
    one = CALL_FORMATS[format]
    return [
        each
        for each in FUNCTIONS
        if "<" not in each["name"] or not (one.xml or one.each[0] or one.syntax == "pythonic")
    ]


class Model:
    """A tiny random model. Its vocabulary has all markup, as special tokens or as texts. With byte fallback, a space
    precedes every text."""

    def __init__(self, folder: Path, kind: tiny_models.TokenizerKind, special: bool) -> None:
        marks = {"special": MARKS} if special else {"added": [*MARKS, *JOINED]}
        tiny_models.write_model(folder, kind, "babbler", hidden=128, positions=512, **marks)  # type: ignore[arg-type]
        self.open(folder, kind)
        marks_ids = [self.tokenizer.convert_tokens_to_ids(mark) for mark in MARKS]
        self.bias |= dict.fromkeys(marks_ids, 8.0)
        if not special:
            self.bias |= dict.fromkeys(map(self.tokenizer.convert_tokens_to_ids, JOINED), 9.0)
        ends = [one.xml.value[1].strip() for one in CALL_FORMATS.values() if one.xml]
        self.bias |= dict.fromkeys(map(self.tokenizer.convert_tokens_to_ids, ends), 13.0)

    def open(self, folder: Path, kind: tiny_models.TokenizerKind) -> None:
        self.engine = Engine.from_pretrained(folder, threads=1)
        self.tokenizer = self.engine.tokenizer
        made = build_token_table(self.tokenizer, self.engine.info.vocab_size)
        self.table = TokenTable(
            np.array([0, *accumulate(map(len, made.tokens))], np.int64),
            np.frombuffer(b"".join(made.tokens), np.uint8),
            np.array(made.special, np.uint8),
        )
        tokens = {str(t): i for i, t in self.tokenizer.added_tokens_decoder.items() if t.special}
        self.special = tokens
        self.kind = kind
        closing = [i for i, token in enumerate(made.tokens) if token in (b'"', b"}", b"]")]
        self.yes = [i for i, token in enumerate(made.tokens) if token in (b"y", b"n")]
        self.bias = dict.fromkeys(closing, 6.0)
        self.bias |= {i: 9.0 for i, token in enumerate(made.tokens) if token == b"\n"}
        self.bias |= dict.fromkeys(self.engine.info.end_ids, 7.0)

    def formats(self, calls: str, reasoning: str = "none") -> Any:
        if self.kind == "byte_fallback" and "▁" in CALL_FORMATS.get(calls, CALL_FORMATS["hermes"]).end:
            pytest.skip(
                "SentencePiece reads the bars in DeepSeek's marks as spaces, and DeepSeek has no such tokenizer"
            )
        names = {"CHARONIA_TOOL_CALL_PARSER": calls, "CHARONIA_REASONING_PARSER": reasoning}
        return answer_formats.AnswerFormats("", names, self.special)

    def guide(self, formats: Any, choice: ToolChoice, functions: list[Any], prompt: str = "", **more: Any) -> Any:
        guides = answer_guide.AnswerGuides(formats, self.special, GUIDE_MAX_BYTES)
        given = answer_guide.Guide(*more.pop("given", ()))
        any_arguments = more.pop("any_arguments", True)
        return guides.make(prompt, functions, choice, more.pop("parallel", True), given, any_arguments=any_arguments)

    def sample(
        self,
        guide: Any,
        reader: Callable[[], Reader],
        seeds: int,
        bias: Mapping[int, float] | None = None,
        first: int = 1,
    ) -> Iterator[Any]:
        """Yield the parsed responses that have ended. The test trains a tokenizer, which differs between runs. If all
        responses reach max_tokens, the requests are sent again."""
        chat = [{"role": "user", "content": "x"}]
        ended = False
        for attempt in range(8):
            params = SamplingParams(
                max_tokens=250, temperature=2.0, logit_bias=bias or self.bias, n=seeds, seed=first + attempt * seeds
            )
            for answer in self.engine.generate(chat, params, guide=Guide(guide.type, guide.text)):
                if answer.finish_reason != "stop":
                    continue
                ended = True
                size = len(self.table.join(np.array(answer.token_ids)))
                span = (size - len(answer.text.encode()), size)  # without a leading space
                tokens = [(token, self.table.piece(token)) for token in answer.token_ids]
                part: Any = reader().read(tokens, span, last=True)
                part.text = answer.text
                yield part
            if ended:
                return


def reader_of(formats: Any, prompt: str, functions: Any) -> Callable[[], Reader]:
    return partial(Reader, formats.describe(), functions, in_reasoning=formats.in_reasoning(prompt))


@pytest.fixture(
    scope="module",
    params=[("byte_level", True), ("byte_level", False), ("byte_fallback", True)],
    ids=["special", "text", "space"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("tags") / "model", *request.param)
    with made.engine:
        yield made


TEXT = pytest.mark.parametrize("model", [("byte_level", False)], indirect=True, ids=["text"])


def calls_of(part: Any, functions: list[dict[str, Any]] = FUNCTIONS) -> list[tuple[str, Any]]:
    """Return the calls. Checks that all are complete and follow their schemas."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    complete = {}
    for delta in part.calls:
        names.setdefault(delta["index"], delta.get("name", ""))
        arguments[delta["index"]] = arguments.get(delta["index"], "") + delta.get("arguments", "")
        complete[delta["index"]] = delta.get("complete")
    calls = [(names[at], json.loads(arguments[at], strict=False)) for at in names]
    assert all(complete.values()), part
    for name, values in calls:
        (function,) = [one for one in functions if one["name"] == name]
        assert isinstance(values, dict)
        if function.get("strict"):
            schema = function.get("parameters") or {"type": "object", "maxProperties": 0}
            jsonschema.Draft202012Validator(schema).validate(values)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("format", CALL_FORMATS)
def test_forced_calls_are_parsed_as_calls_only(model: Model, format: str) -> None:
    formats, functions = model.formats(format), functions_of(format)
    reader = reader_of(formats, "", functions)
    several = model.guide(formats, ToolChoice("required"), functions)
    found = []
    for part in model.sample(several, reader, 16):
        assert (part.content, part.reasoning) == ("", ""), part.text
        found.append(calls_of(part))
    assert found and all(found), "no answer has ended, or one has no call"
    for choice, parallel, names in (
        (ToolChoice("required"), False, {one["name"] for one in functions}),
        (ToolChoice("function", "get_weather"), True, {"get_weather"}),
    ):
        one = model.guide(formats, choice, functions, parallel=parallel)
        counts = [calls_of(part) for part in model.sample(one, reader, 8)]
        assert counts and all(len(calls) == 1 and calls[0][0] in names for calls in counts)


@pytest.mark.slow
@pytest.mark.parametrize("format", CALL_FORMATS)
def test_forced_call_follows_schema_of_function_that_is_not_strict(model: Model, format: str) -> None:
    formats = model.formats(format)
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema |= {"additionalProperties": False}
    functions = [{"name": "confirm", "parameters": schema}, {"name": "other", "parameters": {}}]
    choice = ToolChoice("function", "confirm")
    guide = model.guide(formats, choice, functions, any_arguments=False)
    assert guide == model.guide(formats, choice, [strict(schema) | {"name": "confirm"}])
    assert guide != model.guide(formats, choice, functions)
    other = ToolChoice("function", "other")  # any object is valid
    assert model.guide(formats, other, functions, any_arguments=False) == model.guide(formats, other, functions)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_calls_in_free_text_are_strict(model: Model, format: str) -> None:
    formats, functions = model.formats(format), functions_of(format)
    reader = reader_of(formats, "", functions)
    guide = model.guide(formats, ToolChoice("auto"), functions)
    begin = model.tokenizer.get_vocab().get(CALL_FORMATS[format].begin[0])
    # A call and the end of the response are more likely than all other marks together.
    bias = {**model.bias, **dict.fromkeys(model.engine.info.end_ids, 11.0), **({} if begin is None else {begin: 11.0})}
    found: list[tuple[str, Any]] = []
    for first in range(1, 2000, 200):  # responses that end may have no calls
        found += [(part.content, calls_of(part)) for part in model.sample(guide, reader, 24, bias, first)]
        if any(calls for _, calls in found):
            break
    assert any(calls for _, calls in found)
    for content, _ in found:
        assert not any(begin in content for begin in CALL_FORMATS[format].begin) or model.special


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", ["think", "mistral", "gemma4"])  # other formats differ only in their marks
@pytest.mark.parametrize("prompt", ["", "open", "closed"])
def test_text_after_reasoning_follows_the_guide(model: Model, reasoning: str, prompt: str) -> None:
    formats = model.formats("hermes", reasoning)
    marks = REASONING_FORMATS[reasoning]
    text = {"": "", "open": marks.begin + "\n", "closed": f"{marks.begin}\n\n{marks.end}\n\n"}[prompt]
    reader = reader_of(formats, text, FUNCTIONS)
    free = json.dumps(OLDER_TAG)
    seen = set()
    for sent, check in (
        (("json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}}'), json.loads),
        (("choice", '["yes", "no"]'), ["yes", "no"].index),
        (("regex", "[a-f]{3}"), lambda text: int(text, 16)),
        (("ebnf_grammar", 'root ::= "1" root | "0"'), int),
        (("structural_tag", '{"format": {"type": "const_string", "value": "so"}}'), ["so"].index),
        (("structural_tag", free), lambda text: bool(re.fullmatch("[^(]*", re.sub(TAGGED, "", text)))),
    ):
        guide = model.guide(formats, ToolChoice("auto"), [], text, given=sent)
        alone = answer_guide.Guide(*sent) if sent[0] in ("json_schema", "choice", "regex") else guide
        assert (guide == alone) is (prompt == "closed" or alone is guide)
        for part in model.sample(guide, reader, 6):
            check(part.content)
            if sent[1] != free:  # free text may contain marks
                seen.add(bool(part.reasoning))
    assert seen and (prompt != "closed" or seen == {False}) and (prompt == "closed" or True in seen)
    forced = model.guide(formats, ToolChoice("required"), FUNCTIONS, text)
    assert all(calls_of(part) and not part.content for part in model.sample(forced, reader, 6))


def test_a_guide_beside_tools_is_for_answers_without_calls(model: Model) -> None:
    formats = model.formats("hermes")
    reader = reader_of(formats, "", FUNCTIONS)
    guide = model.guide(formats, ToolChoice("auto"), FUNCTIONS, given=("choice", '["yes", "no"]'))
    parts = [*model.sample(guide, reader, 16), *model.sample(guide, reader, 8, dict.fromkeys(model.yes, 20.0))]
    assert all(part.content in ("yes", "no") if not calls_of(part) else not part.content for part in parts)
    assert {bool(part.calls) for part in parts} == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["qwen3_coder", "glm45", "mistral_named", "gemma4", "kimi_k2", "lfm2"])
def test_json_beside_tools_has_no_calls_in_it(model: Model, format: str) -> None:
    formats, functions = model.formats(format), [{"name": "get"}]
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    bias = {**model.bias, **dict.fromkeys(model.yes, 9.0)}
    found = 0
    for guide in (("json", ""), ("json_schema", json.dumps(schema))):
        made = model.guide(formats, ToolChoice("auto"), functions, given=guide)
        plain = [begin for begin in CALL_FORMATS[format].begin if begin not in model.special]
        assert ("^[^" in made.text) is bool(plain), made.text
        for part in model.sample(made, reader_of(formats, "", functions), 12, bias):
            assert bool(part.calls) is not bool(part.content), part
            found += 1
            if part.content:
                json.loads(part.content, strict=False)
    assert found


@TEXT
@pytest.mark.parametrize(
    ("guide", "taken"),
    [
        (("regex", "[a-f]{3}|yes|\\d+"), True),
        (("regex", "[^x]*"), False),
        (("regex", ".*"), False),
        (("regex", "<tool_call>"), False),
        (("regex", "\\x3ctool_call>"), False),
        (("regex", "[!-~]*"), False),
        (("regex", "(?i)<TOOL_CALL>"), False),
        (("regex", "a(?s-i:<TOOL_CALL>)"), True),
        (("ebnf_grammar", "start: /<TOOL_CALL>/i"), False),
        (("ebnf_grammar", 'start: "<TOOL_CALL>"i'), False),
        (("ebnf_grammar", 'start: "/" /<tool_call>/'), False),
        (("ebnf_grammar", 'start: "/" /[a-z]+/ // <tool_call>'), True),
        (("choice", '["yes", "<tool_cal"]'), True),
        (("choice", '["yes", "a <tool_call>"]'), False),
        (("ebnf_grammar", 'root ::= "tool" | [a-z_]+ root | "0" # <>'), True),
        (("ebnf_grammar", 'root ::= "<" [a-z_]+ ">"'), False),
        (("ebnf_grammar", 'root ::= "\\x3c" [a-z_]+ ">"'), False),
        (("ebnf_grammar", "root ::= [^x]*"), False),
        (("json_schema", '{"type": "string", "maxLength": 5}'), True),
        (("json_schema", '{"type": "string", "maxLength": 50}'), True),
        (("json_schema", '{"type": "string", "pattern": "[a-z]+"}'), True),
        (("json_schema", '{"items": {"type": "string", "pattern": "[^x]+"}}'), False),
        (("json_schema", '{"enum": ["<tool_call>"]}'), False),
    ],
)
def test_a_guide_beside_tools_makes_no_mark_of_a_call(model: Model, guide: tuple[str, str], taken: bool) -> None:
    formats, functions = model.formats("qwen3_coder"), [{"name": "get"}]
    if taken:
        assert model.guide(formats, ToolChoice("auto"), functions, given=guide).type == "structural_tag"
    else:
        text = refusal(model.guide, formats, ToolChoice("auto"), functions, given=guide)
        assert text.startswith("guided_decoding_guide: ") and "<tool_call>" in text and "begins a call" in text


@pytest.mark.parametrize("kind", ["regex", "ebnf_grammar", "json_schema"])
def test_brackets_and_quotes_without_an_end_cost_linear_time(kind: str) -> None:
    """Eight times the input may take thirty times as long. In quadratic time it would take 64 times as long."""

    def cost(piece: str, count: int) -> float:
        text = piece * count
        guide = json.dumps({"pattern": text}) if kind == "json_schema" else text
        costs = []
        for _ in range(3):
            began = time.process_time()
            with contextlib.suppress(NoTagError):
                if kind == "json_schema":
                    beside_calls.check_json(json.loads(guide), ["<tool_call>"])
                else:
                    beside_calls.check(kind, guide, ["<tool_call>"])
            costs.append(time.process_time() - began)
        return min(costs)

    for piece in ("[", '"\\', "[a", "\\[", '["', "/", "\\/", "a\n"):
        assert cost(piece, 1 << 13) < 30 * max(cost(piece, 1 << 10), 1e-4), piece


def test_guides_beyond_the_engines_limits_are_not_parsed() -> None:
    names = {"CHARONIA_TOOL_CALL_PARSER": "qwen3_coder", "CHARONIA_REASONING_PARSER": "think"}
    formats = answer_formats.AnswerFormats("", names)
    auto = ToolChoice("auto")
    deep = '{"items": ' * 990 + "{}" + "}" * 990  # json.loads accepts this depth, json.dumps does not
    for most, kind, text in (
        (1000, "regex", "<tool_call>" * 100),
        (1000, "json_schema", json.dumps({"pattern": "<" * 1000})),
        (GUIDE_MAX_BYTES, "json_schema", deep),
        (GUIDE_MAX_BYTES, "structural_tag", f'{{"format": {deep}}}'),
    ):
        guides = answer_guide.AnswerGuides(formats, {}, most)
        given = answer_guide.Guide(kind, text)
        for functions in ([], [{"name": "f"}]):
            assert guides.make("", functions, auto, True, given) is given
        if kind != "structural_tag":
            required = ToolChoice("required")
            forced = guides.make("", [{"name": "f"}], required, True, given)
            assert forced == guides.make("", [{"name": "f"}], required, True, answer_guide.Guide()), kind
    guides = answer_guide.AnswerGuides(formats, {}, 1000)
    schema = {"type": "object", "properties": {"a" * 1000: {}}}
    text = refusal(guides.make, "", [strict(schema)], auto, True, answer_guide.Guide())
    assert re.match(r"tools: schemas of functions: 10.. bytes, but guide_max_bytes", text)
    schema["properties"] = {f"p{number}": {"type": "integer"} for number in range(40)}
    for parser in ("hermes", "mistral_named", "qwen3_coder", "gemma4"):
        formats = answer_formats.AnswerFormats("", {"CHARONIA_TOOL_CALL_PARSER": parser})
        arguments = ("", [strict(schema)], auto, True, answer_guide.Guide())
        made = answer_guide.AnswerGuides(formats, {}, 1 << 20).make(*arguments)
        size = len(made.text.encode())
        assert answer_guide.AnswerGuides(formats, {}, size).make(*arguments) == made
        text = refusal(answer_guide.AnswerGuides(formats, {}, size - 1).make, *arguments)
        assert f"tools: the grammar of functions: {size} bytes" in text


def test_shared_schema_of_many_parameters_is_read_once() -> None:
    class Counted(dict[str, Any]):
        looks = 0

        def get(self, key: str, default: Any = None) -> Any:
            Counted.looks += key == "type"
            return super().get(key, default)

    shared = Counted(type=["string"] * 1000)
    properties = {f"p{number}": {"$ref": "#/$defs/a"} for number in range(100)}
    found = text_parameters({"properties": properties, "$defs": {"a": shared}})
    assert found == dict.fromkeys(properties, False) and Counted.looks == 1


def test_text_contains_only_special_tokens_that_its_tag_names(model: Model) -> None:
    other = {"type": "token", "token": model.tokenizer.convert_tokens_to_ids("[ARGS]")}
    for format in ({"type": "any_text"}, {"type": "any_text", "excludes": ["xyz"]}):
        for more in (format, {"type": "sequence", "elements": [format, other]}):
            tag = grammars_of(more, "tag", model.special)
            params = SamplingParams(max_tokens=40, temperature=2.0, logit_bias=model.bias, n=4, seed=2)
            for answer in model.engine.generate("x", params, guide=Guide("structural_tag", tag)):
                ids = set(answer.token_ids) & {*model.special.values()} - {*model.engine.info.end_ids}
                assert ids <= {model.tokenizer.convert_tokens_to_ids("[ARGS]")}, (format, ids)
                if more is not format and answer.finish_reason == "stop":
                    assert "[ARGS]" not in model.special or ids


HOSTILE = ['say "hi"', "a\\b", "</tool_call>", "[TOOL_CALLS]", "\u2028 \U0001f40c", "x" * 250, "{}", "'"]


@pytest.mark.parametrize("format", ["hermes", "mistral", "llama3_json"])
def test_names_with_quotes_or_markup_are_names(model: Model, format: str) -> None:
    functions = [{"name": name} for name in HOSTILE]
    formats = model.formats(format)
    reader = reader_of(formats, "", functions)
    for name in HOSTILE:
        guide = model.guide(formats, ToolChoice("function", name), functions)
        for part in model.sample(guide, reader, 2):
            assert [delta["name"] for delta in part.calls if "name" in delta] == [name]
            assert part.content == ""


def strict(schema: Any) -> dict[str, Any]:
    return {"name": "f", "strict": True, "parameters": schema}


def refusal(function: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(PromptError) as caught:
        function(*arguments, **more)
    return str(caught.value)


def make(
    parser: str, functions: list[Any], choice: str | ToolChoice = "required", given: tuple[str, ...] = (), **more: Any
) -> Any:
    """Return the guide of a model without special tokens. choice: its kind, or the name of a function."""
    names = {"CHARONIA_TOOL_CALL_PARSER": parser, "CHARONIA_REASONING_PARSER": "none"}
    guides = answer_guide.AnswerGuides(answer_formats.AnswerFormats("", names), {}, GUIDE_MAX_BYTES)
    if isinstance(choice, str):
        choice = ToolChoice(choice) if choice in ("auto", "required") else ToolChoice("function", choice)  # type: ignore[arg-type]
    return guides.make("x", functions, choice, True, answer_guide.Guide(*given), **more)


NAMED = [{"name": "f"}]
STRUCTURAL_TAG = ("structural_tag", "{}")


@pytest.mark.parametrize(
    ("parser", "functions", "choice", "given", "says"),
    [
        ("hermes", [], "required", (), 'tool_choice: "required" without tools; send tools'),
        ("hermes", NAMED, "other", (), 'tool_choice: "other" is not among tools'),
        ("none", NAMED, "required", (), "CHARONIA_TOOL_CALL_PARSER"),
        ("none", NAMED, "required", (), "charonia serve --tool-call-parser"),
        ("none", [{"name": "f", "strict": True}], "auto", (), "no function can be strict"),
        ("hermes", NAMED * 2, "auto", (), 'tools: two functions have the name "f"; give each'),
        ("hermes", [{"name": ""}], "required", (), 'function "" cannot be called'),
        ("hermes", [{"name": 3}], "required", (), "a function's name is 3"),
        ("hermes", [{"name": "\ud800"}], "required", (), "tools: text that is not valid Unicode"),
        ("hermes", [{"name": "x" * 300}], "required", (), "1 to 256 characters"),
        ("mistral_named", [{"name": "a b"}], "required", (), "white space, quotes or brackets"),
        ("hermes", NAMED, "required", STRUCTURAL_TAG, "send one of them"),
        *(("lfm2", [{"name": name}], "required", (), "cannot be called") for name in ("a b", "f(", "a=b", "<f>")),
    ],
)
def test_calls_that_cannot_be_forced_are_refused(
    parser: str, functions: list[Any], choice: str, given: tuple[str, ...], says: str
) -> None:
    assert says in refusal(make, parser, functions, choice, given)


def test_a_tool_choice_is_a_word_or_names_a_function() -> None:
    for text in ("any", '"required"', '{"type": "function"}', '{"type": "allowed_tools"}', "{"):
        assert "tool_choice" in refusal(answer_guide.read_tool_choice, text)
    named = '{"type": "function", "function": {"name": "f"}}'
    assert answer_guide.read_tool_choice(named) == ToolChoice("function", "f")
    for mode in ("auto", "required"):
        allowed = f'{{"type": "allowed_tools", "allowed_tools": {{"mode": "{mode}", "tools": [{named}]}}}}'
        assert answer_guide.read_tool_choice(allowed) == ToolChoice(mode, allowed=("f",))  # type: ignore[arg-type]
        for wrong in (allowed.replace(mode, "none"), allowed.replace(f"[{named}]", "[]"), allowed.replace('f"}', "f")):
            assert "tool_choice" in refusal(answer_guide.read_tool_choice, wrong)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_allowed_tools_make_the_guide_of_the_allowed_functions(model: Model, format: str) -> None:
    formats = model.formats(format)
    functions = [{"name": name, "strict": name == "f"} for name in ("f", "g", "h")]
    some = [functions[0], functions[1]]
    for mode in ("auto", "required"):
        choice = ToolChoice(mode, allowed=("g", "f"))  # type: ignore[arg-type]
        assert model.guide(formats, choice, functions) == model.guide(formats, ToolChoice(mode), some)  # type: ignore[arg-type]
    # Without a strict function, calls in free text are limited, too.
    guide = model.guide(formats, ToolChoice("auto", allowed=("g",)), functions)
    plain = {"name": "g", "strict": False}
    assert guide.type and guide == model.guide(formats, ToolChoice("auto", allowed=("g",)), [plain])


def test_allowed_tools_that_cannot_be_kept_are_rejected() -> None:
    allowed = ToolChoice("auto", allowed=("f",))
    other = ToolChoice("auto", allowed=("f", "g"))
    assert 'allowed_tools: "g" is not among tools' in refusal(make, "hermes", NAMED, other)
    assert "calls cannot be limited to allowed_tools" in refusal(make, "none", NAMED, allowed)
    assert "allowed_tools, which needs its own tag" in refusal(make, "hermes", NAMED, allowed, STRUCTURAL_TAG)


REFUSED = json.loads(Path(__file__).with_name("refused_schemas.json").read_text("utf-8"))
MANY = {f"p{number}": {"type": "integer"} for number in range(33)}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1000)} | {"d1000": {"type": "string"}}
REFUSED += [
    ("lfm2", {"properties": MANY}, "more than 32 properties, none of which is required"),
    ("gemma4", {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": CHAIN}, "at /$defs/d127: schemas are nested de"),
]


@pytest.mark.parametrize(("parser", "parameters", "says"), REFUSED)
def test_a_schema_that_a_format_cannot_express_is_refused(parser: str, parameters: Any, says: str) -> None:
    text = refusal(make, parser, [strict({"type": "object", **parameters})])
    assert text.startswith('tools: the parameters of function "f"') and says in text


def test_parameters_must_be_an_object_and_may_be_many_if_one_is_required() -> None:
    assert "not the schema of an object" in refusal(make, "hermes", [strict({"type": "string"})])
    function = strict({"properties": MANY, "required": ["p32"], "type": "object"})
    assert make("lfm2", [function]).type == "structural_tag"


OTHER = {"type": "object", "properties": {"names": {"type": "string"}}}
CALL = {"type": "object", "properties": {"name": {"const": "f"}, "parameters": {}}}


@pytest.mark.parametrize(
    ("parser", "kind", "text", "says"),
    [
        ("llama3_json", "json", "", "JSON with a name"),
        ("llama3_json", "json_schema", json.dumps(CALL), "JSON with a name"),
        ("llama3_json", "json_schema", '{"type": ["object", "null"]}', "JSON with a name"),
        ("llama3_json", "json_schema", json.dumps({"anyOf": [OTHER, CALL]}), "JSON with a name"),
        ("llama3_json", "choice", json.dumps(["a", ' {"name": "f", "parameters": {}}']), "JSON with a name"),
        ("llama3_json", "regex", r'\{"n[a-m]+e": 1\}', "JSON with a name"),
        ("llama3_json", "ebnf_grammar", 'root ::= "{\\"name\\": 1}"', "JSON with a name"),
        ("llama3_json", "json_schema", json.dumps(OTHER), ""),
        ("llama3_json", "json_schema", '{"type": "array"}', ""),
        ("llama3_json", "choice", '["a", "b{"]', ""),
        ("llama3_json", "regex", "[a-z{}]+", ""),
        ("pythonic", "choice", '["a", " [f(a=1)]"]', "calls in Python"),
        ("pythonic", "regex", "[a-z(=)\\[]+", "calls in Python"),
        ("pythonic", "ebnf_grammar", 'root ::= "[f(a=1)]"', "calls in Python"),
        ("pythonic", "json", "", ""),
        ("pythonic", "json_schema", '{"type": "array"}', ""),
        ("pythonic", "choice", '["a", "b["]', ""),
        ("pythonic", "regex", "[a-z]+", ""),
    ],
)
def test_guide_that_spells_a_call_is_refused_next_to_a_strict_function(
    parser: str, kind: str, text: str, says: str
) -> None:
    functions = [strict({"type": "object", "properties": {"a": {"type": "integer"}}})]
    if says:
        assert says in refusal(make, parser, functions, "auto", (kind, text))
    else:
        assert make(parser, functions, "auto", (kind, text)).text
    assert make(parser, NAMED, "auto", (kind, text)).text


@TEXT
def test_strings_in_parameters_exclude_the_end_mark_of_a_value(model: Model) -> None:
    """If marks are not tokens, strings exclude them, also strings with a bounded length."""
    formats = model.formats("qwen3_coder")
    texts = {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 60},
        "minItems": 1,
        "maxItems": 1,
    }
    function = strict({"type": "object", "properties": {"a": texts}, "required": ["a"]})
    guide = model.guide(formats, ToolChoice("function", "f"), [function])
    found = 0
    for part in model.sample(guide, reader_of(formats, "", [function]), 16):
        (call,) = part.calls
        assert call["complete"] and "<" not in json.loads(call["arguments"], strict=False)["a"][0]
        found += 1
    assert found


@pytest.mark.parametrize("model", [("byte_level", True)], indirect=True, ids=["special"])
def test_error_of_a_guide_next_to_strict_functions_names_the_guide(model: Model) -> None:
    formats, functions = model.formats("hermes"), [{"name": "f", "strict": True}]
    for sent, says in (
        (("regex", "[a"), "guided_decoding_guide: at byte 0 of the regular expression: a class without an end"),
        (("ebnf_grammar", "start: %json []"), "guided_decoding_guide: after %json an object is expected"),
        (("json_schema", '{"not": {}}'), "guided_decoding_guide: the JSON schema, at its root: "),
    ):
        guide = model.guide(formats, ToolChoice("auto"), functions, given=sent)
        with pytest.raises(InvalidRequestError, match=f"^{says}"):
            model.engine.generate("x", guide=Guide(guide.type, guide.text))


def test_begun_message_is_content(model: Model) -> None:
    formats = model.formats("hermes", "think")
    guides = answer_guide.AnswerGuides(formats, model.special, GUIDE_MAX_BYTES)
    auto, none = ToolChoice("auto"), answer_guide.Guide()
    strict_function = [{"name": "f", "strict": True}]
    begun = {"num_begun": 3}
    made = guides.make("x\nSo ", strict_function, auto, True, none, **begun).text
    assert "think" not in made and f"<[{model.special.get('<think>')}]>" not in made
    for prompt, choice, sent, says in (
        ("x\nSo ", ToolChoice("required"), none, "calls are forced"),
        ("x\nSo ", auto, answer_guide.Guide("json"), "a guide describes the whole response"),
        ("<think>\nSo ", auto, none, "begins a response with reasoning"),
    ):
        assert says in refusal(guides.make, prompt, strict_function, choice, True, sent, **begun)
    for text in ("<think>\nI", "<think></think><think>", 'So:\n<tool_call>\n{"name"'):
        said = refusal(guides.make, f"x\n{text}", strict_function, auto, True, none, num_begun=len(text))
        assert "continue_final_message: the begun message contains <t" in said
    for text in ("<think>\nI\n</think>\nSo", "<tool_call>{}</tool_call> So"):
        assert guides.make(f"x\n{text}", strict_function, auto, True, none, num_begun=len(text)).text
    assert guides.make("x\n<tool_call>", [], auto, True, none, num_begun=11) == none


def test_begun_message_may_continue_with_a_bracket(model: Model) -> None:
    """If a function is strict, a response that begins with a bracket is a call. After a begun message it is text."""
    formats = model.formats("llama3_json")
    guides = answer_guide.AnswerGuides(formats, model.special, GUIDE_MAX_BYTES)
    strict_function = [{"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}]
    vocabulary = model.tokenizer.get_vocab()
    bracket = vocabulary.get("{", vocabulary.get("<0x7B>"))
    for begun in (None, '{"a": '):
        prompt = f"x\n{begun or ''}"
        more = {"num_begun": len(begun)} if begun else {}
        made = guides.make(prompt, strict_function, ToolChoice("auto"), True, answer_guide.Guide(), **more)
        params = SamplingParams(max_tokens=4, temperature=0, logit_bias={bracket: 100.0})
        [answer] = model.engine.generate("x", params, guide=Guide(made.type, made.text))
        assert answer.text.lstrip().startswith("{{" if begun else '{"')
        reader = Reader(formats.describe(), strict_function, begun=begun)
        part = reader.read([(-1, b'{"name": "f", "parameters": {}}')], (0, 99), last=True)
        assert bool(part.calls) == (begun is None)


def test_guided_json_is_not_a_call_without_tools(model: Model) -> None:
    """This holds even if the JSON looks like a call, in a format without marks."""
    formats = model.formats("llama3_json")
    schema = {"type": "object", "properties": {"name": {"const": "get"}, "parameters": {"const": {}}}}
    schema["required"] = ["name", "parameters"]  # type: ignore[assignment]
    guide = model.guide(formats, ToolChoice("auto"), [], given=("json_schema", json.dumps(schema)))
    parts = [*model.sample(guide, reader_of(formats, "", None), 4)]
    assert parts and all(not part.calls and json.loads(part.content)["name"] == "get" for part in parts)


@TEXT
@pytest.mark.parametrize(("parser", "place"), [("hermes", ": "), ("glm45", ", at /properties/a: ")])
def test_the_engine_names_the_place_of_an_unsupported_schema(model: Model, parser: str, place: str) -> None:
    bad = strict({"type": "object", "properties": {"a": {"not": {}}}})
    guide = model.guide(model.formats(parser), ToolChoice("auto"), [bad])
    says = f'^tools: the parameters of function "f"{place}the JSON schema, at (its root|/prop)'
    with pytest.raises(InvalidRequestError, match=says):
        model.engine.generate("x", guide=Guide(guide.type, guide.text))


@TEXT
@pytest.mark.parametrize("format", ["qwen3_coder", "glm45", "gemma4"])
def test_enum_const_and_type_are_all_kept(model: Model, format: str) -> None:
    properties = {
        "a": {"enum": ["x", "y"], "const": "y"},
        "b": {"type": "string", "enum": ["x", None, 1]},
        "c": {"type": "object", "additionalProperties": False},
    }
    function = strict({"type": "object", "properties": properties, "required": ["a", "b", "c"]})
    formats = model.formats(format)
    guide = model.guide(formats, ToolChoice("required"), [function], parallel=False)
    found = [part.calls for part in model.sample(guide, reader_of(formats, "", [function]), 8)]
    values = [json.loads("".join(delta.get("arguments", "") for delta in calls)) for calls in found]
    assert values and all(one == {"a": "y", "b": "x", "c": {}} for one in values)


@TEXT
@pytest.mark.parametrize("format", ["pythonic", "olmo3"])
@pytest.mark.parametrize("required", [[], ["c"]])
def test_arguments_in_python_have_commas_between_them(model: Model, format: str, required: list[str]) -> None:
    properties = {"a": {"type": "boolean"}, "b": {"enum": ["x", None]}, "c": {"type": "string", "maxLength": 2}}
    function = strict({"type": "object", "properties": properties, "required": required})
    formats = model.formats(format)
    guide = model.guide(formats, ToolChoice("function", "f"), [function])
    found = set()
    for part in model.sample(guide, reader_of(formats, "", [function]), 24):
        inner = part.text[part.text.index("(") + 1 : part.text.rindex(")")]
        assert not inner.startswith(",") and not inner.endswith(","), part.text
        arguments = json.loads("".join(delta.get("arguments", "") for delta in part.calls), strict=False)
        jsonschema.Draft202012Validator(function["parameters"]).validate(arguments)
        found.add(tuple(arguments))
    assert len(found) > 2, found


def referring(count: int, definitions: int, padding: str) -> dict[str, Any]:
    """Return parameters that each refer to a ring of definitions."""
    ring = {f"d{i}": {"const": [padding]} for i in range(definitions)}
    ring |= {f"r{i}": {"items": {"anyOf": [{"$ref": f"#/$defs/d{i}"}]}} for i in range(definitions)}
    every = {"anyOf": [{"$ref": f"#/$defs/r{i}"} for i in range(definitions)]}
    properties = {f"p{i}": {"items": {"$ref": "#/$defs/every"}} for i in range(count)}
    return {"type": "object", "properties": properties, "$defs": {**ring, "every": every}}


@TEXT
def test_large_and_recursive_schemas_take_little_time(model: Model) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/a"}] * 2}
    wide = {"anyOf": [{"$ref": "#/$defs/a"}] * 50_000}
    shared = {"enum": ["x" * 100] * 5_000}
    many = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(5_000)}
    long = {"$ref": "#" + "/$defs/a" * 1_000_000}
    began = time.process_time()
    for properties, definition in (
        ({"x": {"$ref": "#/$defs/a"}}, loop),
        ({"x": {"$ref": "#/$defs/a"}}, wide),
        (many, shared),
        (many, long),
    ):
        text_parameters({"type": "object", "properties": properties, "$defs": {"a": definition}})
    formats = model.formats("qwen3_coder")
    large = strict(referring(900, 90, "x" * 100))
    text = refusal(model.guide, formats, ToolChoice("required"), [large])
    assert re.search('function "f", at /properties/p[0-9]+: this format repeats definitions', text)
    some = [{**strict(referring(200, 50, "x" * 100)), "name": f"f{number}"} for number in range(3)]
    assert "this format repeats definitions" in refusal(model.guide, formats, ToolChoice("required"), some)
    assert time.process_time() - began < 60  # 1.5 s; minutes if each reference were followed


@TEXT
def test_a_parameter_has_the_definitions_that_it_refers_to(model: Model) -> None:
    used = {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"type": "boolean"}}
    properties = {"x": {"$ref": "#/$defs/a"}, "y": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "$defs": {**used, "unused": {"const": "unused"}}}
    guide = model.guide(model.formats("qwen3_coder"), ToolChoice("required"), [strict(schema)])
    decode = json.JSONDecoder().raw_decode
    made = [decode(guide.text, found.end())[0] for found in re.finditer(r'"\$defs":', guide.text)]
    assert [{name: one[name] for name in one if name != "any-json"}.keys() for one in made] == [used.keys()]
    model.engine.generate("x", SamplingParams(max_tokens=1), guide=Guide(guide.type, guide.text))


@functools.cache
def real_schemas() -> list[Any]:
    return [one for one in schemas() if one.get("type") == "object"][::16]


@pytest.mark.slow
@TEXT
@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "glm45", "gemma4", "kimi_k2", "lfm2"])
def test_arguments_follow_schemas_of_the_real_world(model: Model, format: str) -> None:
    found = 0
    for schema in real_schemas():
        formats, function = model.formats(format), {"name": "f", "strict": True, "parameters": schema}
        guide = model.guide(formats, ToolChoice("function", "f"), [function])
        for part in model.sample(guide, reader_of(formats, "", [function]), 2):
            arguments = "".join(delta.get("arguments", "") for delta in part.calls)
            jsonschema.Draft202012Validator(schema).validate(json.loads(arguments, strict=False))
            found += 1
    assert found >= 5  # the others were cut off by max_tokens


KEYWORDS = st.sampled_from(
    [*("type", "properties", "items", "$ref", "enum", "const", "anyOf", "required"), "$defs", "object", "#/$defs/a"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | KEYWORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS | st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(CALL_FORMATS)), ANYTHING, ANYTHING, st.dictionaries(KEYWORDS, ANYTHING, max_size=4))
def test_any_function_is_accepted_or_refused(format: str, name: Any, inner: Any, schema: Any) -> None:
    formats = answer_formats.AnswerFormats("", {"CHARONIA_TOOL_CALL_PARSER": format})
    guides = answer_guide.AnswerGuides(formats, {}, GUIDE_MAX_BYTES)
    for parameters in (inner, schema, {"type": "object", "properties": {"a": inner}, **schema}):
        tools = json.dumps([{"function": {"name": name, "parameters": parameters, "strict": True}}, {"function": name}])
        functions = answer_formats.functions_of(tools)
        Reader(formats.describe(), json.loads(tools))
        with contextlib.suppress(PromptError):
            guide = guides.make("", functions, ToolChoice("required"), True, answer_guide.Guide())
            assert json.loads(guide.text)["grammars"]


def test_which_parameters_are_texts() -> None:
    place = {"$ref": "#/$defs/unit"}
    properties = {
        **{"a": {"type": "string"}, "b": {"type": ["string", "null"]}, "c": {"anyOf": [place, {"type": "null"}]}},
        **{"d": place, "e": {"enum": ["x", None]}, "f": {"type": ["string", "integer"]}, "g": {}, "h": True},
        **{"i": {"type": "null"}, "j": {"$ref": "#/$defs/loop"}, "k": {"const": "x"}, "l": {"$ref": 5}},
    }
    defs = {"unit": {"enum": ["C", "F"]}, "loop": {"$ref": "#/$defs/loop"}}
    texts = {"a": False, "b": True, "c": True, "d": False, "e": True, "k": False}
    assert text_parameters({"properties": properties, "$defs": defs}) == texts
    for odd in (None, True, {}, {"properties": 3}, {"properties": {"a": 3}}):
        assert text_parameters(odd) == {}


def test_guide_is_unchanged_if_nothing_requires_a_tag(model: Model) -> None:
    formats = model.formats("hermes")
    plain: list[Mapping[str, Any]] = [{"name": "f"}, {"name": "g", "strict": False}]
    assert model.guide(formats, ToolChoice("auto"), plain) == answer_guide.Guide()
    assert model.guide(formats, ToolChoice("auto"), [], given=("regex", "a")) == answer_guide.Guide("regex", "a")
    thinks = model.formats("hermes", "think")
    wrong_guides = [("json_schema", "{"), ("json_schema", "[]"), ("choice", "[]"), ("choice", "[1]"), ("json", "x")]
    for wrong in (*wrong_guides, ("xml", "a"), ("regex", ""), ("", "a")):
        assert model.guide(thinks, ToolChoice("auto"), [], given=wrong) == answer_guide.Guide(*wrong)
        for functions in ([{"name": "f"}], [{"name": "f", "strict": True}]):
            assert model.guide(formats, ToolChoice("auto"), functions, given=wrong) == answer_guide.Guide(*wrong)


def test_annotations_of_strict_schemas_are_dropped(model: Model) -> None:
    long = {"description": "x" * 10_000, "title": "y"}
    schema = {"type": "object", **long, "properties": {"title": {"type": "string", **long}, "description": {**long}}}
    guide = model.guide(
        model.formats("hermes"), ToolChoice("auto"), [{"name": "f", "strict": True, "parameters": schema}]
    )
    assert len(guide.text) < 1000 and '"title":{"type":"string"},"description":{}' in guide.text


def test_ten_thousand_tools_are_too_many_and_a_thousand_are_not(model: Model) -> None:
    formats = model.formats("hermes")
    for count, fits in ((1000, True), (10_000, False)):
        functions = [{"name": f"function_{number}"} for number in range(count)]
        guide = model.guide(formats, ToolChoice("required"), functions)
        params = SamplingParams(max_tokens=20, temperature=1.0)
        if fits:
            model.engine.generate("x", params, guide=Guide(guide.type, guide.text))
        else:
            with pytest.raises(InvalidRequestError, match=r"^tools: .* guide_max_bytes is 65536"):
                model.engine.generate("x", params, guide=Guide(guide.type, guide.text))
