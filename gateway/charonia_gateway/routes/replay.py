"""POST /v1/replay: runs a logged request again, for `charonia replay` (docs/determinism.md)."""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message

from charonia_gateway.body import parse, read_body
from charonia_gateway.context import GatewayState
from charonia_gateway.documentation import describe
from charonia_gateway.errors import ApiError
from charonia_gateway.record import REQUEST_ID_HEADER, record_of
from charonia_gateway.schemas.responses import Replayed

router = APIRouter()


class ReplayRequest(BaseModel):
    """POST /v1/replay. A line of the request log has these fields. Its other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)
    operation: ClassVar[str] = "replay"

    path: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/interactive"
    ] = Field(description="of the logged request")
    body: str = Field(description="the body of the logged request")
    seeds: dict[int, int] = Field(
        default_factory=dict,
        description="the seeds of prompts without one, by the index of the prompt's first response",
    )
    prompt_time: str | None = Field(
        None, max_length=40, description="the local time that the chat template shows; default: now"
    )


@router.post(
    "/v1/replay",
    summary="Run a logged request again, and return its tokens",
    tags=["service"],
    **describe(
        ReplayRequest,
        Replayed,
        {"a completion": {"path": "/v1/completions", "body": '{"model": "MODEL", "prompt": "Hi"}', "seeds": {"0": 7}}},
        stream=None,
        errors={410: "the server of the session's history takes no requests"},
    ),
)
async def replay(request: Request, gateway: GatewayState) -> JSONResponse:
    """The request runs as on its own path, streams included. Only its tokens are returned."""
    asked = parse(ReplayRequest, await read_body(request, gateway.settings.max_body_bytes))
    record = record_of(request.scope)
    record.given_seeds = asked.seeds
    record.replays = True
    record.prompt_time = asked.prompt_time or record.prompt_time
    record.tokens = {}
    unread: list[Message] = [{"type": "http.request", "body": asked.body.encode(), "more_body": False}]
    start: Message = {}
    body = b""

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    async def send(message: Message) -> None:
        nonlocal body
        start.update(message if message["type"] == "http.response.start" else {})
        if start["status"] != 200:
            body += message.get("body", b"")

    # `route` stays /v1/replay, for metrics and the access log.
    inner = {**request.scope, "path": asked.path, "raw_path": asked.path.encode()}
    inner["state"] = {**request.scope["state"], "send": send}
    await request.app.router(inner, receive, send)
    if inner["state"].get("disconnected"):
        raise ClientDisconnect
    if start["status"] != 200:
        error, retry = json.loads(body)["error"], Headers(raw=start["headers"]).get("retry-after")
        raise ApiError(
            start["status"], error["message"], type=error["type"], code=error.get("code"),
            headers={"Retry-After": retry} if retry else None,
        )  # fmt: skip
    result = record.result()
    if result is None:
        raise ApiError(
            record.failed_status or 400,
            f"the replayed request has no complete response ({record.error or 'it generates nothing'})",
            code=record.error or "no_response",
        )
    return JSONResponse(result, headers={REQUEST_ID_HEADER: record.request_id})
