"""POST /v1/responses, and GET and DELETE for stored responses."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from charonia_client import CharoniaError, GenerateRequest, GenerateResponse
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import Gateway, GatewayState, Head
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.errors import ApiError
from charonia_gateway.record import EVENT_HEARTBEAT, current_key
from charonia_gateway.response_items import Items
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.response_input import conversation
from charonia_gateway.schemas.responses import DeletedResponse, ResponseBody
from charonia_gateway.sse import EventStream, Format, named_event, while_connected
from charonia_gateway.stored import Stored
from charonia_gateway.usage import Usage

router = APIRouter(tags=["OpenAI"])
_ABSENT = describe_errors({404: "it is not stored, or was deleted"})


@router.post(
    "/v1/responses",
    summary="Respond to a conversation, or continue a stored one",
    **describe(
        ResponsesRequest,
        ResponseBody,
        {
            "whole": {"input": "What is the capital of France?", "max_output_tokens": 64},
            "stored": {"input": "Hello", "instructions": "You answer briefly.", "store": True},
            "streamed": {"input": [{"role": "user", "content": "Hello"}], "stream": True},
            "tools": {
                "input": "How is the weather in Paris?",
                "tools": [
                    {
                        "type": "function",
                        "name": "get_weather",
                        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
                    }
                ],
            },
        },
        stream="with stream = true OpenAI's events from `response.created` to `response.completed`",
    ),
)
async def create_response(request: Request, gateway: GatewayState) -> Response:
    """OpenAI's Responses. Tool calls and reasoning are parsed in the format of the model's chat template
    (docs/tools.md). A response is stored only with `store` = true."""
    body = await gateway.read(request, ResponsesRequest)
    head = Head(gateway, request, body, "resp_")
    pool = head.engine.pool
    info = await pool.model_info() if body.temperature is None or body.top_p is None else {}
    defaults = info.get("default_sampling_parameters") or {}
    before = None
    if body.previous_response_id is not None:
        before = await _found(gateway, body.previous_response_id, "previous_response_id")
    answer = _Answer(gateway, body, head, defaults, before, reasons=await pool.reasons())
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
    return (await _found(gateway, id)).response


@router.delete(
    "/v1/responses/{id}", summary="Delete a stored response", response_model=DeletedResponse, responses=_ABSENT
)
async def delete_response(id: str, gateway: GatewayState) -> dict[str, Any]:
    """The server deletes the conversation's session when its last stored response is deleted."""
    entry = await _found(gateway, id)
    await gateway.responses.remove(entry)
    if not await gateway.responses.has_session(entry.session_id):
        with contextlib.suppress(CharoniaError):  # the session is deleted when its time to live ends
            # A model that was added may be gone since.
            if engine := gateway.engines.get(gateway.names.get(entry.response["model"], "")):
                await engine.end_session(entry.session_id)
    return {"id": id, "object": "response", "deleted": True}


def _owner() -> str | None:
    """The owner of the responses that the request may read: its key."""
    key = current_key()
    return key.id if key else None


async def _found(gateway: Gateway, id: str, param: str | None = None) -> Stored:
    entry = await gateway.responses.get(id, _owner())
    if entry is None:
        raise ApiError(
            404 if param is None else 400,
            f"there is no stored response {id[:100]!r}: it was created without store = true, is too old or was "
            "deleted; send the conversation as input",
            param=param,
            code="response_not_found" if param is None else "previous_response_not_found",
        )
    return entry


