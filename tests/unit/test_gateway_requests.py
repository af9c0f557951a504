"""Conversion of requests before they are sent, and of responses before they become JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import uvicorn
from charonia_client import (
    BadRequest,
    CharoniaError,
    DeadlineExceeded,
    GenerateResponse,
    Guide,
    Overloaded,
    ServerError,
    Unavailable,
)
from charonia_client.types import TopToken
from charonia_gateway import body
from charonia_gateway.body import ignored_fields, parse
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.errors import ApiError, from_engine
from charonia_gateway.json_values import MAX_VALUES
from charonia_gateway.logprobs import CompletionLogprobs, chat_logprobs
from charonia_gateway.schemas.interactive import InteractiveRequest
from charonia_gateway.schemas.messages import MessagesRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.requests import ChatRequest, CompletionRequest
from charonia_gateway.schemas.responses import TokenizerInfo
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "f"}}


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": USER, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def interactive(**fields: object) -> InteractiveRequest:
    return parse(InteractiveRequest, json.dumps({"prompt": "hi", **fields}).encode())


@pytest.mark.parametrize(("model", "field"), [(ChatRequest, "messages"), (InteractiveRequest, "prompt")])
def test_plain_string_is_the_users_message_and_is_documented(
    model: type[ChatRequest] | type[InteractiveRequest], field: str
) -> None:
    request = parse(model, json.dumps({"model": "m", field: "hi"}).encode())
    assert request.engine_request().messages == USER
    forms = [form.get("type") for form in model.model_json_schema()["properties"][field]["anyOf"]]
    assert {"string", "array"} <= set(forms)


def tool(**function: object) -> dict[str, object]:
    return {"tools": [{"type": "function", "function": function}]}


@given(st.integers(-(2**63), 2**64 - 1))
def test_seeds_fit_their_tensor(seed: int) -> None:
    asked = chat(seed=seed).engine_request().seed
    assert asked is not None and 0 <= asked < 2**64 and (asked - seed) % 2**64 == 0


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWERED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "42"},
]
STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


def allowed(mode: str, name: str | None = "f") -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool]}}


PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
GIVEN = {"enable_thinking": True, "documents": []}
MODELS = {"temperature": None, "top_p": None, "top_k": None, "repetition_penalty": None, "messages": USER}


@pytest.mark.parametrize(
    ("make", "fields", "sent"),
    [
        (chat, {}, {"max_tokens": None, "temperature": None, "stream": False, "n": None, "session_id": None}),
        (chat, {}, {"interactive": False, "parsed": None, "chat_template_kwargs": None, "guide": None}),
        (chat, {"timeout": 0.0001}, {"timeout_ms": 1}),
        (chat, {"timeout": 2}, {"timeout_ms": 2000}),
        (chat, {"top_k": -1}, {"top_k": 0}),
        (chat, {"top_p": 0}, {"top_p": 1e-6}),
        (chat, {"max_tokens": 5, "max_completion_tokens": 3}, {"max_tokens": 3}),
        (chat, {"messages": "hi"}, {"messages": USER}),
        (
            chat,
            {"messages": [{"role": "developer", "content": PARTS}]},
            {"messages": [{"role": "developer", "content": "a \nb"}]},
        ),
        (
            chat,
            {"messages": [{"role": "tool", "content": PARTS}]},
            {"messages": [{"role": "tool", "content": "a \nb"}]},
        ),
        (
            chat,
            {"messages": [{"role": "assistant", "content": PARTS}]},
            {"messages": [{"role": "assistant", "content": "a b"}]},
        ),
        (chat, {"session_id": 7, "n": 1}, {"session_id": "7"}),
        (chat, {"session_id": "a b"}, {"session_id": "a b"}),
        (chat, {"session_id": "0"}, {"session_id": "0"}),
        (chat, {"session_id": -1}, {"session_id": None}),
        (chat, {"session_id": 7, "n": 2}, {"session_id": None}),
        (chat, {"tools": [FUNCTION]}, {"tools": [FUNCTION], "parsed": True, "tool_choice": None}),
        (chat, {"tools": [FUNCTION], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (chat, {"tools": [FUNCTION], "tool_choice": "none"}, {"tools": None, "parsed": None}),
        (chat, {"tools": [STRICT], "tool_choice": "auto"}, {"tools": [STRICT], "tool_choice": None}),
        (chat, {"tools": [STRICT], "tool_choice": "required"}, {"tool_choice": "required"}),
        (chat, {"tools": [STRICT], "tool_choice": FUNCTION}, {"tool_choice": FUNCTION}),
        (
            chat,
            {"tools": [STRICT], "tool_choice": allowed("auto")},
            {"tool_choice": allowed("auto"), "tools": [STRICT]},
        ),
        (chat, {"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}),
        (chat, {"thinking_budget": 5}, {"thinking_budget": 5, "chat_template_kwargs": {"thinking_budget": 5}}),
        (
            chat,
            {"reasoning_effort": "none"},
            {"chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False}},
        ),
        (
            chat,
            {"reasoning_effort": "none", "chat_template_kwargs": GIVEN},
            {"chat_template_kwargs": {"reasoning_effort": "none", **GIVEN}},
        ),
        (completion, {}, {"max_tokens": 16, "text": "hi", "prompt_logprobs": None}),
        (
            completion,
            {"prompt": ["a", "b"], "n": 2, "best_of": 3, "seed": 1},
            {"text": "b", "n": 2, "best_of": 3, "seed": 1},
        ),
        (completion, {"prompt": [1, 2]}, {"prompt_token_ids": [1, 2], "text": None}),
        (completion, {"prompt": [[1, 2], [3]]}, {"prompt_token_ids": [3], "text": None}),
        (completion, {"echo": True, "logprobs": 2}, {"logprobs": 2, "prompt_logprobs": 2}),
        (completion, {"logprobs": 2}, {"logprobs": 2, "prompt_logprobs": None}),
        (completion, {"echo": True, "max_tokens": 0, "logprobs": 0}, {"max_tokens": 1}),  # the engine needs one
        (completion, {"session_id": 7, "best_of": 2}, {"session_id": None}),
        (completion, {"cache_salt": "a", "prompt": ["x", "y"], "n": 2}, {"cache_salt": "a"}),
        (interactive, {"session_id": 3, "interactive_mode": True}, {"session_id": "3", **MODELS}),
        (interactive, {"session_id": 3, "interactive_mode": True}, {"interactive": True, "end_session": False}),
        (interactive, {"session_id": 3}, {"interactive": True, "end_session": True, "stream": False}),
        (interactive, {}, {"interactive": False, "end_session": False, "max_tokens": None}),
        (interactive, {"max_tokens": 5}, {"max_tokens": 5}),
        (interactive, {"max_tokens": 5, "request_output_len": 5}, {"max_tokens": 5}),
        (interactive, {"stop": "a"}, {"stop_words": ["a"]}),
        (interactive, {"stop": ["a", "b"]}, {"stop_words": ["a", "b"]}),
        (interactive, {"stop": False, "image_url": None}, {"stop_words": ()}),
    ],
)
def test_fields_reach_the_engine(make: Any, fields: dict[str, Any], sent: dict[str, Any]) -> None:
    body = make(**fields)
    requests = body.engine_requests() if make is completion else [body.engine_request()]
    assert {name: getattr(requests[-1], name) for name in sent} == sent
    assert make is not completion or len(requests) == len(body.prompt)


def test_a_cache_salt_is_a_text_that_is_bounded() -> None:
    for asked in (chat, interactive):
        assert asked().engine_request().cache_salt is None
        assert asked(cache_salt="ä" * 128).engine_request().cache_salt == "ä" * 128
        for wrong in ("", 7, "ä" * 129, ["a"], "x" * 10_000_000):
            with pytest.raises(ApiError, match="cache_salt"):
                asked(cache_salt=wrong)


@pytest.mark.parametrize(
    ("fields", "ends", "acts"),
    [
        *(({"prompt": prompt, "session_id": 3, "request_output_len": 0}, True, False) for prompt in ("", None, "x")),
        ({"session_id": 3, "max_tokens": 0}, True, False),
        ({"prompt": "", "session_id": 3, "cancel": True}, False, True),
        ({"prompt": "", "session_id": 3, "stop": True}, False, True),
    ],
)
def test_an_interactive_request_may_end_a_session_or_an_answer(fields: dict[str, Any], ends: bool, acts: bool) -> None:
    body = interactive(**fields)
    assert (body.ends, body.acts) == (ends, acts)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ""}, "prompt is missing"),
        ({"cancel": True}, "session_id is missing"),
        ({"stop": True, "cancel": True, "session_id": 1}, "cancel and stop are both true"),
        ({"request_output_len": 0}, "request_output_len = 0"),
        ({"request_output_len": 2, "max_tokens": 3}, "max_tokens = 3 and request_output_len = 2"),
        ({"max_tokens": -1}, "max_tokens = -1"),
        ({"session_id": 1.5}, "session_id"),
        ({"session_id": -1.0}, "session_id"),
        ({"prompt": False, "session_id": 3}, "prompt = false: send the user's text, or a list of messages"),
        ({"prompt": 0, "session_id": 3}, "prompt = 0: send the user's text, or a list of messages"),
        ({"prompt": {}, "session_id": 3}, "prompt = {}: send the user's text, or a list of messages"),
        ({"prompt": [], "session_id": 3}, "it has 0 entries: send at least 1"),
        ({"session_id": "x" * 257}, "at most 256 bytes"),
        ({"stop": 5}, "a string or a list"),
        ({"temperature": 3}, "send at most 2"),
        ({"image_url": "http://x/y.png"}, "image_url: models take texts only"),
    ],
)
def test_a_wrong_interactive_field_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ApiError) as caught:
        interactive(**fields)
    assert caught.value.status == 400
    assert says in caught.value.message


def test_a_tool_call_in_the_history_reaches_the_template() -> None:
    messages = chat(messages=[*USER, *ANSWERED], tools=[FUNCTION]).engine_request().messages
    assert messages is not None
    assert messages[1]["tool_calls"] == [CALL] and messages[2]["tool_call_id"] == "1"


def test_allowed_tools_force_calls_only_if_required() -> None:
    made = {mode: chat(tools=[FUNCTION], tool_choice=allowed(mode)) for mode in ("auto", "required")}
    assert {mode: body.engine_request().forces_calls for mode, body in made.items()} == {
        "auto": False,
        "required": True,
    }
    assert not any(body.names_function for body in made.values())


def test_only_answers_of_models_that_reason_are_parsed_without_tools() -> None:
    assert chat().engine_request(reasons=True).parsed is True
    assert [chat(tools=[STRICT], tool_choice=one).names_function for one in (FUNCTION, "required")] == [True, False]


def test_unknown_fields_are_named_when_they_fit_a_header() -> None:
    assert ignored_fields(chat(frobnicate=1, **{"x\r\ny": 2})) == ["frobnicate"]


def test_of_unknown_fields_nothing_large_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: set[str] = set()
    monkeypatch.setattr(body, "_warned", warned)
    request = chat(**{"a" * 1_000_000: 1, "a" * 1_000_001: [1, 2]}, metadata={"b": "c"})
    assert ignored_fields(request) == []
    assert not warned
    assert not request.model_extra and request.metadata is None


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"z": [[]] * (MAX_VALUES // 6)}, True),
        ({"z": [1] * (MAX_VALUES - 100)}, True),
        ({"z": {str(key): 1 for key in range(MAX_VALUES // 4)}}, False),
        ({"z": [[]] * MAX_VALUES}, False),
        ({"z": [{}] * MAX_VALUES}, False),
        ({"z": [""] * (2 * MAX_VALUES)}, False),
        ({"messages": "[," * MAX_VALUES}, True),
        ({"messages": '\\",{' * MAX_VALUES, "z": "\\"}, True),
        ({"messages": "\\", "z": [[]] * MAX_VALUES}, False),
    ],
)
def test_a_body_has_no_more_values_than_its_lists_may_have(fields: dict[str, object], fits: bool) -> None:
    if fits:
        chat(**fields)
    else:
        with pytest.raises(ApiError, match="too many values: send at most 524288") as caught:
            chat(**fields)
        assert caught.value.status == 400


@pytest.mark.parametrize("calls", [1, 2])
def test_the_arguments_of_all_calls_have_no_more_values_than_a_body(calls: int) -> None:
    def history(arguments: str) -> list[dict[str, Any]]:
        called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}] * calls
        return [{"role": "assistant", "tool_calls": called}, {"role": "user", "content": "x"}]

    chat(messages=history(json.dumps({"a": "[," * MAX_VALUES})))
    with pytest.raises(ApiError, match="arguments have too many values: send at most 524288") as caught:
        chat(messages=history(json.dumps({"a": [[]] * (MAX_VALUES // 2 // calls)})))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "send at most 2"),
        ({"temperature": "1"}, "temperature", "send a number"),
        ({"temperature": math.nan}, "temperature", "send a finite number"),
        ({"temperature": math.inf}, "temperature", "send a finite number"),
        ({"top_p": -0.1}, "top_p", "send at least 0"),
        ({"max_tokens": 0}, "max_tokens", "send at least 1"),
        ({"session_id": True}, "session_id", "a whole number"),
        ({"renew_session": True}, "renew_session", "needs a session_id"),
        ({"timeout": 0}, "timeout", "send more than 0"),
        ({"max_tokens": 1.5}, "max_tokens", "send a whole number"),
        ({"max_tokens": True}, "max_tokens", "send a whole number"),
        ({"max_tokens": 10**400}, "max_tokens", "send at most 2147483647"),
        ({"n": 129}, "n", "send at most 128"),
        ({"seed": 2**64}, "seed", "send at most"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": 5}, "stop", "a string or a list"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "is not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias", "from -100 to 100"),
        ({"messages": []}, "messages", "messages = []: it has 0 entries: send at least 1"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "'image_url'"),
        ({"messages": 5}, "messages", "messages = 5: send the user's text, or a list of messages"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs = true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "send at most 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true only"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "any", "tools": [FUNCTION]}, "tool_choice", '= "any": send "auto", "none", "required", {'),
        ({"tool_choice": allowed("none"), "tools": [FUNCTION]}, "tool_choice", 'its mode, "auto" or "required"'),
        ({"tool_choice": allowed("auto", "g"), "tools": [FUNCTION]}, "tool_choice", "names 'g', which is not"),
        ({"tool_choice": allowed("auto", None), "tools": [FUNCTION]}, "tool_choice", "entry 0 of tools is not"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function"}, "tools": [FUNCTION]}, "tool_choice", 'send "auto"'),
        (tool(name="f", strict="yes"), "tools", "true or false"),
        (
            tool(name="Get weather"),
            "tools",
            "the name of function 0, 'Get weather', is not valid: send 1 to 64 characters of a-z, A-Z, 0-9, _, - and .",
        ),
        (tool(name="f" * 65), "tools", f"'{'f' * 65}', is not valid"),
        (tool(name="f" * 99), "tools", "f'... (99 characters), is not"),
        (tool(name="f\n"), "tools", r"'f\n', is not valid"),
        (tool(name=""), "tools", "'', is not valid"),
        (tool(), "tools", "the name of function 0 is missing: send 1 to 64"),
        (tool(name=1), "tools", "the name of function 0 is not a string"),
        ({"tools": [{**FUNCTION, "strict": True}]}, "tools", "function f: strict is next to function, where it has no"),
        (
            tool(name="f", parameters={"strict": True}),
            "tools",
            "function f: strict is within parameters, where it has no effect: send it next to parameters",
        ),
        (tool(name="f", input_schema={}), "tools", "function f: input_schema is called parameters here"),
        (tool(name="f", parameters=[]), "tools", "function f: parameters is neither null nor an object"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "two functions are called 'f': give each function its own name"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format",
            """'schema' is not a field of it; its fields are json_schema, type: to give a schema, send {"type":""",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}},
            "response_format.json_schema",
            "with the whole JSON schema in schema",
        ),
        (
            {"regex": "a+"},
            "regex",
            "regex is not a field of this route, so the response would not be constrained: send resp",
        ),
        ({"guided_json": {}}, "guided_json", 'structured_outputs has replaced it: send {"json": ...} there'),
        ({"guided_choice": ["a"]}, "guided_choice", 'send {"choice": ...}'),
        ({"functions": []}, "functions", "the older form of tools: send tools"),
        ({"function_call": "auto"}, "function_call", "the older form of tool_choice"),
        ({"audio": {}}, "audio", "answers are text"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "need each other"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "need each other"),
        ({"structured_outputs": {}}, "structured_outputs", "and not none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "not regex and choice"),
        ({"structured_outputs": {"json": True}}, "structured_outputs.json", "send a JSON object, or its text"),
        ({"structured_outputs": {"regex": "a", "lark": "b"}}, "structured_outputs.lark", "structured_outputs.lark"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "send at least 1"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "send one of them",
        ),
        ({"skip_special_tokens": False}, "skip_special_tokens", "send true"),
    ],
)
def test_wrong_chat_field_is_named_with_the_remedy(fields: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param), error.message
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide("json")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, Guide("json")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"é": 1}, "strict": True},
                }
            },
            Guide("json_schema", '{"é": 1}'),
        ),
        ({"structured_outputs": {"json": {"type": "null"}}}, Guide("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"json": '{"type":"null"}'}}, Guide("json_schema", '{"type":"null"}')),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Guide("json")),
        ({"structured_outputs": {"regex": "a+"}}, Guide("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Guide("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Guide("ebnf_grammar", 'root ::= "a"')),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, Guide("structural_tag", '{"format": {}}')),
    ],
)
def test_structured_output_is_the_engines_guide(fields: dict[str, object], guide: Guide | None) -> None:
    assert chat(**fields).engine_request().guide == guide


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [1, "two"]}, "prompt", "entry 1 is not a token id"),
        ({"prompt": [[1], "two"]}, "prompt", "send a string, a list of strings"),
        ({"prompt": [[1], []]}, "prompt", "none of them empty"),
        ({"prompt": [True]}, "prompt", "send a string"),
        ({"prompt": [1, True]}, "prompt", "entry 1 is not a token id"),
        ({"prompt": [-1]}, "prompt", "entry 0 is not a token id"),
        ({"prompt": [2**31]}, "prompt", "whole numbers from 0 on"),
        ({"prompt": []}, "prompt", "a string, a list of strings"),
        ({"prompt": {"a": 1}}, "prompt", "a string, a list of strings"),
        ({"n": 3, "best_of": 2}, "best_of", "less than n = 3"),
        ({"best_of": 3, "stream": True}, "best_of", "do not stream"),
        ({"max_tokens": 0}, "max_tokens", "echo = true only"),
        ({"prompt": ["a", "b"], "session_id": 1}, "session_id", "not one conversation"),
        ({"suffix": "x"}, "suffix", "leave suffix out"),
        ({"model": None}, "model", "send a text"),
    ],
)
def test_wrong_completion_field_is_named_with_the_remedy(fields: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param), caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b'{"model": "\\ud800"}', b'{"model": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"7"],
)
def test_body_that_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, body)
    assert caught.value.status == 400


MANY, OBJECTS = 150_000, 30_000


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        (ChatRequest, {"messages": [1] * MANY}, "messages[0] is not a JSON object"),
        (ChatRequest, {"messages": [{"role": "user", "content": ""}] * OBJECTS}, "send at most 10000 entries"),
        (ChatRequest, {"messages": USER, "tools": [1] * 1000}, "tools: tool 0 is not a function"),
        (ChatRequest, {"messages": USER, "tools": [{}] * OBJECTS}, "at most 1000 functions"),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}, "messages[0].tool_calls[0] = 1"),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * OBJECTS}]}, "send at most 1000 entries"),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}, f"{MANY} parts are too many"),
        (ChatRequest, {"messages": USER, "logit_bias": {str(token): 1 for token in range(70_000)}}, "at most 65536"),
        (ChatRequest, {"messages": USER, "temperature": [[1] * MANY]}, "temperature = [[1, 1, 1,"),
        (
            ChatRequest,
            {"messages": USER, "bad_words": ["a"] * MANY},
            f"{MANY} bad words are too many: send at most 1000",
        ),
        (ChatRequest, {"messages": USER, "bad_words": ["a" * 1000] * 66}, "66000 bytes in all: send at most 65536"),
        (ChatRequest, {"messages": USER, "chat_template_kwargs": {"x": [[1]] * 5000}}, "too many values: send at most"),
        (InteractiveRequest, {"prompt": [1] * MANY}, "prompt[0] is not a JSON object"),
        (InteractiveRequest, {"prompt": [{"role": "user", "content": ""}] * OBJECTS}, "send at most 10000 entries"),
    ],
)
def test_a_long_list_is_refused_at_its_first_error(
    model: type[ChatRequest] | type[InteractiveRequest], fields: dict[str, object], says: str
) -> None:
    """This blocks the event loop: an error for each entry would take seconds."""
    with pytest.raises(ApiError) as caught:
        parse(model, json.dumps({"model": "m", **fields}).encode())
    assert caught.value.status == 400
    assert says in caught.value.message and "more" not in caught.value.message
    assert len(caught.value.message) < 300


def test_answers_are_counted_before_requests_are_made_of_them() -> None:
    assert chat().choices_made == 1 and chat(n=3).choices_made == 3
    assert completion(prompt=["a", "b"]).choices_made == 2
    assert completion(prompt=["a", "b"], n=2, best_of=3).choices_made == 6


def test_a_missing_field_has_openais_code() -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, b'{"model": "m"}')
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (BadRequest("max_tokens = -1 is out of range: it must be >= 1"), 400, "invalid_value", "max_tokens"),
        (BadRequest("text_input: empty; send at least one character"), 400, "invalid_value", "prompt"),
        (BadRequest("messages[0].content: missing; send it"), 400, "invalid_value", "messages[0].content"),
        (
            BadRequest("the prompt does not fit: it has 9 tokens and the context (session_len) holds 8"),
            400,
            "context_length_exceeded",
            None,
        ),
        (
            BadRequest("prompt and max_tokens do not fit: 9 and 8 make 17, and the context (session_len) holds 16"),
            400,
            "context_length_exceeded",
            None,
        ),
        (Overloaded("full", 2.2), 429, "overloaded", None),
        (Unavailable("away"), 503, "service_unavailable", None),
        (DeadlineExceeded("late"), 504, "deadline_exceeded", None),
        (ServerError("broken"), 500, "engine_error", None),
    ],
)
def test_status_of_the_engines_errors(error: Exception, status: int, code: str, param: str | None) -> None:
    answer = from_engine(error)  # type: ignore[arg-type]
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    if status == 429:
        assert answer.headers["Retry-After"] == "3"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            Unavailable("Triton at 10.0.0.7:8001 cannot be reached or went away: ipv4:10.0.0.7:8001: refused"),
            "the server cannot be reached or went away",
        ),
        (Unavailable("no server can take requests: 10.0.0.7:8001: it is away"), "no server can take requests"),
        (Unavailable("endpoint 10.0.0.7:8001 is down: Triton at 10.0.0.7:8001 is away"), "the server went down"),
        (Unavailable("model 'm' of Triton at 10.0.0.7:8001 is not ready"), "the server is not ready"),
        (
            DeadlineExceeded("Triton at 10.0.0.7:8001 did not answer in time (2 s)"),
            "the server did not answer in time (2 s)",
        ),
        (ServerError("10.0.0.7:8001 is not a Triton server: 10.0.0.7"), "the server is not a Triton server"),
        (Unavailable("the engine is shutting down"), "the engine is shutting down"),
    ],
)
def test_addresses_of_servers_are_only_in_the_log(
    error: CharoniaError, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert from_engine(error).message == says
    assert caplog.messages == ([] if str(error) == says else [f"a request failed: {error}"])


def answer_with_logprobs() -> GenerateResponse:
    """a, then é in two tokens, then the end token."""
    response = GenerateResponse(" aé", (1, 2, 3, 4), logprobs=(-0.5, -1.0, -math.inf, -2.0))
    response.token_bytes, response.text_span = (b" a", b"\xc3", b"\xa9", b""), (0, 4)
    response.top_logprobs = [[TopToken(1, -0.5, b" a"), TopToken(4, -3.0, b"<|end|>")]] * 4
    return response


def test_chat_logprobs_join_to_the_text() -> None:
    entries = list(chat_logprobs(answer_with_logprobs()))
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == " aé"
    assert [entry["token"] for entry in entries] == [" a", "\\xc3", "\\xa9"]
    assert entries[2]["logprob"] == -9999.0
    assert [top["token"] for top in entries[0]["top_logprobs"]] == [" a", "<|end|>"]


def test_completion_logprobs_offsets_count_characters_over_the_stream() -> None:
    logprobs = CompletionLogprobs()
    first = logprobs.of(answer_with_logprobs())
    assert first["tokens"] == [" a", "bytes:\\xc3", "bytes:\\xa9"]
    assert first["text_offset"] == [0, 2, 2]
    assert first["top_logprobs"][0] == {" a": -0.5, "<|end|>": -3.0}
    assert logprobs.of(answer_with_logprobs())["text_offset"] == [3, 5, 5]


def test_offsets_count_bytes_that_are_no_character() -> None:
    """Each replacement character counts as one character of the text."""
    response = GenerateResponse("", (1,) * 6, logprobs=(-1.0,) * 6, top_logprobs=[[]] * 6)
    response.token_bytes = (b"\xa9", b"a\xc3", b"b", b"\xe4\xb8", b"\xad\xff", b"c")
    response.text_span = (0, 9)
    assert b"".join(response.tokens).decode(errors="replace") == "\ufffda\ufffdb\u4e2d\ufffdc"
    assert CompletionLogprobs().of(response)["text_offset"] == [0, 1, 3, 4, 4, 6]


def prompt_part(tokens: list[bytes], special: list[bool]) -> GenerateResponse:
    """Return a prompt's tokens with -1, -2 ... as log probabilities, and themselves as the most likely tokens."""
    count = len(tokens)
    part = GenerateResponse("x", prompt_ids=tuple(range(count)))
    part.prompt_tokens, part.prompt_special = tokens, special
    part.prompt_logprobs = tuple(-float(at) for at in range(1, count))
    part.prompt_top_logprobs = [[TopToken(at, -float(at), tokens[at])] for at in range(1, count)]
    return part


def test_an_echos_log_probabilities_begin_with_null() -> None:
    logprobs = CompletionLogprobs()
    shown = logprobs.of_prompt(prompt_part([b"Hi", b" \xc3", b"\xa9"], [False] * 3), "Hi é")
    assert shown["tokens"] == ["Hi", "bytes:\\x20\\xc3", "bytes:\\xa9"]
    assert shown["token_logprobs"] == [None, -1.0, -2.0]
    assert shown["top_logprobs"][0] is None and len(shown["top_logprobs"]) == 3
    assert shown["text_offset"] == [0, 2, 3]
    assert logprobs.of(answer_with_logprobs())["text_offset"] == [4, 6, 6]


def test_added_special_tokens_are_not_in_the_echo() -> None:
    """A beginning token and a leading space are omitted, but a special token in the prompt is not."""
    part = prompt_part([b"<s>", b" Hi", b"<s>", b"!"], [True, False, True, False])
    shown = CompletionLogprobs().of_prompt(part, "Hi<s>!")
    assert shown["tokens"] == ["Hi", "<s>", "!"]
    assert shown["token_logprobs"] == [-1.0, -2.0, -3.0]
    assert shown["text_offset"] == [0, 2, 5]


def test_every_token_of_a_prompt_that_was_sent_as_tokens_is_in_its_echo() -> None:
    """A client finds each of its tokens at its position. Tokens of the response count, although they add no text."""
    part = prompt_part([b"<s>", b" Hi", b"", b"!"], [True, False, False, False])
    logprobs = CompletionLogprobs(every=True)
    shown = logprobs.of_prompt(part, "<s> Hi!", exact=True)
    assert shown["tokens"] == ["<s>", " Hi", "", "!"]
    assert shown["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    answer = GenerateResponse("x", (1, 2), "stop", logprobs=(-1.0, -2.0), top_logprobs=[[], []])
    answer.token_bytes, answer.text_span = (b"x", b""), (0, 1)
    shown = logprobs.of(answer)
    assert (shown["tokens"], shown["token_logprobs"], shown["text_offset"]) == (["x", ""], [-1.0, -2.0], [7, 8])
    assert CompletionLogprobs().of(answer)["tokens"] == ["x"]


def test_a_prompt_of_one_token_has_no_log_probability() -> None:
    shown = CompletionLogprobs().of_prompt(prompt_part([b"a"], [False]), "a")
    assert shown == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}


async def test_requests_before_a_drain_are_answered_before_the_server_ends() -> None:
    """A loop that was busy when the drain began has not read or accepted the connection."""
    drain = Drain(5)
    server = DrainingServer(uvicorn.Config(FastAPI()), drain)
    ended = [await server.on_tick(1)]
    drain.begin()
    ended.append(await server.on_tick(1))
    drain.running = 1
    ended.append(await server.on_tick(1))
    drain.running = 0
    ended += [await server.on_tick(1), await server.on_tick(1)]
    assert ended == [False, False, False, False, True]


def test_a_tokenizer_may_have_several_chat_templates() -> None:
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"))
    for template in (None, "one", {"default": "one", "tool_use": "two"}):
        info = {"tokenizer_class": "T", **names, "chat_template": template}
        assert TokenizerInfo.model_validate(info).model_dump() == info


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", "json"),
        ("output_format", {"type": "json_schema", "schema": {}}),
        ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
        ("text", {"format": {"type": "json_object"}}),
        ("chat_template", "{{ messages }}"),
    ],
)
def test_fields_of_other_routes_and_servers_are_rejected_in_chats(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)
    assert chat(**{name: None}) and chat(text={"verbosity": "low"}, output_config={"effort": "low"})


