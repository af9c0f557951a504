"""POST /v1/responses, and GET, DELETE and cancel for stored responses and responses in the background."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from charonia_client import CharoniaError, GenerateRequest, GenerateResponse
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.background import Background, check_has_ended
from charonia_gateway.context import Gateway, GatewayState, Head
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.errors import ApiError
from charonia_gateway.record import EVENT_HEARTBEAT, Inner, current_key, record_of
from charonia_gateway.response_items import Items
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.response_input import conversation
from charonia_gateway.schemas.responses import DeletedResponse, ResponseBody
from charonia_gateway.sse import EventStream, Format, named_event, while_connected
from charonia_gateway.stored import Stored
from charonia_gateway.usage import Usage

router = APIRouter(tags=["OpenAI"])
_ABSENT = describe_errors({404: "it is not stored, or was deleted"})
_WRONG = describe_errors({400: "a parameter is wrong, or the response was not generated in the background"})


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
    (docs/tools.md). A response is stored only with `store` or `background` = true."""
    body = await gateway.read(request, ResponsesRequest)
    head = Head(gateway, request, body, "resp_")
    pool = head.engine.pool
    info = await pool.model_info() if body.temperature is None or body.top_p is None else {}
    defaults = info.get("default_sampling_parameters") or {}
    before = None
    if body.previous_response_id is not None:
        check_has_ended(gateway.backgrounds.find(body.previous_response_id, _owner()))
        before = await _found(gateway, body.previous_response_id, "previous_response_id")
    answer = _Answer(gateway, body, head, defaults, before, reasons=await pool.reasons())
    if sent := record_of(request.scope).background:
        return _in_background(request, gateway, sent, answer, streams=bool(body.stream))
    if body.stream or body.background:
        return EventStream(
            answer.stream(), answer.head.headers, answer.format(), heartbeat_s=gateway.settings.heartbeat_s
        )
    return JSONResponse(await while_connected(request, answer.whole()), headers=answer.head.headers)


def _in_background(
    request: Request, gateway: Gateway, sent: bytes, answer: _Answer, *, streams: bool
) -> EventStream | JSONResponse:
    """sent: the request's body."""
    gateway.backgrounds.check()
    record = record_of(request.scope)
    holder = record.hand_over() if record.hand_over else None
    inner = Inner(_owner(), record.address, answer.head.id, record.given_id, holder)
    made = Background(answer.response("queued", []), _owner(), streams=streams)
    gateway.backgrounds.start(request.app, made, sent, inner)
    record.in_background = True
    if streams:
        heartbeat_s = gateway.settings.heartbeat_s
        return EventStream(made.follow(-1), answer.head.headers, answer.format(), heartbeat_s=heartbeat_s)
    return JSONResponse(made.response, headers=answer.head.headers)


@router.get(
    "/v1/responses/{id}",
    summary="A stored response, or one in the background",
    responses={200: {"model": ResponseBody}, **_ABSENT, **_WRONG},
)
async def get_response(
    id: str,
    gateway: GatewayState,
    stream: Annotated[
        bool, Query(description="with a response that background and stream = true began: events")
    ] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, description="with stream = true: only the events after this sequence_number")
    ] = None,
) -> Response:
    """The status of a response in the background is queued, in_progress, completed, incomplete, failed or cancelled."""
    if starting_after is not None and not stream:
        raise _wrong("starting_after", "it is for stream = true only: leave it out, or send stream = true")
    background = gateway.backgrounds.find(id, _owner())
    if stream:
        if background is None or not background.streams:
            await _found(gateway, id)
            raise _wrong(
                "stream",
                "this response has no events: only those that began with background and stream = "
                "true have, for some time; leave stream out",
            )
        events = background.follow(-1 if starting_after is None else starting_after)
        return EventStream(events, {}, heartbeat_s=gateway.settings.heartbeat_s)
    found = background.response if background else (await _found(gateway, id)).response
    return JSONResponse(found)


@router.post(
    "/v1/responses/{id}/cancel",
    summary="Cancel a response in the background",
    responses={200: {"model": ResponseBody}, **_ABSENT, **_WRONG},
)
async def cancel_response(id: str, gateway: GatewayState) -> JSONResponse:
    """Has no effect on a response that has ended."""
    background = gateway.backgrounds.find(id, _owner())
    if background:
        await background.cancel()
        return JSONResponse(background.response)
    found = (await _found(gateway, id)).response
    if not found["background"]:
        raise _wrong("id", "only a response that began with background = true can be cancelled")
    return JSONResponse(found)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


@router.delete(
    "/v1/responses/{id}", summary="Delete a stored response", response_model=DeletedResponse, responses=_ABSENT
)
async def delete_response(id: str, gateway: GatewayState) -> dict[str, Any]:
    """The server deletes the conversation's session when its last stored response is deleted. A response in the
    background is cancelled."""
    background = gateway.backgrounds.find(id, _owner())
    if background:
        await background.cancel()
        gateway.backgrounds.forget(id)
        if await gateway.responses.get(id, _owner()) is None:
            return {"id": id, "object": "response", "deleted": True}
    entry = await _found(gateway, id)
    await gateway.responses.remove(entry)
    if not await gateway.responses.has_session(entry.session_id):
        with contextlib.suppress(CharoniaError):  # the session is deleted when its time to live ends
            # A model that was added may be gone since.
            if engine := gateway.engines.get(entry.model or gateway.names.get(entry.response["model"], "")):
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
        self._is_in_progress = False  # the event of that name was sent
        self._stored = False
        self._ignored = ", ".join(body.ignored_parts)[:512]  # OpenAI's limit of a value
        self._usage = head.usage(1, 1)
        if body.is_stored and not gateway.responses.limit:
            name = "store" if body.store else "background"
            raise ApiError(
                400,
                f"{name}: this server stores no responses (CHARONIA_GATEWAY_MAX_RESPONSES is 0); leave {name} out",
                param=name,
                code="invalid_value",
            )
        self._before = before
        self._model = gateway.model_of(body.model) or ""
        names = gateway.names
        model_before = before.response["model"] if before else body.model
        if before and names.get(model_before, model_before) != names.get(body.model, body.model):
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
        if body.with_logprobs:  # the last event of a stream has them all
            gateway.check_logprobs([self._request], streams=False, param="top_logprobs")
        parsed = bool(self._request.parsed)
        self._items = Items(self._event, body.offered(), parsed=parsed, logprobs=body.with_logprobs)

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
            if self._body.background:
                queued = self.response("queued", [])
                yield self._event("response.created", response=queued) + self._event("response.queued", response=queued)
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
        if not self._body.is_stored:
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
        """The events at the first part of a stream. Empty after that."""
        if self._is_in_progress:
            return b""
        self._is_in_progress = True
        response = self.response("in_progress", [])
        created = b"" if self._number else self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

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
        response = self.response(status, self._items.to_json(status))
        response["usage"] = _usage(self._usage)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.is_stored:
            assert request.session_id is not None
            messages = [*self._conversation, *self._items.messages()]
            entry = Stored(response, messages, request.session_id, _owner(), self._model)
            self._stored = await self._gateway.responses.add(entry)
            response["store"] = self._stored
        return events, response

    def response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        reasoning = body.reasoning or {}
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.fields["created"],
            "status": status,
            "background": bool(body.background),
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
            "store": body.is_stored,
            "temperature": self._defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": _shown_format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in body.tools or () if tool["type"] in ("function", "namespace")],
            "top_logprobs": body.top_logprobs or 0,
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
