"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest, GenerateResponse
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import Gateway, GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.errors import ANTHROPIC_ID_HEADER
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
        },
        stream="with stream = true Anthropic's events, from `message_start` to `message_stop`",
        error=AnthropicErrorBody,
    ),
)
async def messages(request: Request, gateway: GatewayState) -> Response:
    """Anthropic's Messages: text, without tools. A model's reasoning is left out of the answer."""
    body = await gateway.read(request, MessagesRequest)
    head = Head(gateway, request, body, "msg")
    headers = {**head.headers, ANTHROPIC_ID_HEADER: head.headers[REQUEST_ID_HEADER]}
    asked = body.engine_request(reasons=await gateway.engine.pool.reasons())
    if body.stream:
        form = _format(head.headers[REQUEST_ID_HEADER])
        return EventStream(_stream(gateway, body, asked, head), headers, form, heartbeat_s=gateway.settings.heartbeat_s)
    return JSONResponse(await while_connected(request, _whole(gateway, body, asked, head)), headers=headers)


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
    """Tokens of the prompt that the same messages are in a request for an answer."""
    body = await gateway.read(request, CountTokensRequest)
    head = Head(gateway, request, body, "count")
    headers = {**head.headers, ANTHROPIC_ID_HEADER: head.headers[REQUEST_ID_HEADER]}
    found = await while_connected(request, gateway.engine.pool.tokenize(body.tokenize_request()))
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


def _usage(usage: Usage) -> dict[str, int]:
    counts = usage.to_json()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }


def _stop(body: MessagesRequest, last: GenerateResponse) -> dict[str, str | None]:
    if last.finish_reason == "length":
        full = last.num_output_tokens < body.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}
    reason = "end_turn" if last.stop_word is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop_word}


async def _whole(gateway: Gateway, body: MessagesRequest, asked: GenerateRequest, head: Head) -> dict[str, Any]:
    usage = head.usage(1, 1)
    (answer,) = await gateway.engine.complete([asked], head.engine_id)
    usage.see(0, answer)
    text = answer.content if asked.parsed else answer.text
    content = [{"type": "text", "text": text}] if text else []
    return _message(head, usage, content=content, **_stop(body, answer))


async def _stream(
    gateway: Gateway, body: MessagesRequest, asked: GenerateRequest, head: Head
) -> AsyncGenerator[bytes, None]:
    """One content block, which begins with the first text."""
    usage = head.usage(1, 1)
    delta = {"type": "text_delta", "text": ""}
    piece = {"type": "content_block_delta", "index": 0, "delta": delta}
    started = begun = False
    async with aclosing(gateway.engine.stream([asked], head.engine_id)) as parts:
        async for _, part in parts:
            usage.see(0, part)
            events = b""
            if not started:
                started = True
                events += named_event({"type": "message_start", "message": _message(head, usage)})
            text = part.content if asked.parsed else part.text
            if text and not begun:
                begun = True
                block = {"type": "text", "text": ""}
                events += named_event({"type": "content_block_start", "index": 0, "content_block": block})
                events += PING_HEARTBEAT
            if text:
                delta["text"] = text
                events += named_event(piece)
            if part.finish_reason:
                if begun:
                    events += named_event({"type": "content_block_stop", "index": 0})
                end = {"type": "message_delta", "delta": _stop(body, part), "usage": _usage(usage)}
                events += named_event(end) + named_event({"type": "message_stop"})
            if events:
                yield events
