"""Tool calls and reasoning through the real stack. The model is that of caller.py."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
import tritonclient.grpc.aio as triton
from caller import CALLS, CONTENT, REASONING, TEXTS, TOOLS
from charonia_client import BadRequest, Client, GenerateRequest, GenerateResponse
from charonia_client.tools import ToolResult, Tools, converse
from openai.types.chat import ChatCompletion
from stack import HANG_S, Stack
from triton_stream import collect

# Arguments have a limited length, so that every call ends.
CONFIRM: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "confirm",
        "parameters": {
            "type": "object",
            "properties": {"sure": {"type": "boolean"}, "by": {"type": "string", "enum": ["mail", "phone"]}},
            "required": ["sure", "by"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PROGRAM = Path(sys.executable).parent / "triton_client"
AT_ONCE = {"chat_template_kwargs": {"thinks": False}}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 300}


def says(index: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"<|text{index}|>"}]


def named(function: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function}}


def check_confirmed(arguments: dict[str, Any]) -> None:
    jsonschema.validate(arguments, CONFIRM["function"]["parameters"])


@pytest.fixture
async def client(caller: Stack) -> AsyncIterator[Client]:
    async with Client(caller.grpc) as client:
        yield client


def joined(parts: list[GenerateResponse]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Content, reasoning and complete calls."""
    names, arguments, complete = {}, {}, set()
    for delta in [delta for part in parts for delta in part.tool_calls]:
        if delta.name is not None:
            assert delta.id and delta.index == len(names)
            names[delta.index] = delta.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
        if delta.complete:
            complete.add(delta.index)
    calls = [(names[at], json.loads(arguments[at])) for at in sorted(complete)]
    return "".join(part.content for part in parts), "".join(part.reasoning for part in parts), calls


@pytest.mark.parametrize("stream", [True, False])
async def test_client_returns_content_reasoning_and_calls(client: Client, stream: bool) -> None:
    asked = GenerateRequest(messages=says(0), tools=TOOLS, parsed=True, stream=stream, **GREEDY)
    async with aclosing(client.generate(asked)) as answer:
        parts = [part async for part in answer]
    assert joined(parts) == (CONTENT, REASONING, CALLS)
    assert "".join(part.text for part in parts) == TEXTS[0]
    assert stream or len(parts) == 1
    counts = [part.num_reasoning_tokens for part in parts]
    assert counts == sorted(counts) and 0 < counts[-1] < parts[-1].num_output_tokens


async def test_response_is_parsed_only_if_requested(client: Client) -> None:
    part = await client.complete(GenerateRequest(messages=says(0), tools=TOOLS, stream=False, **GREEDY))
    assert (part.text, part.content, part.tool_calls) == (TEXTS[0], "", [])


async def test_truncated_call_is_incomplete_and_does_not_leak(client: Client) -> None:
    request = GenerateRequest(messages=says(4), tools=TOOLS, parsed=True, stream=False, **GREEDY)
    part = await client.complete(request)
    assert part.content == ""
    (call,) = part.tool_calls
    assert (call.name, call.arguments, call.complete) == ("add", '{"a": 1, oh', False)


async def test_template_variables_may_begin_reasoning(client: Client, caller: Stack) -> None:
    request = GenerateRequest(
        messages=[{"role": "user", "content": "x"}],
        chat_template_kwargs={"thinks": True},
        parsed=True,
        stream=False,
        **GREEDY,
    )
    with pytest.raises(BadRequest, match="chat_template_kwargs: the variable 'tokenize' cannot be set"):
        await client.complete(
            GenerateRequest(messages=says(1), chat_template_kwargs={"tokenize": True}, stream=False, **GREEDY)
        )
    part = await client.complete(request)
    # The prompt's last token is the start token of the response, not the beginning of reasoning.
    assert (part.content, part.reasoning) == (TEXTS[5], "")
    async with triton.InferenceServerClient(caller.grpc) as server:
        fields = {"messages": json.dumps(says(1)), "exclude_input_in_output": False, **GREEDY}
        fields |= {"chat_template_kwargs": '{"reasoning_effort": "low"}', "tools": json.dumps(TOOLS[:1])}
        (response,) = await collect(server, fields)
    assert response.text.decode().startswith(f"tools:{json.dumps(TOOLS[:1])}effort:low")


