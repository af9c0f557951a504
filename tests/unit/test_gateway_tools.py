"""Tool calls and reasoning in the formats of /v1/messages and /v1/responses."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from charonia_gateway.body import parse
from charonia_gateway.errors import ApiError
from charonia_gateway.json_values import MAX_VALUES
from charonia_gateway.schemas.messages import MessagesRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.response_input import conversation
from charonia_gateway.schemas.turns import MAX_ARGUMENTS_DEPTH
from gateway_in_process import MODEL, ask, gateway
from test_continuation import STRICT, tokenizer
from triton_double import error, input_number, input_text, parsed, part, says, scripted_parse
from tritonclient.grpc import service_pb2 as pb

from charonia.text.prompt_ids import encode_chat, parse_json

Responses = AsyncIterator[Any]
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA}
IN_OPENAIS_FORM = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "messages": USER, "tools": [TOOL]}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": "hi", "tools": [FUNCTION]}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}, {"type": "mcp"}]}


@pytest.fixture(autouse=True)
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia_client.parsing.ResponseParser.parse", scripted_parse)


def begin(index: int, arguments: str = "", **more: Any) -> dict[str, Any]:
    return {"index": index, "id": f"call{index}", "name": "add", "arguments": arguments, **more}


def goes_on(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "arguments": arguments, **more}


# Possible responses: the end of a call, text and the start of the next call in one part.
PARTS: list[dict[str, Any]] = [
    {"reasoning": "They "},
    {"reasoning": "want sums.", "content": "I"},
    {"content": " add.", "calls": [begin(0, '{"a"')]},
    {"calls": [goes_on(0, ": 1")]},
    {"calls": [goes_on(0, "}", complete=True), begin(1, "{")], "content": "And:"},
    {"calls": [goes_on(1, "}", complete=True)]},
    {"content": "So.", "reason": "stop"},
]


PARTED = says(*(parsed(**one) for one in PARTS))


async def stream(path: str, body: dict[str, Any], behaviour: Any = PARTED) -> list[dict[str, Any]]:
    async with gateway() as (web, server):
        server.behaviour = behaviour
        text = (await web.post(path, json={**body, "stream": True})).text
    return [json.loads(event.partition("\ndata: ")[2]) for event in text.removesuffix("\n\n").split("\n\n")]


async def whole(path: str, body: dict[str, Any], **one: Any) -> dict[str, Any]:
    answer = await ask(path, body, behaviour=says(parsed(**{"reason": "stop", **one})))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_call_is_any_object_if_its_schema_fails(stream: bool) -> None:
    async def behaviour(request: pb.ModelInferRequest) -> Responses:
        if input_number(request, "any_arguments"):
            yield parsed(calls=[begin(0, "{}", complete=True)], reason="stop")
        else:
            yield error("[400] tools: the schema of \u201cadd\u201d\nis too costly")

    for path, body, choice in (
        ("/v1/messages", MESSAGES, {"type": "any"}),
        ("/v1/responses", RESPONSES, "required"),
        ("/v1/chat/completions", {**MESSAGES, "tools": [IN_OPENAIS_FORM]}, "required"),
    ):
        answer = await ask(path, {**body, "tool_choice": choice, "stream": stream}, behaviour=behaviour)
        assert answer.status_code == 200 and "add" in answer.text
        assert answer.headers["charonia-not-enforced"] == "tools: the schema of ?add??is too costly"
        answer = await ask(path, body, behaviour=behaviour)
        assert answer.status_code == 400 and "charonia-not-enforced" not in answer.headers


async def test_anthropics_blocks_come_one_after_the_other() -> None:
    events = await stream("/v1/messages", {**MESSAGES, "thinking": {"type": "adaptive"}})
    open_block, blocks = -1, []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks) and open_block < 0
            open_block = event["index"]
            blocks.append(event["content_block"] | {"text": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            blocks[-1]["text"] += "".join(event["delta"].get(name, "") for name in ("text", "thinking", "partial_json"))
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block = -1
    assert open_block < 0
    assert [(block["type"], block.get("name"), block["text"]) for block in blocks] == [
        ("thinking", None, "They want sums."),
        ("text", None, "I add."),
        ("tool_use", "add", '{"a": 1}'),
        ("text", None, "And:"),
        ("tool_use", "add", "{}"),
        ("text", None, "So."),
    ]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and kinds[-1] == "message_stop"
    signed = [event for event in events if event.get("delta", {}).get("type") == "signature_delta"]
    assert len(signed) == 1 and signed[0]["index"] == 0 and signed[0]["delta"]["signature"]


async def test_openais_items_come_one_after_the_other() -> None:
    events = await stream("/v1/responses", RESPONSES)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    of_items = [event for event in events if "output_index" in event]
    grouped = [list(group) for _, group in itertools.groupby(of_items, lambda event: event["output_index"])]
    found = []
    for index, group in enumerate(grouped):
        assert all(event["output_index"] == index for event in group)
        assert group[0]["type"] == "response.output_item.added" and group[0]["item"]["status"] == "in_progress"
        assert group[-1]["type"] == "response.output_item.done" and group[-1]["item"]["status"] == "completed"
        item = group[-1]["item"]
        assert {event.get("item_id", item["id"]) for event in group} == {item["id"]} == {group[0]["item"]["id"]}
        assert item["id"].startswith({"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[item["type"]])
        text = item.get("arguments") or item["content"][0]["text"]
        assert "".join(event.get("delta", "") for event in group) == text
        found.append((item["type"], text))
    assert found == [
        ("reasoning", "They want sums."),
        ("message", "I add."),
        ("function_call", '{"a": 1}'),
        ("message", "And:"),
        ("function_call", "{}"),
        ("message", "So."),
    ]
    assert events[-1]["response"]["id"].startswith("resp_"), "LangChain goes on only from such an id"
    assert events[-1]["response"]["output"] == [group[-1]["item"] for group in grouped]
    assert events[-1]["response"]["tools"] == [{**FUNCTION, "strict": None}]


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "between_tools"}, True)],
)
def test_model_reasons_if_requested(thinking: Any, thinks: bool) -> None:
    asked = anthropic(*USER, thinking=thinking)
    for request in (asked.engine_request(reasons=True), asked.tokenize_request()):
        assert request.chat_template_kwargs == {"enable_thinking": thinks}


async def test_reasoning_is_shown_if_requested() -> None:
    answers = {"reasoning": "hm", "content": "so"}
    shown = await whole("/v1/messages", {**MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}}, **answers)
    assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
    assert shown["content"][0]["thinking"] == "hm" and shown["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    omitted = {**MESSAGES, "thinking": {"type": "adaptive", "display": "omitted"}}
    hidden = await whole("/v1/messages", omitted, **answers)
    assert hidden["content"][0]["thinking"] == "" and hidden["content"][0]["signature"]
    events = await stream("/v1/messages", omitted)
    assert events[1]["content_block"]["type"] == "thinking"
    assert not [event for event in events if event.get("delta", {}).get("type") == "thinking_delta"]
    for thinking in (None, {"type": "disabled"}):
        silent = await whole("/v1/messages", {**MESSAGES, "thinking": thinking}, **answers)
        assert [block["type"] for block in silent["content"]] == ["text"]


def nested(levels: int) -> str:
    return '{"a":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        "[1]",
        "",
        '{"a": "\\ud800"}',
        '{"a": 1e999}',
        '{"a": NaN}',
        "[" * 5000,
        nested(MAX_ARGUMENTS_DEPTH),
        nested(300),
        json.dumps({"a": [[]] * (MAX_VALUES // 2)}),
    ],
)
async def test_arguments_that_are_no_json_object_are_handed_on_as_they_are(text: str) -> None:
    answer = await whole("/v1/messages", MESSAGES, calls=[begin(0, text, complete=False)], reason="length")
    (block,) = answer["content"]
    assert block["input"] == ({"INVALID_JSON": text} if text else {})
    assert answer["stop_reason"] == "model_context_window_exceeded"
    answer = await whole("/v1/responses", RESPONSES, calls=[begin(0, text, complete=False)], reason="length")
    (item,) = answer["output"]
    assert (item["arguments"], item["status"], answer["status"]) == (text, "incomplete", "incomplete")


async def test_a_call_names_the_namespace_of_its_function() -> None:
    space = {"type": "namespace", "name": "ns", "tools": [FUNCTION]}
    call = {**begin(0, "{}"), "name": "ns__add", "complete": True}
    body = {**RESPONSES, "tools": [space]}
    found = await whole("/v1/responses", body, calls=[call])
    events = await stream("/v1/responses", body, says(parsed(calls=[call], reason="stop")))
    items = [event["item"] for event in events if "item" in event]
    assert [(item["namespace"], item["name"]) for item in [*found["output"], *items]] == [("ns", "add")] * 3
    assert found["tools"] == [{**space, "description": None, "tools": [{**FUNCTION, "strict": None}]}]


async def test_a_conversation_goes_on_after_arguments_that_are_nested_deeply() -> None:
    """preprocessing accepts a depth of MAX_DEPTH. The store accepts less than the parser produces."""
    for text, kept in ((nested(MAX_ARGUMENTS_DEPTH - 1), True), (nested(300), False)):

        async def calls(request: pb.ModelInferRequest, text: str = text) -> Responses:
            yield parsed(calls=[begin(0, text, complete=True)], reason="stop")

        async with gateway() as (web, server):
            server.behaviour = calls
            first = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()
            assert first["store"] and first["output"][0]["arguments"] == text
            again = {**RESPONSES, "previous_response_id": first["id"]}
            assert (await web.post("/v1/responses", json=again)).status_code == 200
            messages = input_text(server.requests[-1], "messages")
        parse_json("messages", messages, "")
        arguments = json.loads(messages)[1]["tool_calls"][0]["function"]["arguments"]
        assert arguments == (json.loads(text) if kept else {"INVALID_JSON": text})


@pytest.mark.parametrize("fit", [True, False])
@pytest.mark.parametrize(
    ("path", "field", "more", "reason"),
    [
        ("/v1/messages", "max_tokens", {"messages": USER}, "model_context_window_exceeded"),
        ("/v1/chat/completions", "max_completion_tokens", {"messages": USER}, '"finish_reason": "length"'),
        ("/v1/completions", "max_tokens", {"prompt": "hi"}, '"finish_reason": "length"'),
        ("/v1/responses", "max_output_tokens", {"input": "hi"}, '"reason": "max_output_tokens"'),
        ("/v1/chat/interactive", "max_tokens", {"prompt": "hi"}, '"finish_reason": "length"'),
    ],
)
async def test_more_tokens_than_fit_are_as_many_as_do(
    path: str, field: str, more: dict[str, Any], reason: str, fit: bool
) -> None:
    """Coding agents request 32000 for any context. The engine receives one request."""
    asked = []

    async def takes(request: pb.ModelInferRequest) -> Responses:
        asked.append((input_number(request, "max_tokens"), "fit_max_tokens" in [one.name for one in request.inputs]))
        yield part("x", "length")

    answer = await ask(path, {"model": MODEL, field: 32000, **more}, takes, fit_max_tokens=fit)
    assert reason in json.dumps(answer.json()) and asked == [(32000, fit)]


def anthropic(*messages: Any, **fields: Any) -> MessagesRequest:
    return parse(MessagesRequest, json.dumps({"model": "m", "max_tokens": 5, "messages": messages, **fields}).encode())


def test_anthropics_history_becomes_the_templates() -> None:
    asked = anthropic(
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "add."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}, "cache_control": None},
                {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": text} for text in ("2", "", "3", "")],
                },
                {"type": "tool_result", "tool_use_id": "c2", "content": "no a", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "And?"},
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "user", "content": "Go on."},
        system=[
            {"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "Be brief.", "Contract:")
        ],
        tools=[TOOL, {**TOOL, "name": "sub", "type": "custom", "strict": True, "eager_input_streaming": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    )
    request = asked.engine_request(reasons=True)
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for id, arguments in (("c1", {"a": 1}), ("c2", {}))
    ]
    assert request.messages == [
        {"role": "system", "content": "Be brief.\nContract:"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2\n3", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "Error: no a", "tool_call_id": "c2", "name": "add"},
        {"role": "tool", "content": "", "tool_call_id": "c3"},
        {"role": "user", "content": "And?\nWell?\n\nGo on."},
    ]
    function = {**IN_OPENAIS_FORM["function"], "name": "sub", "strict": True}  # type: ignore[dict-item]
    strict = {"type": "function", "function": function}
    assert request.tools == [IN_OPENAIS_FORM, strict] and request.parallel_tool_calls is False
    assert request.chat_template_kwargs == {
        "enable_thinking": True,
        "thinking_budget": 2048,
        "reasoning_effort": "high",
    }
    assert request.thinking_budget == 2048
    for kind in ("disabled", "adaptive"):
        other = anthropic(*USER, thinking={"type": kind, "budget_tokens": -1})
        assert other.engine_request(reasons=True).thinking_budget is None
    assert asked.engine_request(reasons=False).thinking_budget is None
    assert request.guide is not None and json.loads(request.guide.text) == SCHEMA
    assert asked.tokenize_request().tools == request.tools


async def test_allowed_tools_of_responses_reach_the_server_and_are_shown() -> None:
    tools = [FUNCTION, {**FUNCTION, "name": "multiply"}]
    async with gateway() as (web, server):
        answer = await web.post("/v1/responses", json={**RESPONSES, "tools": tools, "tool_choice": ALLOWED})
        (request,) = server.requests
    assert answer.json()["tool_choice"] == ALLOWED
    named = [{"type": "function", "function": {"name": "add"}}]
    sent = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": named}}
    assert json.loads(input_text(request, "tool_choice")) == sent
    assert [tool["function"]["name"] for tool in json.loads(input_text(request, "tools"))] == ["add", "multiply"]


def test_openais_items_become_the_templates_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Answer."},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "there"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text} for text in ("I ", "add.")],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{oh"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": text} for text in ("no", "c2")],
        },
    ]
    asked = parse(
        ResponsesRequest,
        json.dumps(
            {
                "model": "m",
                "instructions": "Be brief.",
                "input": items,
                "tools": [FUNCTION],
                "reasoning": {"effort": "none", "summary": "auto"},
                "thinking_budget": 7,
                "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
                "parallel_tool_calls": False,
            }
        ).encode(),
    )
    request = asked.engine_request(conversation((), asked.input), None, reasons=False)
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        for id, arguments in (("c1", {"a": 1}), ("c2", {"INVALID_JSON": "{oh"}))
    ]
    assert request.messages == [
        {"role": "system", "content": "Be brief.\n\nAnswer."},
        {"role": "user", "content": "hi\n\nthere"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "no\nc2", "tool_call_id": "c2", "name": "add"},
    ]
    assert request.tools == [IN_OPENAIS_FORM] and request.parallel_tool_calls is False and request.parsed
    variables = {"reasoning_effort": "none", "enable_thinking": False, "thinking_budget": 7}
    assert request.chat_template_kwargs == variables and request.thinking_budget == 7
    assert request.guide is not None and json.loads(request.guide.text) == SCHEMA


def test_a_coding_agents_items_fit_a_template_whose_roles_alternate() -> None:
    """Codex sends instructions, a developer's message, and several user messages."""
    alternates = tokenizer("{{ messages[0].content }}{% set messages = messages[1:] %}" + STRICT)
    stored: list[dict[str, Any]] = []
    for said in ("AGENTS.md", "Go on."):
        roles = {"developer": "Rules.", "user": said} if not stored else {"assistant": "Hm.", "user": said}
        items = [{"role": role, "content": text} for role, text in roles.items()]
        body = {"model": "m", "instructions": "Be brief.", "input": [*items, *USER]}
        asked = parse(ResponsesRequest, json.dumps(body).encode())
        messages = conversation(stored, asked.input)
        shown = asked.engine_request(messages, None, reasons=False).messages
        prompt = encode_chat(alternates, shown or ()).text
        stored = [*messages, {"role": "assistant", "content": "Done."}]
    first = "Be brief.\n\nRules.<user>AGENTS.md\n\nhi<assistant>"
    assert prompt == f"{first}Done.\n\nHm.<user>Go on.\n\nhi<assistant>"
    assert stored[2]["content"] == "Done.\n\nHm."


