"""GPT-OSS' format harmony: parsing of responses, and grammars of responses."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_answer_tags
from agent_requests import engine_request
from agent_requests import read as read_body
from answer_formats import AnswerFormats
from answer_guide import AnswerGuides, Guide, ToolChoice
from charonia_answers.harmony import MARKS
from charonia_answers.reading import Part, Reader
from context_length import GUIDE_MAX_BYTES
from hypothesis import given, settings
from hypothesis import strategies as st
from prepare import special_tokens
from prompt_ids import PromptError, encode_chat, load_tokenizer
from released_templates import released_templates
from released_tokenizers import write_released_tokenizer
from test_answer_tags import calls_of, reader_of, tiny_models
from test_preprocessing import write_tokenizer

CASES = int(os.environ.get("CHARONIA_TEST_ANSWERS", "1000"))
IDS = {mark: 100 + at for at, mark in enumerate(MARKS)}
FORMATS = AnswerFormats("<|channel|>analysis<|message|>", {}, IDS)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "get.weather")]

NEXT = "<|end|><|start|>assistant"
ANALYSIS = f"<|channel|>analysis<|message|>I think.{NEXT}"
PREAMBLE = f"<|channel|>commentary<|message|>I look.{NEXT}"
FINAL = "<|channel|>final<|message|>It is sunny.<|return|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
CALLED = ("f", '{"a": 1}', True)


def tokens_of(text: str) -> list[tuple[int, bytes]]:
    """Each mark is a token without bytes, and each other byte is a token."""
    tokens: list[tuple[int, bytes]] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), "")
        if mark:
            tokens.append((IDS[mark], b""))
        else:
            tokens += [(1, bytes([byte])) for byte in text[0].encode()]
        text = text[len(mark) or 1 :]
    return tokens


def together(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Return content, reasoning, and calls (name, arguments, complete) of all parts."""
    calls: list[tuple[str, str, bool]] = []
    for delta in itertools.chain.from_iterable(part.calls for part in parts):
        if "name" in delta:
            assert delta["index"] == len(calls) and delta["id"]
            calls.append((delta["name"], "", False))
        name, arguments, complete = calls[delta["index"]]
        calls[delta["index"]] = (name, arguments + delta.get("arguments", ""), delta.get("complete", complete))
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


def read(
    text: str | Sequence[tuple[int, bytes]], cuts: Sequence[int] = (), *, cut_off: bool = False, **more: Any
) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """Parse a response in chunks that end at `cuts`."""
    tokens = tokens_of(text) if isinstance(text, str) else text
    reader = Reader(FORMATS.describe(), more.pop("tools", TOOLS), **more)
    ends = [*sorted(cuts), len(tokens)]
    parts = []
    for begin, end in zip([0, *ends], ends, strict=False):
        chunk = tokens[begin:end]
        span = (0, sum(len(piece) for _, piece in chunk))
        parts.append(reader.read(chunk, span, last=end == ends[-1], cut_off=cut_off))
    return together(parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ANALYSIS + FINAL, ("It is sunny.", "I think.", [])),
        (FINAL, ("It is sunny.", "", [])),
        (ANALYSIS + CALL, ("", "I think.", [CALLED])),
        (ANALYSIS + PREAMBLE + CALL, ("I look.", "I think.", [CALLED])),
        (ANALYSIS + ANALYSIS + PREAMBLE + FINAL, ("I look.\n\nIt is sunny.", "I think.\n\nI think.", [])),
        # The recipient may stand before the channel.
        (ANALYSIS + ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "I think.", [CALLED])),
        (' to=functions.f<|channel|>commentary<|message|>{"a": 1}', ("", "", [CALLED])),
        ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}<|call|>', ("", "", [CALLED])),
        ('<|channel|>commentary to=f<|constrain|>json<|message|>{"a": 1}<|call|>', ("", "", [CALLED])),
        (
            "<|channel|>commentary to=functions.get.weather <|constrain|>json<|message|><|call|>",
            ("", "", [("get.weather", "{}", True)]),
        ),
        (CALL.replace("<|call|>", NEXT) + CALL, ("", "", [CALLED, CALLED])),
        (CALL.replace("1}", "1, oh"), ("", "", [("f", '{"a": 1, oh', False)])),
        (CALL.replace("1}", "1} "), ("", "", [CALLED])),
        (CALL.replace('{"a": 1}', "sunny"), ("", "", [("f", "sunny", False)])),
        # A message to something else is content, or reasoning in the channel of reasoning.
        ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("", "1 + 1", [])),
        # Marks are missing.
        ("It is sunny.", ("It is sunny.", "", [])),
        ("tomorrow", ("tomorrow", "", [])),
        (" to", (" to", "", [])),
        ("<|message|>It is sunny.<|return|>", ("It is sunny.", "", [])),
        ("<|channel|>analysis<|message|>I think.<|channel|>final<|message|>Yes.", ("Yes.", "I think.", [])),
        ("<|channel|>analysis<|message|>I think.<|end|><|channel|>final<|message|>Yes.", ("Yes.", "I think.", [])),
        (f"<|channel|>{'long ' * 200}<|return|>", ("long " * 200, "", [])),
        ("", ("", "", [])),
        (FINAL.replace("sunny", "<|sunny|>"), ("It is <|sunny|>.", "", [])),
    ],
)
def test_response_has_content_reasoning_and_calls(text: str, expected: Any) -> None:
    assert read(text) == expected
    assert read(text, range(len(tokens_of(text)))) == expected