async def test_stop_words_end_reasoning_and_content_but_no_call(client: Client) -> None:
    fields: dict[str, Any] = {"parsed": True, "name_stop_word": True, "stream": False, **GREEDY}
    request = GenerateRequest(messages=says(0), tools=TOOLS, stop_words=["city", "Paris", '"'], **fields)
    part = await client.complete(request)
    assert (part.stop_word, part.content) == ("Paris", "")  # in the reasoning, which precedes the call
    request = GenerateRequest(messages=says(0), tools=TOOLS, stop_words=["city", '"', "}", "add"], **fields)
    part = await client.complete(request)
    assert (*joined([part]), part.stop_word) == (CONTENT, REASONING, CALLS, None)
    request = GenerateRequest(messages=says(0), stop_words=['"'], **fields)
    assert (await client.complete(request)).stop_word == '"'
    request = GenerateRequest(
        messages=says(1),
        tools=[CONFIRM],
        tool_choice="required",
        parallel_tool_calls=False,
        stop_words=["<", "confirm", "{", "\n"],
        **AT_ONCE,
        **fields,
    )
    content, _, ((name, arguments),) = joined([await client.complete(request)])
    assert (content, name) == ("", "confirm")
    check_confirmed(arguments)


async def test_truncated_forced_call_has_no_content(api: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"tools": [CONFIRM], "parallel_tool_calls": False, "extra_body": AT_ONCE}
    for choice in ("required", named("confirm")):
        whole = await ask(api, 1, tool_choice=choice, **fields)
        assert whole.usage is not None
        for size in range(1, whole.usage.completion_tokens - 1, 3):
            (cut,) = (await ask(api, 1, tool_choice=choice, max_tokens=size, **fields)).choices
            assert not cut.message.content and cut.finish_reason == "length"


async def test_triton_client_forces_calls(caller: Stack) -> None:
    async with triton.InferenceServerClient(caller.grpc) as server:
        for choice in ("required", json.dumps(named("confirm"))):
            fields = {"messages": json.dumps(says(1)), "tools": json.dumps([CONFIRM]), "tool_choice": choice, **GREEDY}
            fields["chat_template_kwargs"] = json.dumps(AT_ONCE["chat_template_kwargs"])
            (response,) = await collect(server, {**fields, "parallel_tool_calls": False})
            begin, end = "<tool_call>", "</tool_call>"
            call = json.loads(response.text.decode().strip().removeprefix(begin).removesuffix(end))
            assert call["name"] == "confirm"
            check_confirmed(call["arguments"])


async def test_preprocessing_reports_formats_of_model(caller: Stack) -> None:
    async with triton.InferenceServerClient(caller.grpc) as server:
        asked = [triton.InferRequestedOutput("answer_formats")]
        answer = await server.infer("preprocessing", [], outputs=asked)
    found = json.loads(answer.as_numpy("answer_formats")[0])
    assert found == {"tool_calls": "hermes", "reasoning": "think", "special": {}}


def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    assert (city, days) == ("Paris", 3)
    return "sunny"


def add(a: int) -> str:
    """Returns the text that makes the parrot continue."""
    return "<|text1|>"


TOOLBOX = Tools([get_weather, add])


async def test_client_library_runs_functions_until_no_call(client: Client) -> None:
    history: list[dict[str, Any]] = list(says(0))
    items = [item async for item in converse(client, GenerateRequest(messages=[], **GREEDY), TOOLBOX, history)]
    assert [(item.name, item.text) for item in items if isinstance(item, ToolResult)] == [
        ("get_weather", "sunny"),
        ("add", "<|text1|>"),
    ]
    assert [message["role"] for message in history] == ["user", "assistant", "tool", "tool", "assistant"]
    assert history[1]["content"] == CONTENT and len(history[1]["tool_calls"]) == 2
    assert history[1]["reasoning_content"] == REASONING
    assert history[2]["tool_call_id"] == history[1]["tool_calls"][0]["id"]
    assert history[-1]["content"] == TEXTS[1]


async def test_no_function_runs_for_truncated_response(client: Client) -> None:
    whole = await client.complete(GenerateRequest(messages=says(0), stream=False, **GREEDY))
    request = GenerateRequest(messages=[], temperature=0.0, max_tokens=whole.num_output_tokens - 1)
    history: list[dict[str, Any]] = list(says(0))
    items = [item async for item in converse(client, request, TOOLBOX, history)]
    assert not any(isinstance(item, ToolResult) for item in items)
    assert history[1:] == [{"role": "assistant", "content": CONTENT, "reasoning_content": REASONING}]


