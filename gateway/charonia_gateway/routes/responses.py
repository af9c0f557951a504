"""POST /v1/responses, and GET and DELETE of those that are stored."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from charonia_client import CharoniaError, GenerateResponse
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import Gateway, GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.errors import ApiError
from charonia_gateway.record import EVENT_HEARTBEAT
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.responses import DeletedResponse, ErrorBody, ResponseBody
from charonia_gateway.sse import EventStream, Format, named_event, while_connected
from charonia_gateway.stored import Stored
from charonia_gateway.usage import Usage

router = APIRouter(tags=["OpenAI"])
_ABSENT: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "it is not stored (any more)"}}


@router.post(
    "/v1/responses",
    summary="Answer a conversation, and go on with a stored one",
    **describe(
        ResponsesRequest,
        ResponseBody,
        {
            "whole": {"input": "What is the capital of France?", "max_output_tokens": 64},
            "stored": {"input": "Hello", "instructions": "You answer briefly.", "store": True},
            "streamed": {"input": [{"role": "user", "content": "Hello"}], "stream": True},
        },
        stream="with stream = true OpenAI's events, from `response.created` to `response.completed`",
    ),
)
async def create_response(request: Request, gateway: GatewayState) -> Response:
    """OpenAI's Responses: text. A model's reasoning is left out. An answer is stored only with `store` = true."""
    body = await gateway.read(request, ResponsesRequest)
    reasons = await gateway.engine.pool.reasons()
    answer = _Answer(gateway, body, Head(gateway, request, body, "resp"), reasons=reasons)
    if body.stream:
        return EventStream(
            answer.stream(), answer.head.headers, answer.format(), heartbeat_s=gateway.settings.heartbeat_s
        )
    return JSONResponse(await while_connected(request, answer.whole()), headers=answer.head.headers)


@router.get(
    "/v1/responses/{id}",
    summary="A stored answer",
    response_model=ResponseBody,
    response_model_exclude_unset=True,
    responses=_ABSENT,
)
async def get_response(id: str, gateway: GatewayState) -> dict[str, Any]:
    return _found(gateway, id).response


@router.delete(
    "/v1/responses/{id}", summary="Forget a stored answer", response_model=DeletedResponse, responses=_ABSENT
)
async def delete_response(id: str, gateway: GatewayState) -> dict[str, Any]:
    """The server forgets the conversation's session when none of its answers is stored any more."""
    entry = _found(gateway, id)
    gateway.responses.remove(id)
    if not gateway.responses.has_session(entry.session_id):
        with contextlib.suppress(CharoniaError):  # a server that could not be told is told later
            await gateway.engine.pool.end_session(entry.session_id)
    return {"id": id, "object": "response", "deleted": True}


def _found(gateway: Gateway, id: str, param: str | None = None) -> Stored:
    entry = gateway.responses.get(id)
    if entry is None:
        raise ApiError(
            404 if param is None else 400,
            f"there is no stored response {id[:100]!r}: it was never stored (store = true), is too old or was deleted",
            param=param,
            code="response_not_found" if param is None else "previous_response_not_found",
        )
    return entry


class _Answer:
    """One answer: the request to the engine, and what the client sees of it."""

    def __init__(self, gateway: Gateway, body: ResponsesRequest, head: Head, *, reasons: bool) -> None:
        """Raises ApiError 400 for a previous answer that is not stored, and for `store` where nothing is."""
        self.head = head
        self._gateway = gateway
        self._body = body
        self._number = 0  # of the next event
        self._usage = head.usage(1, 1)
        self._item_id = f"msg-{uuid.uuid4().hex}"
        if body.store and not gateway.responses.limit:
            raise ApiError(
                400,
                "store: this server stores no responses (CHARONIA_GATEWAY_MAX_RESPONSES is 0); leave store out",
                param="store",
                code="invalid_value",
            )
        before = None
        if body.previous_response_id is not None:
            before = _found(gateway, body.previous_response_id, "previous_response_id")
        self._conversation = [*(before.conversation if before else ()), *body.input]
        # Answers that go on from each other share a session, which has what the engine computed of them.
        kept = f"response-{uuid.uuid4().hex}" if body.store else None
        self._session_id = before.session_id if before else kept
        self._request = body.engine_request(self._conversation, self._session_id, reasons=reasons)

    async def whole(self) -> dict[str, Any]:
        (answer,) = await self._gateway.engine.complete([self._request], self.head.engine_id)
        self._usage.see(0, answer)
        return self._ended(self._text(answer), answer)

    def _text(self, part: GenerateResponse) -> str:
        return part.content if self._request.parsed else part.text

    def format(self) -> Format:
        return Format("text/event-stream", self._error, EVENT_HEARTBEAT)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """One item with one text, which begins with the answer's first part."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        texts: list[str] = []
        started = False
        async with aclosing(self._gateway.engine.stream([self._request], self.head.engine_id)) as parts:
            async for _, part in parts:
                self._usage.see(0, part)
                events = b""
                if not started:
                    started = True
                    begun = self._response("in_progress", [])
                    item = {**self._item("", "in_progress"), "content": []}
                    events += self._event("response.created", response=begun)
                    events += self._event("response.in_progress", response=begun)
                    events += self._event("response.output_item.added", output_index=0, item=item)
                    events += self._event("response.content_part.added", **place, part=_part(""))
                if text := self._text(part):
                    texts.append(text)
                    events += self._event("response.output_text.delta", **place, delta=text, logprobs=[])
                if part.finish_reason:
                    events += self._end("".join(texts), part, place)
                if events:
                    yield events

    def _end(self, text: str, last: GenerateResponse, place: Mapping[str, Any]) -> bytes:
        response = self._ended(text, last)
        events = self._event("response.output_text.done", **place, text=text, logprobs=[])
        events += self._event("response.content_part.done", **place, part=_part(text))
        events += self._event("response.output_item.done", output_index=0, item=response["output"][0])
        return events + self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(data)

    def _error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or error.type, message=error.message, param=error.param)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _ended(self, text: str, last: GenerateResponse) -> dict[str, Any]:
        """The answer at its end. Stores it where the request asks for that."""
        status = "incomplete" if last.finish_reason == "length" else "completed"
        response = self._response(status, [self._item(text, status)])
        response["usage"] = _usage(self._usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store:
            assert self._session_id is not None
            conversation = [*self._conversation, {"role": "assistant", "content": text}]
            response["store"] = self._gateway.responses.add(Stored(response, conversation, self._session_id))
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.fields["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "store": bool(body.store),
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    counts = usage.to_json()
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts.get("completion_tokens_details", {"reasoning_tokens": 0}),
        "total_tokens": counts["total_tokens"],
    }