async def test_the_output_of_a_call_that_is_not_there_is_refused() -> None:
    output = {"type": "function_call_output", "call_id": "call0", "output": "2"}

    async with gateway() as (web, server):
        server.behaviour = says(parsed(calls=[begin(0, '{"a": 1}', complete=True)], reason="stop"))
        refused = await web.post("/v1/responses", json={**RESPONSES, "input": [output]})
        first = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()
        again = {**RESPONSES, "input": [output], "previous_response_id": first["id"]}
        assert (await web.post("/v1/responses", json=again)).status_code == 200
        sent = json.loads(input_text(server.requests[-1], "messages"))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    assert "function_call_output of 'call0'" in refused.json()["error"]["message"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


async def test_branches_of_a_stored_answer_do_not_wait_for_each_other() -> None:
    """The engine runs the requests of a session one after the other, so branches have their own sessions."""
    together, running = asyncio.Event(), []
    async with gateway() as (web, server):
        first = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()["id"]

        async def waits(request: pb.ModelInferRequest) -> Responses:
            running.append(request)
            if len(running) == 2:
                together.set()
            await together.wait()
            yield parsed("x", reason="stop")

        server.behaviour = waits
        again = {**RESPONSES, "previous_response_id": first, "store": True}
        answers = await asyncio.gather(*(web.post("/v1/responses", json=again) for _ in range(2)))
        sessions = [input_text(request, "session_id") for request in server.requests]
        server.behaviour = server.say_name
        await web.post("/v1/responses", json={**RESPONSES, "previous_response_id": answers[0].json()["id"]})
    assert all(answer.status_code == 200 for answer in answers)
    assert sessions[0] in sessions[1:] and len(set(sessions)) == 2
    assert input_text(server.requests[-1], "session_id") == "", "what is not stored needs no session"


refuses = says(error("[400] prompt and max_tokens do not fit: 9 and 9"))


breaks_off = says(parsed("x"), error("[503] the engine ends"))


is_too_large = says(parsed("x" * 20_000, reason="stop"))


async def never_ends(request: pb.ModelInferRequest) -> Responses:
    yield parsed("x")
    await asyncio.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("fails", [refuses, breaks_off, is_too_large, never_ends])
async def test_an_answer_that_is_not_stored_leaves_the_session_to_the_next(fails: Any, streams: bool) -> None:
    async with gateway(max_response_bytes=10_000) as (web, server):
        first = (await web.post("/v1/responses", json={**RESPONSES, "store": True})).json()["id"]
        again = {**RESPONSES, "previous_response_id": first, "store": True}
        server.behaviour = fails
        failing = asyncio.ensure_future(web.post("/v1/responses", json={**again, "stream": streams}))
        if fails is never_ends:
            while len(server.requests) < 2:
                await asyncio.sleep(0.01)
            failing.cancel()
        await asyncio.wait([failing])
        server.behaviour = server.say_name
        stored = [(await web.post("/v1/responses", json=again)).json()["store"] for _ in range(2)]
        begun, failed, next_one, last = (input_text(request, "session_id") for request in server.requests)
    assert stored == [True, True]
    assert begun == failed == next_one != last


def response(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", "input": USER, **fields}).encode())


def described(**tool: Any) -> dict[str, Any]:
    return {"tools": [{"name": "f", "input_schema": {}, **tool}]}


def formatted(**form: Any) -> dict[str, Any]:
    return {"text": {"format": form}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (described(name="a b"), "tools", "the name of tool 0, 'a b', is not valid: send 1 to 128"),
        (described(name="a" * 129), "tools", "(129 characters), is not valid"),
        (described(name=None), "tools", "the name of tool 0 is missing"),
        (described(input_schema=None), "tools", "tool f: input_schema is missing"),
        (described(strict="yes"), "tools", "strict is neither null nor true"),
        (described(input_schema={"strict": True}), "tools", "send it next to input_schema"),
        (described(parameters={}), "tools", "is called input_schema here"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions are called 'add'"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
            "tool_choice",
            "there is no tool 'other'",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "tool_choice needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice", 'tool_choice = {"type": "some"}: send'),
        ({"thinking": {"type": "enabled"}}, "thinking", 'thinking = {"type": "enabled"}: budget_tokens must be'),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking", "whole number from 1024 to"),
        ({"thinking": "enabled"}, "thinking", 'thinking = "enabled": send'),
        ({"output_config": {"effort": "some"}}, "output_config", "output_config: effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config", "output_config: send"),
        ({"output_config": {"type": "json_schema", "schema": {}}}, "output_config", "type is next to format, where"),
        ({"output_format": {"type": "json_schema"}}, "output_format", "output_format: send"),
        ({"output_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "output_format", "send {"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences", "at most 64"),
        ({"mcp_servers": []}, "mcp_servers", "mcp_servers: this server calls no MCP servers"),
    ],
)
def test_a_wrong_field_of_messages_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        anthropic(*USER, **fields)
    error = caught.value
    assert (error.status, error.param) == (400, param) and says in error.message, error.message


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"type": "tool_use", "id": "c", "name": "f", "input": {}}, "belongs to the role 'assistant'"),
        ({"type": "tool_result"}, "its tool_use_id is missing"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [{"text": "a"}]}, "part 0 has no type"),
        ({"type": "image"}, "part 0 is of type 'image'"),
        ({"type": ["text"]}, "part 0 has no type"),
        ({"type": "text", "text": 7}, "its text is missing"),
    ],
)
def test_wrong_content_block_is_rejected_with_the_reason(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as caught:
        anthropic({"role": "user", "content": [block]})
    assert caught.value.status == 400 and says in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [IN_OPENAIS_FORM]}, "tools", 'send {"type": "function", "name": ..., "parameters": ...}'),
        (
            {"tools": [{**FUNCTION, "name": "a b"}]},
            "tools",
            "the name of function 0, 'a b', is not valid: send 1 to 64",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "the name of function 0 is missing"),
        (
            formatted(type="json_object", schema={}),
            "text",
            "schema does not belong to type 'json_object' here: to give",
        ),
        (formatted(type="json_schema", json_schema={}), "text", "format: json_schema does not belong to type"),
        (formatted(type="json_schema", schema={}), "text", "needs a name"),
        (
            {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "other"}]}},
            "tool_choice",
            "allowed_tools names 'other', which is not a function in tools",
        ),
        ({"tools": [FUNCTION], "tool_choice": {**ALLOWED, "mode": "all"}}, "tool_choice", "send its mode"),
        (
            {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}},
            "tool_choice",
            "none of its tools is a function",
        ),
        ({"text": {"schema": {}}}, "text", "text: schema is next to format, where it has no effect"),
    ],
)
def test_a_wrong_field_of_responses_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        response(**fields)
    error = caught.value
    assert (error.status, error.param) == (400, param) and says in error.message, error.message