def test_chat_request_says_where_the_prompt_ends() -> None:
    for fields, continues, variables in (
        ({}, False, None),
        ({"add_generation_prompt": True, "continue_final_message": False}, False, None),
        ({"add_generation_prompt": False}, False, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, True, None),
        ({"add_generation_prompt": False, "continue_final_message": True}, True, None),
    ):
        made = chat(**fields).engine_request()
        assert (made.continue_final_message, made.chat_template_kwargs) == (continues, variables), fields
    with pytest.raises(ApiError, match="send one of them"):
        chat(add_generation_prompt=True, continue_final_message=True)


def test_errors_of_the_engine_name_the_fields_of_the_request() -> None:
    messages = {"model": "m", "max_tokens": 5, "messages": USER}
    responses = {"model": "m", "input": "hi"}
    guided = {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}
    fits = "prompt and max_tokens do not fit: 12 prompt tokens and max_tokens = 9 make 21, and session_len is 5"
    for asked, text, param, said in (
        (chat(max_completion_tokens=9), fits, None, "prompt and max_completion_tokens do not fit"),
        (chat(max_tokens=9), fits, None, "prompt and max_tokens do not fit"),
        (ResponsesRequest(**responses), fits, None, "prompt and max_output_tokens do not fit"),
        (ResponsesRequest(**responses), "messages: no", "input", "input: no"),
        (MessagesRequest(**messages), "stop_words[1]: no", "stop_sequences[1]", "stop_sequences[1]: no"),
        (MessagesRequest(**messages), "continue_final_message: no", "messages", "messages: no"),
        (chat(), "stop_words[1]: no", "stop[1]", "stop[1]: no"),
        (ResponsesRequest(**responses), "guided_decoding_guide: no", "text.format", "text.format: no"),
        (MessagesRequest(**messages, **guided), "guided_decoding_guide: no", "output_config.format", "output_config"),
        (InteractiveRequest(prompt="hi"), "messages: no", "prompt", "prompt: no"),
        (InteractiveRequest(prompt="hi"), "max_tokens = 0 is", "request_output_len", "request_output_len = 0 is"),
    ):
        error = from_engine(BadRequest(text), asked.engine_names)
        assert error.param == param and error.message.startswith(said)


@pytest.mark.parametrize("name", ["response_format", "structured_outputs", "guided_json", "regex", "grammar"])
def test_constraints_without_effect_on_a_route_are_rejected(name: str) -> None:
    """Otherwise only the header of ignored fields would show that the response is not constrained."""
    value = {"type": "json_object"}
    for model, fields in (
        (InteractiveRequest, {"prompt": "hi"}),
        (MessagesRequest, {"model": "m", "max_tokens": 5, "messages": USER}),
        (ResponsesRequest, {"model": "m", "input": "hi"}),
    ):
        with pytest.raises(ApiError, match="is not a field of this route, so the response would not be ") as caught:
            parse(model, json.dumps({**fields, name: value}).encode())
        assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "invalid_value")
        for free in (None, {"type": "text"}):
            assert parse(model, json.dumps({**fields, name: free}).encode())