def test_terminal_chat_shows_reasoning_and_runs_functions(caller: Stack, tmp_path: Path) -> None:
    file = tmp_path / "functions.py"
    file.write_text(f"{inspect.getsource(get_weather)}\n\n{inspect.getsource(add)}\n\ndef _hidden(x: bytes): ...\n")
    command = [PROGRAM, caller.grpc, "--tools", str(file), "--temperature", "0", "--max-tokens", "300"]
    done = subprocess.run(command, input="<|text0|>\n", capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout.startswith(f"{REASONING}\n\n{CONTENT}\nget_weather(")
    assert "= sunny\n" in done.stdout and f"= <|text1|>\n{TEXTS[1]}\n[" in done.stdout
    assert "<think>" not in done.stdout and "<tool_call>" not in done.stdout
    other = subprocess.run([PROGRAM, caller.grpc, "--tools", __file__ + "x"], capture_output=True, timeout=HANG_S)
    assert other.returncode == 2


# --- through the gateway


@pytest.fixture
async def api(caller: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{caller.gateway}/v1", api_key="none", max_retries=0) as api:
        yield api


async def ask(api: openai.AsyncOpenAI, index: int, **more: Any) -> ChatCompletion:
    """The response with TEXTS[index], through openai's client."""
    fields: dict[str, Any] = {"model": "caller", "messages": says(index), **GREEDY, **more}
    return ChatCompletion.model_validate((await api.chat.completions.create(**fields)).model_dump())


async def test_openai_client_stream_equals_unstreamed(api: openai.AsyncOpenAI) -> None:
    answer = await ask(api, 0, tools=TOOLS)
    whole = answer.choices[0].message
    assert (whole.content, answer.choices[0].finish_reason) == (CONTENT, "tool_calls")
    assert whole.model_extra is not None and whole.model_extra["reasoning_content"] == REASONING
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    fields: dict[str, Any] = {"model": "caller", "messages": says(0), "tools": TOOLS, **GREEDY}
    chunks = []
    async with api.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert (message.content, final.choices[0].finish_reason) == (CONTENT, "tool_calls")
    assert [call.function.arguments for call in message.tool_calls or []] == [
        call.function.arguments for call in whole.tool_calls or [] if call.type == "function"
    ]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == REASONING
    for index, (name, _) in enumerate(CALLS):
        calls = [call for delta in deltas for call in delta.tool_calls or [] if call.index == index]
        first, *rest = [call.function for call in calls]
        assert calls[0].id and calls[0].type == "function" and first is not None
        assert (first.name, first.arguments) == (name, "")
        assert rest and all(one is not None and one.name is None and one.arguments for one in rest)
    assert final.usage is not None and final.usage.completion_tokens_details is not None


async def test_thinking_budget_ends_reasoning_and_content_follows(api: openai.AsyncOpenAI, client: Client) -> None:
    choices: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    for budget in (0, 8):
        body = {"thinking_budget": budget, **choices}
        answer = await ask(api, 0, extra_body=body)
        message = answer.choices[0].message
        thought = (message.model_extra or {}).get("reasoning_content") or ""
        assert message.content in ("yes", "no") and answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        counted = answer.usage.completion_tokens_details.reasoning_tokens or 0
        fields: dict[str, Any] = {"model": "caller", "messages": says(0), **GREEDY, "stream": True, "extra_body": body}
        deltas = [chunk.choices[0].delta async for chunk in await api.chat.completions.create(**fields)]
        assert "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas) == thought
        assert "".join(delta.content or "" for delta in deltas) == message.content
        if budget == 0:
            assert thought == ""
            marks = counted
        else:
            assert REASONING.startswith(thought) and 0 < len(thought) < len(REASONING)
            assert counted == marks + budget
    (whole,) = (await ask(api, 0, tools=TOOLS, extra_body={"thinking_budget": 200})).choices
    assert whole.message.content == CONTENT and len(whole.message.tool_calls or []) == len(CALLS)
    with pytest.raises(BadRequest, match="thinking_budget = 5: the response has no thinking that the engine can end"):
        await client.complete(GenerateRequest(text="x", thinking_budget=5, stream=False))


async def test_plain_response_has_text_and_reasoning(api: openai.AsyncOpenAI, caller: Stack) -> None:
    (choice,) = (await ask(api, 1, tools=TOOLS)).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TEXTS[1], None, "stop")
    (choice,) = (await ask(api, 0, tools=TOOLS, tool_choice="none")).choices
    assert choice.message.content == TEXTS[0].partition("</think>\n\n")[2] and choice.finish_reason == "stop"


async def test_truncated_call_has_reason_length(api: openai.AsyncOpenAI) -> None:
    whole = await ask(api, 0, tools=TOOLS)
    assert whole.usage is not None
    (choice,) = (await ask(api, 0, tools=TOOLS, max_tokens=whole.usage.completion_tokens - 8)).choices
    assert choice.finish_reason == "length"


async def test_one_call_at_most_and_log_probabilities(api: openai.AsyncOpenAI) -> None:
    answer = await ask(api, 0, tools=TOOLS, parallel_tool_calls=False, logprobs=True, n=2)
    for choice in answer.choices:
        assert len(choice.message.tool_calls or []) == 1
        assert choice.logprobs is not None and choice.logprobs.content
        assert "".join(entry.token for entry in choice.logprobs.content) == TEXTS[0]
    stream = await api.chat.completions.create(
        model="caller", messages=says(0), tools=TOOLS, logprobs=True, stream=True, **GREEDY
    )
    tokens = [
        entry.token
        async for chunk in stream
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert "".join(tokens) == TEXTS[0]


class confirm(pydantic.BaseModel):
    """Calls a function; returns its name."""

    sure: bool
    by: Literal["mail", "phone"]


@pytest.mark.parametrize("choice", ["required", named("confirm")])
async def test_openai_client_parses_arguments_of_forced_call(api: openai.AsyncOpenAI, choice: Any) -> None:
    tool = openai.pydantic_function_tool(confirm)
    fields: dict[str, Any] = {"model": "caller", "messages": says(1), "tools": [tool], "tool_choice": choice}
    fields |= {"parallel_tool_calls": False, "extra_body": AT_ONCE, **GREEDY}
    answer = (await api.chat.completions.parse(**fields)).choices[0]
    async with api.chat.completions.stream(**fields) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    for one in (answer, streamed):
        assert one.message.tool_calls is not None and not one.message.content
        (call,) = one.message.tool_calls
        assert isinstance(call.function.parsed_arguments, confirm)
        assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")


async def test_forced_call_follows_schema_that_is_not_strict(api: openai.AsyncOpenAI) -> None:
    function = {name: value for name, value in CONFIRM["function"].items() if name != "strict"}
    fields: dict[str, Any] = {"tool_choice": named("confirm"), "extra_body": AT_ONCE}
    answer = await ask(api, 1, tools=[{"type": "function", "function": function}], **fields)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    check_confirmed(json.loads(call.function.arguments))


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_call_with_unsupported_schema_is_any_object(api: openai.AsyncOpenAI, stream: bool) -> None:
    function: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    fields: dict[str, Any] = {"model": "caller", "messages": says(2), "tool_choice": "required", "extra_body": AT_ONCE}
    fields |= {"stream": stream, "parallel_tool_calls": False, **GREEDY}
    tool = {"type": "function", "function": function}
    answer = await api.chat.completions.with_raw_response.create(tools=[tool], **fields)
    assert "at /properties/a: " in answer.headers["charonia-not-enforced"]
    if not stream:
        (call,) = answer.parse().choices[0].message.tool_calls
        assert isinstance(json.loads(call.function.arguments), dict)
    tool = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="at /properties/a: "):
        await api.chat.completions.create(tools=[tool], **fields)


async def test_response_format_with_tools_applies_without_calls(api: openai.AsyncOpenAI) -> None:
    schema = CONFIRM["function"]["parameters"]
    response_format = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}}
    (choice,) = (await ask(api, 0, tools=TOOLS, response_format=response_format)).choices
    if choice.message.tool_calls is None:
        check_confirmed(json.loads(choice.message.content or ""))
    (choice,) = (await ask(api, 0, tools=TOOLS, response_format=response_format, tool_choice="none")).choices
    check_confirmed(json.loads(choice.message.content or ""))
    assert choice.message.model_extra is not None and choice.message.model_extra["reasoning_content"] == REASONING
    wrong = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(api, 0, response_format=wrong)
    assert caught.value.param == "response_format" and 'Unimplemented keys: ["not"]' in caught.value.message


async def test_unsupported_strict_schema_is_rejected(api: openai.AsyncOpenAI) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(api, 1, tools=[{"type": "function", "function": function}])
    assert caught.value.param == "tools" and 'function "f": the JSON schema, at /properties/a: ' in caught.value.message