MANY = 10_000
RESULTS = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}] * MANY


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": role, "content": "x" * 1000} for _ in range(MANY // 2) for role in ("user", "assistant")][1:],
        [{"role": "user", "content": "x" * 1000}] * (MANY - 1),
        [{"role": "user", "content": RESULTS}],
    ],
)
def test_a_long_conversation_of_anthropics_takes_linear_time(messages: list[Any]) -> None:
    """This blocks the event loop."""
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": [*messages, *USER]}).encode()
    began = time.process_time()
    assert parse(MessagesRequest, body).engine_request(reasons=False).messages
    assert time.process_time() - began < 10  # 0.2 s with linear time


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 1000}]},
        {"role": "assistant", "content": "x" * 1000},
    ],
)
def test_a_long_list_of_items_takes_linear_time(item: dict[str, Any]) -> None:
    items = [item] * (MANY - 1) + USER
    began = time.process_time()
    asked = parse(ResponsesRequest, json.dumps({"model": "m", "input": items}).encode())
    assert conversation((), asked.input)
    assert time.process_time() - began < 10  # 0.2 s with linear time


@pytest.mark.parametrize("calls", [1, 2])
def test_the_arguments_of_all_items_have_no_more_values_than_a_body(calls: int) -> None:
    def ask(arguments: str) -> None:
        items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}] * calls + USER
        parse(ResponsesRequest, json.dumps({"model": "m", "input": items}).encode())

    ask(json.dumps({"a": "[," * MAX_VALUES}))
    with pytest.raises(ApiError, match="arguments have too many values: send at most 524288") as caught:
        ask(json.dumps({"a": [[]] * (MAX_VALUES // 2 // calls)}))
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_a_schema_that_is_nested_deeply_is_taken_or_refused() -> None:
    for depth in (50, 100_000):
        schema = '{"a":' * depth + "1" + "}" * depth
        for model, fields in (
            (MessagesRequest, {"max_tokens": 5, "messages": USER, "tools": [{"name": "f", "input_schema": 0}]}),
            (ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": 0}]}),
        ):
            body = json.dumps({"model": "m", **fields}).replace(": 0", f": {schema}").encode()
            if depth == 50:
                parse(model, body)
                continue
            with pytest.raises(ApiError) as caught:
                parse(model, body)
            assert caught.value.status == 400


def test_a_last_message_of_the_assistants_begins_the_answer() -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The"}]
    body = anthropic(*turns, tools=[TOOL])
    asked, counted = body.engine_request(reasons=True), body.tokenize_request()
    assert asked.continue_final_message and counted.continue_final_message
    assert asked.messages == counted.messages == turns
    assert asked.chat_template_kwargs == {"enable_thinking": False}
    assert not anthropic(turns[0]).engine_request(reasons=True).continue_final_message
    several = anthropic(*turns, {"role": "assistant", "content": "sum"}).engine_request(reasons=True)
    assert several.messages == [turns[0], {"role": "assistant", "content": "The\n\nsum"}]
    said = "messages: the last message is the assistant's, which begins the response: "
    for more, why in (
        ({"thinking": {"type": "adaptive"}}, "leave out thinking"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice requires a call instead"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format constrains",
        ),
    ):
        with pytest.raises(ApiError, match=f"^{said}.*{why}") as caught:
            anthropic(*turns, **more)
        assert caught.value.param == "messages"
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    assert anthropic(*turns, {"role": "assistant", "content": ""}).conversation == turns
    for content, why in (("The ", "white space"), ("", "not be empty"), ([call], "send the tool_result")):
        for before in (turns[:1], turns) if content else (turns[:1],):
            with pytest.raises(ApiError, match=f"^{said}.*{why}"):
                anthropic(*before, {"role": "assistant", "content": content})
    for alone in (turns[1:], turns[1:] * 2):
        with pytest.raises(ApiError, match="send the user's message before it"):
            anthropic(*alone)


def test_cost_of_an_ignored_tool_does_not_grow_with_its_type() -> None:
    body = {"model": MODEL, "input": "x", "tools": [{"type": " " * 4_000_000}]}
    request = parse(ResponsesRequest, json.dumps(body).encode())
    begun = time.process_time()
    assert [request.ignored_parts for _ in range(20)] == [[f"tools[0] ({'?' * 64})"]] * 20
    assert time.process_time() - begun < 1
