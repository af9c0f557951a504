"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest, GenerateResponse
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.errors import ANTHROPIC_ID_HEADER
from charonia_gateway.message_blocks import Blocks, whole_blocks
from charonia_gateway.record import PING_HEARTBEAT, REQUEST_ID_HEADER
from charonia_gateway.schemas.messages import CountTokensRequest, MessagesRequest
from charonia_gateway.schemas.responses import AnthropicAnswer, AnthropicErrorBody, TokenCount
from charonia_gateway.sse import EventStream, Format, named_event, while_connected
from charonia_gateway.usage import Usage

router = APIRouter(tags=["Anthropic"])


@router.post(
    "/v1/messages",
    summary="Answer a conversation",
    **describe(
        MessagesRequest,
        AnthropicAnswer,
        {
            "whole": {"max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]},
            "streamed": {
                "max_tokens": 64,
                "system": "You answer briefly.",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stop_sequences": ["\n\n"],
                "stream": True,
            },
            "tools": {
                "max_tokens": 256,
                "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
                "tools": [
                    {
                        "name": "get_weather",
                        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
                    }
                ],
            },
        },
        stream="with stream = true Anthropic's events from `message_start` to `message_stop`",
        error=AnthropicErrorBody,
    ),
)
async def messages(request: Request, gateway: GatewayState) -> Response:
    """Anthropic's Messages. Tool calls and reasoning are parsed in the format of the model's chat template
    (docs/tools.md). The response contains reasoning if `thinking` requests it."""
    body = await gateway.read(request, MessagesRequest)
    head = Head(gateway, request, body, "msg_")
    headers = {**head.headers, ANTHROPIC_ID_HEADER: head.headers[REQUEST_ID_HEADER]}
    reasoning = (await head.engine.pool.answer_formats()).get("reasoning")
    engine_request = body.engine_request(reasons=bool(reasoning))
    if body.stream:
        form = _format(head.headers[REQUEST_ID_HEADER])
        return EventStream(_stream(body, engine_request, head), headers, form, heartbeat_s=gateway.settings.heartbeat_s)
    return JSONResponse(await while_connected(request, _whole(body, engine_request, head)), headers=headers)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count a conversation's tokens",
    **describe(
        CountTokensRequest,
        TokenCount,
        {"a turn": {"messages": [{"role": "user", "content": "Hello"}]}},
        stream=None,
        error=AnthropicErrorBody,
    ),
)
async def count_tokens(request: Request, gateway: GatewayState) -> JSONResponse:
    """Count the prompt's tokens of a request with the same messages and tools."""
    body = await gateway.read(request, CountTokensRequest)
    head = Head(gateway, request, body, "count-")
    headers = {**head.headers, ANTHROPIC_ID_HEADER: head.headers[REQUEST_ID_HEADER]}
    found = await while_connected(request, head.engine.pool.tokenize(body.tokenize_request()))
    return JSONResponse({"input_tokens": len(found.token_ids)}, headers=headers)


def _format(request_id: str) -> Format:
    return Format("text/event-stream", lambda error: named_event(error.anthropic_body(request_id)), PING_HEARTBEAT)


def _message(head: Head, usage: Usage, **more: Any) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.fields["model"],
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
        **more,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    counts = usage.to_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    reasoning = counts.get("completion_tokens_details", {}).get("reasoning_tokens")
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
        **({"output_tokens_details": {"thinking_tokens": reasoning}} if reasoning else {}),
    }


def _stop(body: MessagesRequest, last: GenerateResponse, calls: bool) -> dict[str, str | None]:
    """calls: whether the response contains tool calls."""
    if last.finish_reason == "length":
        full = last.num_output_tokens < body.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
    if last.stop_word is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_word}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


async def _whole(body: MessagesRequest, engine_request: GenerateRequest, head: Head) -> dict[str, Any]:
    usage = head.usage(1, 1)
    (answer,) = await head.engine.complete([engine_request], head.engine_id)
    usage.see(0, answer)
    content = whole_blocks(body, answer, parsed=bool(engine_request.parsed))
    return _message(head, usage, content=content, **_stop(body, answer, bool(answer.tool_calls)))


async def _stream(body: MessagesRequest, engine_request: GenerateRequest, head: Head) -> AsyncGenerator[bytes, None]:
    usage = head.usage(1, 1)
    blocks = Blocks(body, parsed=bool(engine_request.parsed))
    started = False
    async with aclosing(head.engine.stream([engine_request], head.engine_id)) as parts:
        async for part in parts:
            usage.see(0, part)
            events = b""
            if not started:
                started = True
                events += named_event({"type": "message_start", "message": _message(head, usage)})
            events += blocks.read(part)
            if part.finish_reason:
                delta = _stop(body, part, bool(blocks.calls))
                events += blocks.end()
                events += named_event({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
                events += named_event({"type": "message_stop"})
            if events:
                yield events
