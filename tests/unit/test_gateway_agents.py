"""Requests as agents send them. Fields without a meaning here are ignored, and the conversation goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_requests import earlier_turns, engine_request, read, recorded
from charonia_gateway.body import ignored_fields, parse, read_body
from charonia_gateway.errors import ApiError
from charonia_gateway.schemas.messages import MessagesRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.requests import ChatRequest
from charonia_gateway.schemas.response_input import conversation
from fastapi import Request

USER = {"role": "user", "content": "a"}
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION = {"type": "function", "name": "get", "parameters": PARAMETERS}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def responses(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", "input": "a", **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": None, "tool_choice": "auto"},
        {"logprobs": False, "top_logprobs": 0},
        {"top_logprobs": 0},
        {"seed": -1},
    ],
)
def test_fields_that_mean_nothing_are_accepted(fields: dict[str, Any]) -> None:
    request = chat(**fields).engine_request()
    assert (request.tools, request.tool_choice, request.logprobs, request.seed) == (None, None, None, None)


@pytest.mark.parametrize("message", [{"tool_calls": []}, {"content": None}, {"content": []}, {"tool_calls": None}])
def test_assistant_message_may_be_empty(message: dict[str, Any]) -> None:
    assert chat(messages=[USER, {"role": "assistant", **message}, USER]).engine_request().messages


def test_tools_that_are_not_functions_are_ignored_and_named() -> None:
    others = [{"type": "custom", "name": "c"}, {"type": "web_search"}, {"type": "bad\r\ntype"}]
    request = responses(tools=[others[0], FUNCTION, *others[1:]], tool_choice="auto")
    assert [tool["function"]["name"] for tool in request.functions() or ()] == ["get"]
    assert ignored_fields(request) == ["tools[0] (custom)", "tools[2] (web_search)", "tools[3] (bad??type)"]
    assert responses(tools=others).functions() is None
    function = {"type": "function", "function": {"name": "get"}}
    completion = chat(tools=[others[0], function])
    assert completion.engine_request().tools == [function] and ignored_fields(completion) == ["tools[0] (custom)"]
    claude = {"model": "m", "max_tokens": 1, "messages": [USER]}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "get", "input_schema": PARAMETERS}]
    message = parse(MessagesRequest, json.dumps({**claude, "tools": tools}).encode())
    assert [tool["function"]["name"] for tool in message.offered_tools or ()] == ["get"]
    assert ignored_fields(message) == ["tools[0] (web_search_20250305)"]
    with pytest.raises(ApiError, match="tool_choice needs tools"):
        responses(tools=others, tool_choice="required")
    for wrong in ({"type": "functions", "name": "f"}, {"type": 5}):
        with pytest.raises(ApiError, match="tool 0"):
            responses(tools=[wrong])
    for kind in ("function", "web_search", 5, ""):
        with pytest.raises(ApiError, match="tool 0 is of type"):
            parse(MessagesRequest, json.dumps({**claude, "tools": [{"type": kind, "name": "f"}]}).encode())


SPACE = {"type": "namespace", "name": "mcp__notes", "tools": [FUNCTION, {"type": "custom", "name": "c"}]}


def test_the_functions_of_a_namespace_are_offered() -> None:
    request = responses(tools=[FUNCTION, SPACE, {**SPACE, "name": "other__"}, {"type": "web_search"}])
    assert [tool["function"]["name"] for tool in request.functions() or ()] == ["get", "mcp__notes__get", "other__get"]
    assert ignored_fields(request) == [
        "tools[3] (web_search)",
        "tools[1].tools[1] (custom)",
        "tools[2].tools[1] (custom)",
    ]
    forced = responses(tools=[SPACE], tool_choice={"type": "function", "name": "mcp__notes__get"})
    assert forced.engine_request([USER], None, reasons=False).tool_choice["function"]["name"] == "mcp__notes__get"
    for wrong in ({"name": "a b"}, {"tools": None}, {"tools": [{"type": 5}]}, {"tools": [{**FUNCTION, "name": ""}]}):
        with pytest.raises(ApiError, match="tools: "):
            responses(tools=[{**SPACE, **wrong}])
    with pytest.raises(ApiError, match="two functions are called 'mcp__notes__get'"):
        responses(tools=[SPACE, SPACE])


def test_a_call_of_a_namespace_is_in_the_history_under_the_offered_name() -> None:
    call = {"type": "function_call", "call_id": "1", "namespace": "mcp__notes", "name": "get", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "x"}
    (turn, result) = conversation((), responses(input=[call, output]).input)
    assert turn["tool_calls"][0]["function"]["name"] == result["name"] == "mcp__notes__get"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "read"}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([*CALLED, {**RESULT, "content": [IMAGE, {"type": "new_kind"}]}], "messages[2] (image_url+new_kind)"),
        ([*CALLED, RESULT, {"role": "user", "content": [IMAGE]}], "messages[3] (image_url)"),
        (
            [{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "a"}, USER],
            "messages[0] (image_url)",
        ),
    ],
)
def test_an_image_of_a_tool_or_of_an_earlier_turn_is_named(messages: Any, named: str) -> None:
    request = chat(messages=messages)
    assert ignored_fields(request) == [named]
    assert "[image_url: this model reads only text]" in str(request.engine_request().messages)


@pytest.mark.parametrize("before", [[], [*CALLED, RESULT, {"role": "assistant", "content": "a"}]])
def test_an_image_in_a_new_message_is_rejected(before: Any) -> None:
    with pytest.raises(ApiError, match="part 0 is of type 'image_url': this model takes"):
        chat(messages=[*before, {"role": "user", "content": [IMAGE]}])


@pytest.mark.parametrize(("name", "path", "body"), list(recorded()), ids=lambda value: value if "," in value else "")
def test_recorded_requests_of_agents_are_accepted(name: str, path: str, body: dict[str, Any]) -> None:
    tools = [inner for tool in body.get("tools") or () for inner in tool.get("tools", [tool])]
    for turn in earlier_turns(body):
        request = read(path, turn)
        offered = engine_request(request).tools or ()
        assert len(offered) == sum("input_schema" in tool or tool.get("type") in (None, "function") for tool in tools)
        assert {field for field in ignored_fields(request) if " " not in field} <= {
            "client_metadata",
            "context_management",
            "prompt_cache_key",
        }


def test_many_ignored_parts_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    items = [{"type": "message", "role": "user", "content": "a"}, *({"type": "new_item"} for _ in range(50))]
    assert len(ignored_fields(responses(input=items))) == 20
    assert caplog.text.count("new_item") == 1


NO_CONTENT: list[dict[str, Any]] = [
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "get", "input": None}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": None}]},
    {"role": "assistant", "content": [{"type": "server_tool_use", "id": "2", "name": "web_search", "input": {}}]},
    {"role": "user", "content": [{"type": "web_search_tool_result", "tool_use_id": "2", "content": []}]},
]


def test_null_and_blocks_of_anthropics_tools_do_not_end_a_conversation() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [USER, *NO_CONTENT, USER]}
    request = parse(MessagesRequest, json.dumps(body).encode())
    assert [one["role"] for one in request.conversation] == ["user", "assistant", "tool", "user"]
    assert ignored_fields(request) == [
        "messages[4].content[0] (server_tool_use)",
        "messages[5].content[0] (web_search_tool_result)",
    ]


@pytest.mark.parametrize("arguments", [None, "", {"a": 1}, "{"])
def test_null_in_items_does_not_end_a_conversation(arguments: Any) -> None:
    items = [
        {"type": "message", "role": "assistant", "content": None},
        {"type": "function_call", "call_id": "1", "name": "get", "arguments": arguments},
        {"type": "function_call_output", "call_id": "1", "output": None},
    ]
    assert conversation((), responses(input=items).input)[-1]["content"] == ""


def test_a_refusal_in_the_history_is_text() -> None:
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat(messages=[USER, refusal, USER]).messages[1].content == "no"


def test_calls_of_other_tools_in_the_history_are_shown_as_calls() -> None:
    items = [
        {"type": "item_reference", "id": "msg_1"},
        {"type": "message", "role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {"type": "local_shell_call", "call_id": "2", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": {"stdout": "x"}},
    ]
    request = responses(input=items)
    assert ignored_fields(request) == ["input[0] (item_reference)", "input[2] (web_search_call)"]
    assert [
        (one["role"], one["content"], [call["function"] for call in one.get("tool_calls", ())])
        for one in conversation((), request.input)
    ] == [
        ("user", "a", []),
        ("assistant", "", [{"name": "apply_patch", "arguments": {"input": "*** Begin"}}]),
        ("tool", "done", []),
        ("assistant", "", [{"name": "local_shell", "arguments": {"action": {"command": ["ls"]}}}]),
        ("tool", '{"stdout": "x"}', []),
    ]
    with pytest.raises(ApiError, match="supports none of the items, such as 'item_reference'"):
        responses(input=items[:1])


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_a_byte_order_mark_is_named(mark: bytes) -> None:
    with pytest.raises(ApiError, match="byte order mark"):
        parse(ChatRequest, mark + b"{}")


async def test_a_compressed_body_is_rejected() -> None:
    scope = {"type": "http", "headers": [(b"content-encoding", b"gzip")]}
    with pytest.raises(ApiError, match="compressed") as refused:
        await read_body(Request(scope), 100)
    assert refused.value.status == 415
