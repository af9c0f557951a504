"""Each remedy that an error names is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from stack import HANG_S, Stack

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "Hello"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {}}}}
FUNCTION: dict[str, Any] = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {"name": "f", "parameters": UNSUPPORTED, "strict": True}}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
PATHS = {
    "chat": "/v1/chat/completions",
    "text": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "session": "/v1/chat/interactive",
    "tokenize": "/tokenize",
}
REQUIRED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "max_tokens": 40},
    "text": {"prompt": "Hi", "max_tokens": 8},
    "messages": {"messages": [USER], "max_tokens": 40},
    "responses": {"input": "Hi", "max_output_tokens": 40},
    "session": {"prompt": "Hi", "request_output_len": 8},
    "tokenize": {"messages": [USER]},
}
Fields = dict[str, Any]
# A route and wrong fields; a part of the error; the fields that the error advises. None removes a field.
CASES: list[tuple[str, Fields, str, list[Fields]]] = [
    (
        "chat",
        {"messages": 1},
        "send the user's text, or a list of messages",
        [{"messages": "Hi"}, {"messages": [USER]}],
    ),
    ("chat", {"messages": [{"role": "user"}]}, "send the message's text", [{"messages": [USER]}]),
    ("chat", {"n": 0}, "send at least 1", [{"n": 1}]),
    ("chat", {"temperature": 3}, "send at most 2", [{"temperature": 2}]),
    ("chat", {"stop": [""]}, "a list of at most 4 strings, none of them empty", [{"stop": ["x"]}, {"stop": "x"}]),
    (
        "chat",
        {"stream_options": {}},
        "leave it out or send stream = true",
        [{"stream_options": None}, {"stream": True}],
    ),
    ("chat", {"top_logprobs": 2}, "needs logprobs = true", [{"logprobs": True}]),
    ("chat", {"renew_session": True}, "needs a session_id", [{"session_id": "remedies"}]),
    ("chat", {"functions": [FUNCTION]}, "send tools", [{"functions": None, "tools": [TOOL]}]),
    ("chat", {"function_call": "auto"}, "send tool_choice", [{"function_call": None, "tool_choice": "auto"}]),
    ("chat", {"tool_choice": "required"}, "needs tools", [{"tools": [TOOL]}]),
    (
        "chat",
        {"tools": [TOOL], "tool_choice": "f"},
        'send "auto", "none", "required", {"type": "function", "function": {"name": ...}} or',
        [{"tool_choice": one} for one in ("auto", "none", "required", {"type": "function", "function": {"name": "f"}})],
    ),
    ("chat", {"tools": [TOOL, TOOL]}, "give each function its own name", [{"tools": [TOOL]}]),
    ("chat", {"tools": [{"type": "function", **FUNCTION}]}, '{"type": "function", "function"', [{"tools": [TOOL]}]),
    (
        "chat",
        {"tools": [STRICT], "tool_choice": "required"},
        "at /properties/a: ",
        [{"tools": [{"type": "function", "function": {"name": "f", "parameters": UNSUPPORTED}}]}],
    ),
    (
        "chat",
        {"tools": [TOOL], "structured_outputs": {"regex": "<tool_call>"}},
        "send tool_choice = none, or no tools",
        [{"tool_choice": "none"}, {"tools": None}],
    ),
    (
        "chat",
        {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"structural_tag": {"format": {}}}},
        "send one of them",
        [{"structured_outputs": None}],
    ),
    (
        "chat",
        {"guided_json": SCHEMA},
        'structured_outputs has replaced it: send {"json": ...} there',
        [{"guided_json": None, "structured_outputs": {"json": SCHEMA}}],
    ),
    ("chat", {"format": SCHEMA}, "send response_format, or", [{"format": None, "response_format": JSON}]),
    (
        "chat",
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": true}}',
        [{"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}}],
    ),
    (
        "chat",
        {"response_format": JSON, "structured_outputs": {"json_object": True}},
        "send one of them",
        [{"structured_outputs": None}, {"response_format": None, "structured_outputs": {"json": SCHEMA}}],
    ),
    ("chat", {"response_format": JSON, "ignore_eos": True}, "leave them out", [{"ignore_eos": None}]),
    ("chat", {"response_format": JSON, "min_tokens": 2}, "leave them out", [{"min_tokens": None}]),
    (
        "chat",
        {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
        "send one of them",
        [{"add_generation_prompt": None}, {"continue_final_message": None}],
    ),
    ("chat", {"continue_final_message": True}, "unfinished response last", [{"messages": [USER, BEGUN]}]),
    (
        "chat",
        {"messages": [USER, BEGUN], "continue_final_message": True, "tools": [TOOL], "tool_choice": "required"},
        "leave one of them out",
        [{"tool_choice": None}, {"continue_final_message": None}],
    ),
    (
        "chat",
        {"messages": [USER, BEGUN], "continue_final_message": True, "response_format": JSON},
        "leave one of them out",
        [{"response_format": None}, {"continue_final_message": None}],
    ),
    ("chat", {"chat_template": "{{ 1 }}"}, "leave chat_template out", [{"chat_template": None}]),
    ("chat", {"chat_template_kwargs": {"tools": []}}, "remove it", [{"chat_template_kwargs": None}]),
    (
        "chat",
        {"modalities": ["audio"]},
        'send ["text"], or leave it out',
        [{"modalities": ["text"]}, {"modalities": None}],
    ),
    ("chat", {"logit_bias": {"a": 1}}, "keys are whole numbers from 0 on", [{"logit_bias": {"0": 1}}]),
    ("chat", {"logit_bias": {"99999999": 1}}, "send token ids from 0 to", [{"logit_bias": {"1": 1}}]),
    ("text", {"max_tokens": 0}, "send at least 1", [{"max_tokens": 1}, {"echo": True}]),
    ("text", {"n": 3, "best_of": 2}, "send at least n", [{"best_of": 3}]),
    (
        "text",
        {"best_of": 2, "stream": True},
        "leave it out or do not stream",
        [{"best_of": None}, {"stream": False}],
    ),
    ("text", {"suffix": "x"}, "leave suffix out", [{"suffix": None}]),
    ("text", {"tools": [TOOL]}, "leave it out", [{"tools": None}]),
    (
        "text",
        {"prompt": ["a", "b"], "session_id": "remedies"},
        "send one prompt or no session",
        [{"prompt": "a"}, {"session_id": None}],
    ),
    ("text", {"output_format": JSON}, "send response_format, or", [{"output_format": None, "response_format": JSON}]),
    ("messages", {"tool_choice": "any"}, '{"type": "auto"}', [{"tool_choice": {"type": "auto"}}]),
    ("messages", {"tools": [FUNCTION]}, "input_schema", [{"tools": [{"name": "f", "input_schema": SCHEMA}]}]),
    (
        "messages",
        {"response_format": JSON},
        "output_config",
        [{"response_format": None, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}],
    ),
    ("messages", {"messages": [BEGUN]}, "send the user's message before it", [{"messages": [USER, BEGUN]}]),
    (
        "messages",
        {"messages": [USER, BEGUN], "thinking": {"type": "adaptive"}},
        "leave out thinking or the message",
        [{"thinking": None}, {"messages": [USER]}],
    ),
    ("messages", {"thinking": {"type": "on"}}, '{"type": "adaptive"}', [{"thinking": {"type": "adaptive"}}]),
    ("responses", {"messages": [USER]}, "send input", [{"messages": None}]),
    ("responses", {"max_tokens": 4}, "send max_output_tokens", [{"max_tokens": None}]),
    ("responses", {"background": True, "store": False}, "or leave store out", [{"background": None}, {"store": None}]),
    (
        "responses",
        {"top_logprobs": 1},
        "needs include = ['message.output_text.logprobs']",
        [{"include": ["message.output_text.logprobs"]}],
    ),
    ("responses", {"truncation": "auto"}, 'send "disabled"', [{"truncation": "disabled"}]),
    ("responses", {"conversation": "c"}, "send previous_response_id", []),
    (
        "responses",
        {"previous_response_id": "resp_no"},
        "send the conversation as input",
        [{"previous_response_id": None}],
    ),
    (
        "responses",
        {"response_format": JSON},
        'send text = {"format": {"type": "json_schema", "name": ..., "schema": {...}}}',
        [{"response_format": None, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}}],
    ),
    ("responses", {"input": [USER, BEGUN]}, "end with the user's message", [{"input": [USER]}]),
    ("session", {"stop": True}, "name the session", [{"session_id": "remedies"}]),
    ("session", {"request_output_len": 0}, "send at least 1", [{"request_output_len": 1}, {"session_id": "remedies"}]),
    ("session", {"prompt": None}, "send the user's text or messages", [{"prompt": "Hi"}, {"prompt": [USER]}]),
    ("tokenize", {"prompt": "a"}, "send exactly one of prompt and messages", [{"prompt": None}, {"messages": None}]),
    (
        "tokenize",
        {"messages": None, "prompt": "a", "tools": [TOOL]},
        "send messages instead of prompt",
        [{"prompt": None, "messages": [USER]}],
    ),
]
# The remedy is another route.
ELSEWHERE: list[tuple[str, Fields, str, str, Fields]] = [
    ("text", {"tool_choice": "auto"}, "send it to /v1/chat/completions", "chat", {"tool_choice": "auto"}),
    ("session", {"format": SCHEMA}, "send response_format to /v1/chat", "chat", {"response_format": JSON}),
    ("responses", {"stop": ["x"]}, "or stop to /v1/chat/completions", "chat", {"stop": ["x"]}),
    (
        "responses",
        {"input": [USER, BEGUN]},
        "continue_final_message = true to /v1/chat/completions",
        "chat",
        {"messages": [USER, BEGUN], "continue_final_message": True},
    ),
]


@pytest.fixture(scope="module")
def web(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.gateway, timeout=HANG_S, trust_env=False) as client:
        yield client


def send(web: httpx.Client, model: str, kind: str, *changes: Fields) -> httpx.Response:
    body = {"model": model, **REQUIRED[kind]}
    for change in changes:
        body |= change
    return web.post(PATHS[kind], json={name: value for name, value in body.items() if value is not None})


def check_error(answer: httpx.Response, advice: str) -> None:
    assert answer.status_code == 400, answer.text
    assert advice in json.loads(answer.text)["error"]["message"]


@pytest.mark.parametrize(("kind", "wrong", "advice", "remedies"), CASES)
def test_remedy_of_error_is_accepted(
    web: httpx.Client, model: str, kind: str, wrong: Fields, advice: str, remedies: list[Fields]
) -> None:
    check_error(send(web, model, kind, wrong), advice)
    for remedy in remedies:
        followed = send(web, model, kind, wrong, remedy)
        assert followed.status_code == 200, (remedy, followed.text)


@pytest.mark.parametrize(("kind", "wrong", "advice", "other", "remedy"), ELSEWHERE)
def test_route_that_an_error_names_accepts_the_request(
    web: httpx.Client, model: str, kind: str, wrong: Fields, advice: str, other: str, remedy: Fields
) -> None:
    check_error(send(web, model, kind, wrong), advice)
    followed = send(web, model, other, remedy)
    assert followed.status_code == 200, followed.text
