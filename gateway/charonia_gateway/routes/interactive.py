"""POST /v1/chat/interactive"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest, GenerateResponse
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.engine import Engine
from charonia_gateway.schemas.interactive import InteractiveAnswer, InteractiveRequest
from charonia_gateway.sse import LINES, EventStream, line, while_connected

router = APIRouter()


@router.post(
    "/v1/chat/interactive",
    summary="Continue a conversation that the server stores",
    tags=["LMDeploy"],
    **describe(
        InteractiveRequest,
        InteractiveAnswer,
        {
            "a turn": {"prompt": "What is the capital of France?", "session_id": 7, "interactive_mode": True},
            "the end": {"session_id": 7, "interactive_mode": False, "request_output_len": 0},
            "without a session": {"prompt": "Hello", "request_output_len": 32},
        },
        stream="with stream = true one such object per line",
        errors={
            410: "the server of the session's history takes no requests; the same request again begins a new history"
        },
    ),
)
async def chat_interactive(request: Request, gateway: GatewayState) -> Response:
    """LMDeploy's interactive chat. An unknown or forgotten conversation begins with this prompt. If the conversation's
    server is gone or drains, the request first fails with 410."""
    body = await gateway.read(request, InteractiveRequest)
    head = Head(gateway, request, body, "interactive-")
    if body.acts or body.ends:
        await _act(head.engine, body)
        return JSONResponse(_nothing(), headers=head.headers)
    engine_request = body.engine_request()
    if body.stream:
        return EventStream(_stream(engine_request, head), head.headers, LINES, heartbeat_s=gateway.settings.heartbeat_s)
    return JSONResponse(await while_connected(request, _whole(engine_request, head)), headers=head.headers)


async def _act(engine: Engine, body: InteractiveRequest) -> None:
    assert body.session_id is not None
    if body.ends:
        await engine.end_session(body.session_id)
    elif body.cancel:
        await engine.cancel_session(body.session_id)
    else:
        await engine.stop_session(body.session_id)


def _nothing() -> dict[str, Any]:
    return {"text": "", "tokens": 0, "input_tokens": 0, "history_tokens": 0, "finish_reason": "stop"}


def _shown(part: GenerateResponse) -> dict[str, Any]:
    return {
        "text": part.text,
        "tokens": part.num_output_tokens,
        "input_tokens": part.num_input_tokens - part.num_session_tokens,
        "history_tokens": part.num_session_tokens,
        "finish_reason": part.finish_reason,
    }


async def _whole(engine_request: GenerateRequest, head: Head) -> dict[str, Any]:
    usage = head.usage(1, 1)
    async with aclosing(head.engine.answer(engine_request, f"{head.engine_id}#0", may_be_cancelled=True)) as parts:
        answer = [part async for part in parts][-1]
    usage.see(0, answer)
    return {**_shown(answer), **head.timings(usage)}


async def _stream(engine_request: GenerateRequest, head: Head) -> AsyncGenerator[bytes, None]:
    usage = head.usage(1, 1)
    async with aclosing(head.engine.answer(engine_request, f"{head.engine_id}#0", may_be_cancelled=True)) as parts:
        async for part in parts:
            usage.see(0, part)
            if part.finish_reason:
                yield line({**_shown(part), **head.timings(usage)})
            elif part.text:
                yield line(_shown(part))