class _Answer:
    """One response: the engine's request, and the response for the client."""

    def __init__(
        self,
        gateway: Gateway,
        body: ResponsesRequest,
        head: Head,
        defaults: Mapping[str, float],
        before: Stored | None,
        *,
        reasons: bool,
    ) -> None:
        """defaults: the model's sampling defaults, which the response contains. before: the response that it continues.

        Raises ApiError 400 if `before` is from another model, if an output has no matching call, and for `store` if
        responses are not stored."""
        self.head = head
        self._gateway = gateway
        self._body = body
        self._defaults = defaults
        self._number = 0  # number of the next event
        self._stored = False
        self._ignored = ", ".join(body.ignored_parts)[:512]  # OpenAI's limit of a value
        self._usage = head.usage(1, 1)
        if body.store and not gateway.responses.limit:
            raise ApiError(
                400,
                "store: this server stores no responses (CHARONIA_GATEWAY_MAX_RESPONSES is 0); leave store out",
                param="store",
                code="invalid_value",
            )
        self._before = before
        names = gateway.names
        if before and names.get(before.response["model"]) != names[body.model]:
            raise ApiError(
                400,
                f"previous_response_id: that response is from the model {before.response['model']!r}, and model is "
                f"{body.model!r}: use the same model, or send the conversation as input",
                param="previous_response_id",
                code="invalid_value",
            )
        try:
            self._conversation = conversation(before.conversation if before else (), body.input)
        except KeyError as error:
            call_id = str(error.args[0])[:100]
            raise ApiError(
                400,
                f"input: there is no function_call before the function_call_output of {call_id!r}: send it, or "
                "previous_response_id",
                param="input",
                code="invalid_value",
            ) from None
        self._request = body.engine_request(self._conversation, None, reasons=reasons)
        self._items = Items(self._event, body.offered(), parsed=bool(self._request.parsed))

    async def whole(self) -> dict[str, Any]:
        async with self._in_session() as request:
            (answer,) = await self.head.engine.complete([request], self.head.engine_id)
            self._usage.see(0, answer)
            self._items.read(answer)
            return (await self._final_events(answer, request))[1]

    def format(self) -> Format:
        return Format("text/event-stream", self._error, EVENT_HEARTBEAT)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with (
            self._in_session() as request,
            aclosing(self.head.engine.stream([request], self.head.engine_id)) as parts,
        ):
            async for part in parts:
                self._usage.see(0, part)
                if events := self._first_events() + self._items.read(part) + await self._last_events(part, request):
                    yield events

    @contextlib.asynccontextmanager
    async def _in_session(self) -> AsyncIterator[GenerateRequest]:
        """Yield the engine's request, with a session if the response will be stored. A chain of responses shares a
        session, which has their KV cache. The engine runs a session's requests in sequence. If several requests
        continue the same response, only the first one uses its session. If the first one is not stored in the end, a
        later one may use it."""
        if not self._body.store:
            yield self._request
            return
        before, store = self._before, self._gateway.responses
        if before is None or not await store.try_continue(before):
            yield replace(self._request, session_id=f"response-{uuid.uuid4().hex}")
            return
        try:
            yield replace(self._request, session_id=before.session_id)
        finally:
            await store.continued(before, stored=self._stored)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(data)

    def _error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code or error.type, message=error.message, param=error.param)

    def _first_events(self) -> bytes:
        """The first events of a stream. Empty after that."""
        if self._number:
            return b""
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    async def _last_events(self, part: GenerateResponse, request: GenerateRequest) -> bytes:
        """The last events of a stream. Empty if `part` is not the last part."""
        if not part.finish_reason:
            return b""
        events, response = await self._final_events(part, request)
        return events + self._event(f"response.{response['status']}", response=response)

    async def _final_events(self, last: GenerateResponse, request: GenerateRequest) -> tuple[bytes, dict[str, Any]]:
        """The last item's last events, and the response. Stores the response if requested."""
        status = "incomplete" if last.finish_reason == "length" else "completed"
        events = self._items.end(status)
        response = self._response(status, self._items.to_json(status))
        response["usage"] = _usage(self._usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.store:
            assert request.session_id is not None
            messages = [*self._conversation, *self._items.messages()]
            entry = Stored(response, messages, request.session_id, _owner())
            self._stored = await self._gateway.responses.add(entry)
            response["store"] = self._stored
        return events, response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        reasoning = body.reasoning or {}
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
            "metadata": {**({"ignored": self._ignored} if self._ignored else {}), **(body.metadata or {})},
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": bool(body.store),
            "temperature": self._defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": _shown_format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in body.tools or () if tool["type"] in ("function", "namespace")],
            "top_p": self._defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        inner = [_shown_tool(one) for one in tool["tools"] if one["type"] == "function"]
        return {"type": "namespace", "name": tool["name"], "description": tool.get("description"), "tools": inner}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: tool.get(name) for name in names}}


def _shown_format(body: ResponsesRequest) -> dict[str, Any]:
    form = (body.text or {}).get("format") or {"type": "text"}
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {"type": "json_schema", **{name: form.get(name) for name in ("name", "description", "schema", "strict")}}


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