def test_text_that_spells_a_mark_is_text() -> None:
    spelled = "a <|end|> b"
    tokens = [*tokens_of("<|channel|>final<|message|>"), (1, spelled.encode()), *tokens_of("<|return|>")]
    assert read(tokens) == (spelled, "", [])


TEXT = st.text(st.sampled_from('ab {}"1,:\n色'), max_size=6)
PIECE = st.one_of(
    TEXT,
    st.sampled_from(
        [*MARKS, ANALYSIS, PREAMBLE, FINAL, CALL, NEXT, "<|start|>assistant", " to=functions.f", " to=f", "to", "final"]
    ),
)


@settings(max_examples=CASES, deadline=None)
@given(st.lists(PIECE, max_size=12).map("".join), st.data(), st.booleans(), st.booleans(), st.booleans())
def test_result_does_not_depend_on_the_chunks(text: str, data: Any, cut_off: bool, forced: bool, begun: bool) -> None:
    tokens = tokens_of(text)
    # The engine ends a chunk where a character ends.
    ends = [at for at in range(len(tokens)) if not tokens[at][1] or tokens[at][1] < b"\x80"]
    cuts = sorted(data.draw(st.sets(st.sampled_from(ends)))) if ends else []
    more: dict[str, Any] = {"cut_off": cut_off, "forced": forced, "begun": "So" if begun else None}
    whole = read(tokens, **more)
    assert read(tokens, cuts, **more) == whole
    assert not forced or not whole[0]
    for _, arguments, complete in whole[2]:
        assert not complete or isinstance(json.loads(arguments, strict=False), dict)


@pytest.mark.parametrize("text", [ANALYSIS + PREAMBLE + CALL, ANALYSIS + FINAL])
def test_response_that_is_cut_off_has_no_header_words(text: str) -> None:
    tokens = tokens_of(text)
    whole = read(tokens)
    for at in range(len(tokens)):
        content, reasoning, calls = read(tokens[:at], cut_off=True)
        assert whole[0].startswith(content) and whole[1].startswith(reasoning)
        for name, arguments, complete in calls:
            assert name == "f" and CALLED[1].startswith(arguments) and complete is (arguments == CALLED[1])


def test_continued_response_is_content_up_to_the_next_message() -> None:
    assert read("  and so on.<|return|>", begun="It is") == ("  and so on.", "", [])
    assert read(f" I call.{NEXT}{ANALYSIS}{CALL}", begun="So") == (" I call.", "I think.", [CALLED])


def test_calls_are_content_without_tools_and_one_at_most_if_not_parallel() -> None:
    assert read(ANALYSIS + CALL, tools=None) == ('{"a": 1}', "I think.", [])
    assert read(CALL.replace("<|call|>", NEXT) + CALL, parallel=False) == ("", "", [CALLED])
    assert read(PREAMBLE + CALL, forced=True) == ("", "", [CALLED])


def test_tokens_of_reasoning_are_counted_from_its_mark_to_its_end() -> None:
    reader = Reader(FORMATS.describe())
    tokens = tokens_of(ANALYSIS + FINAL)
    part = reader.read(tokens, (0, len(tokens)), last=True)
    assert part.num_reasoning_tokens == len("I think.") + 2


def test_stop_words_count_up_to_a_header_of_a_call() -> None:
    words, marks = FORMATS.stops("p", [{"name": "f"}], ["x"], forced=False)
    assert list(words) == ["x"]
    for text in (CALL, f"{NEXT} to=functions.f", " to=functions.f<|channel|>commentary json<|message|>"):
        assert any(mark in text for mark in marks)
    assert not any(mark in ANALYSIS + PREAMBLE + FINAL for mark in marks)


# --- grammars

FUNCTIONS = [one for one in test_answer_tags.FUNCTIONS if "<" not in one["name"]]


class Model(test_answer_tags.Model):
    """A tiny random model that has the marks of harmony, and ends responses like GPT-OSS."""

    def __init__(self, folder: Path) -> None:
        special = [mark for mark in MARKS if mark != tiny_models.EOS]
        tiny_models.write_model(folder, "byte_level", "babbler", hidden=128, positions=512, special=special)
        tokens = {
            one["content"]: one["id"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        }
        ends = {"eos_token_id": [tokens["<|return|>"], tokens["<|call|>"]]}
        for name, fields in (("config.json", ends), ("tokenizer_config.json", {"eos_token": "<|return|>"})):
            (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
        self.open(folder, "byte_level")
        assert sorted(self.engine.info.end_ids) == sorted(ends["eos_token_id"])
        self.harmony = self.formats("harmony", "harmony")
        self.bias |= dict.fromkeys((self.special[mark] for mark in MARKS), 9.0)
        self.guides = AnswerGuides(self.harmony, self.special, GUIDE_MAX_BYTES)

    def parts(self, guide: Any, functions: Any = FUNCTIONS, seeds: int = 64) -> list[Any]:
        return list(self.sample(guide, reader_of(self.harmony, "", functions), seeds))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    made = Model(tmp_path_factory.mktemp("harmony") / "model")
    with made.engine:
        yield made


def test_forced_calls_follow_reasoning_only(model: Model) -> None:
    for choice, names in (
        (ToolChoice("required"), {one["name"] for one in FUNCTIONS}),
        (ToolChoice("function", "get_weather"), {"get_weather"}),
    ):
        parts = model.parts(model.guide(model.harmony, choice, FUNCTIONS))
        assert {bool(part.reasoning) for part in parts} == {True, False}
        for part in parts:
            [(name, _)] = calls_of(part)
            assert name in names and not part.content


def test_calls_next_to_free_text_are_strict(model: Model) -> None:
    parts = model.parts(model.guide(model.harmony, ToolChoice("auto"), FUNCTIONS))
    assert {bool(calls_of(part)) for part in parts} == {True, False}
    assert any(part.content for part in parts)


@pytest.mark.parametrize("functions", [[], FUNCTIONS, FUNCTIONS[1:2]])
def test_content_follows_a_guide(model: Model, functions: Any) -> None:
    found = set()
    for sent, check in (
        (("json_schema", '{"type": "object", "properties": {"a": {"type": "boolean"}}}'), json.loads),
        (("choice", '["yes", "no"]'), ["yes", "no"].index),
        (("regex", "[a-f]{3}"), lambda text: int(text, 16)),
        (("ebnf_grammar", 'root ::= "1" root | "0"'), int),
    ):
        for part in model.parts(model.guide(model.harmony, ToolChoice("auto"), functions, given=sent)):
            found |= {"reasoning"} if part.reasoning else set()
            if calls_of(part):
                assert not part.content
                found.add("call")
            else:
                check(part.content)
                found.add("content")
    assert found == {"reasoning", "content", *(["call"] if functions else [])}


def test_continued_response_may_call_a_strict_function(model: Model) -> None:
    begun = {"num_begun": 3}
    made = model.guides.make("p<|channel|>final<|message|>So ", FUNCTIONS, ToolChoice("auto"), True, Guide(), **begun)
    reader = partial(Reader, model.harmony.describe(), FUNCTIONS, begun="So ")
    parts = list(model.sample(made, reader, 64))
    assert any(part.content for part in parts) and any(calls_of(part) for part in parts)
    says = "contains <|channel|>analysis<|message|>, so a text cannot follow"
    with pytest.raises(PromptError, match=re.escape(says)):
        text = "<|channel|>analysis<|message|>I"
        model.guides.make(f"p{text}", FUNCTIONS, ToolChoice("auto"), True, Guide(), num_begun=len(text))


def test_name_of_a_forced_function_has_no_white_space(model: Model) -> None:
    with pytest.raises(PromptError, match=r'function "a b" cannot be called: .* white space'):
        model.guide(model.harmony, ToolChoice("required"), [{"name": "a b"}])


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "medium"),
        *(({"reasoning_effort": effort}, effort) for effort in ("low", "medium", "high")),
        *(({"reasoning_effort": effort}, "low") for effort in ("none", "minimal")),
        *(({"reasoning_effort": effort}, "high") for effort in ("xhigh", "max")),
        ({"enable_thinking": False}, "low"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "high"),
        ({"reasoning_effort": ["x"]}, "['x']"),
    ],
)
def test_effort_is_one_that_the_model_has_learned(tmp_path: Path, variables: dict[str, Any], shown: str) -> None:
    plain = "{{ reasoning_effort or 'medium' }}"
    given = str(variables.get("reasoning_effort") or "medium")
    for template, expected in (("{# <|channel|>final<|message|> #}" + plain, shown), (plain, given)):
        tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", template))
        assert encode_chat(tokenizer, [{"role": "user", "content": "x"}], variables=variables).text == expected


# --- prompts with the released template and tokenizer


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gptoss")
    write_released_tokenizer("gptoss", folder)
    (folder / "chat_template.jinja").write_text(released_templates()["trl/gptoss"])
    return load_tokenizer(folder)


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ARGUMENTS = {"city": "Paris"}
CHAT: dict[str, Any] = {
    "reasoning_effort": "high",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I look it up.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": WEATHER}],
}
RESPONSES: dict[str, Any] = {
    "reasoning": {"effort": "high"},
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A greeting."}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look it up."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ],
    "tools": [{"type": "function", **WEATHER}],
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A greeting.", "signature": ""},
                {"type": "text", "text": "Hello."},
            ],
        },
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look it up.", "signature": ""},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": ARGUMENTS},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
    ],
    "tools": [
        {"name": "get_weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]},
    ],
}


@pytest.mark.slow  # downloads packages
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)],
    ids=["chat", "responses", "messages"],
)
def test_prompt_of_each_api_equals_transformers(released: Any, path: str, body: dict[str, Any]) -> None:
    request = engine_request(read_body(path, {"model": "m", **body}))
    made = encode_chat(released, request.messages or (), request.tools, variables=request.chat_template_kwargs)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        *CHAT["messages"][:4],
        {"role": "assistant", "thinking": "I look it up.", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    expected = released.apply_chat_template(
        messages, tools=CHAT["tools"], add_generation_prompt=True, reasoning_effort="high", return_dict=False
    )
    assert made.token_ids == expected
    assert "Reasoning: high" in made.text and "analysis<|message|>I look it up.<|end|>" in made.text
    assert "A greeting." not in made.text
    # After the final response, the template drops the reasoning of the call too.
    later = [*(request.messages or ()), {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "OK"}]
    assert "I look it up." not in encode_chat(released, later, request.tools).text


@pytest.mark.slow
def test_prompt_has_calls_with_a_text_and_reasoning_and_begun_responses(released: Any) -> None:
    user, (call,) = CHAT["messages"][3], CHAT["messages"][4]["tool_calls"]
    other = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "First.",
        "tool_calls": [call, other],
    }
    results = [{"role": "tool", "tool_call_id": id, "content": id} for id in ("c1", "c2")]
    text = encode_chat(released, [user, message, *results, {"role": "developer", "content": "Be brief."}, user]).text
    assert text.partition("<|start|>assistant")[2] == (
        "<|channel|>analysis<|message|>First.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"c1"<|end|>'
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"c2"<|end|>'
        "<|start|>user<|message|>Be brief.\n\nWeather?<|end|><|start|>assistant"
    )
    begun = encode_chat(released, [user, {"role": "assistant", "content": "It is "}], continues=True)
    assert begun.text.endswith("<|end|><|start|>assistant<|channel|>final<|message|>It is ") and begun.num_begun == 6
    session = encode_chat(released, [user], interactive=True)
    added = released.decode(session.continuation_ids)
    assert added == "<|end|><|start|>user<|message|>Weather?<|end|><|start|>assistant"


@pytest.mark.slow
def test_released_tokenizer_spells_all_marks_as_special_tokens(released: Any) -> None:
    formats = AnswerFormats(released.chat_template, {}, special_tokens(released)).describe()
    assert (formats["tool_calls"], formats["reasoning"]) == ("harmony", "harmony")
    assert formats["special"].keys() == set(MARKS)
    assert [formats["special"][mark] for mark in ("<|return|>", "<|call|>", "<|end|>")] == [200002, 200012, 200007]
    ids = released.encode(ANALYSIS + PREAMBLE + CALL, add_special_tokens=False)
    special = set(formats["special"].values())
    tokens = [(id, b"" if id in special else released.decode([id]).encode()) for id in ids]
    reader = Reader(formats, TOOLS)
    parts = [reader.read([token], (0, len(token[1])), last=at == len(tokens) - 1) for at, token in enumerate(tokens)]
    assert together(parts) == ("I look.", "I think.", [CALLED])
