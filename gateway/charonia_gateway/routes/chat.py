"""POST /v1/chat/completions"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest, GenerateResponse
from fastapi import APIRouter, Request, Response

from charonia_gateway.answer_deltas import deltas, finish_reason, message
from charonia_gateway.context import GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.engine import Engine
from charonia_gateway.logprobs import chat_logprobs, count_entries
from charonia_gateway.schemas.requests import ChatRequest
from charonia_gateway.schemas.responses import ChatCompletion
from charonia_gateway.sse import DONE, TEXT, EventStream, TextEvents, event, while_connected
from charonia_gateway.whole import whole_answer

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    tags=["OpenAI"],
    **describe(
        ChatRequest,
        ChatCompletion,
        {
            "whole": {"messages": [{"role": "user", "content": "Hello, who are you?"}]},
            "streamed": {
                "messages": [
                    {"role": "system", "content": "You answer briefly."},
                    {"role": "user", "content": "What is the capital of France?"},
                ],
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
    ),
)
async def chat_completions(request: Request, gateway: GatewayState) -> Response:
    """OpenAI's chat completions. Tool calls and reasoning are parsed in the format of the model's chat template
    (docs/tools.md)."""
    body = await gateway.read(request, ChatRequest)
    await gateway.check_choices(body.choices_made)
    head = Head(gateway, request, body, "chatcmpl-")
    formats = await head.engine.pool.answer_formats()
    requests = [body.engine_request(reasons=bool(formats.get("reasoning")))]
    if not body.stream:
        gateway.check_logprobs(requests)
    if body.renew_session and body.session_id is not None:
        await head.engine.end_session(body.session_id)
    if body.stream:
        return EventStream(
            _stream(head.engine, body, requests, head), head.headers, heartbeat_s=gateway.settings.heartbeat_s
        )
    return await while_connected(request, _whole(body, requests, head))


async def _whole(body: ChatRequest, requests: Sequence[GenerateRequest], head: Head) -> Response:
    usage = head.usage(body.choices_per_prompt, body.choices_per_prompt)
    answers = await head.engine.complete(requests, head.engine_id)
    for index, answer in enumerate(answers):
        usage.see(index, answer)
    choices = (
        (
            {
                "index": index,
                "message": message(answer)
                if requests[0].parsed
                else {"role": "assistant", "content": answer.text, "refusal": None},
                "finish_reason": finish_reason(
                    answer.finish_reason, bool(answer.tool_calls) and not body.names_function
                ),
            },
            {"content": chat_logprobs(answer), "refusal": None} if body.logprobs else None,
        )
        for index, answer in enumerate(answers)
    )
    fields = head.of("chat.completion", usage=usage.to_json(), **head.timings(usage))
    return await whole_answer(fields, choices, sum(map(count_entries, answers)), head.headers)


def _progress(part: GenerateResponse) -> dict[str, Any]:
    """How much of the prompt is computed. The names are llama.cpp's."""
    timings = part.timings
    return {
        "total": part.num_input_tokens,
        "cache": part.num_cached_tokens,
        "processed": part.num_computed_tokens,
        "time_ms": round(timings.total_ms - timings.queue_ms) if timings else 0,
    }


async def _stream(
    engine: Engine, body: ChatRequest, requests: Sequence[GenerateRequest], head: Head
) -> AsyncGenerator[bytes, None]:
    """Yield one chunk per piece of text, reasoning or call. The first chunk of a choice has the role, the last one has
    the finish reason."""
    usage = head.usage(body.choices_per_prompt, body.choices_per_prompt)
    # This is the hot path: one dictionary is reused for all chunks.
    choice: dict[str, Any] = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
    chunk = head.of("chat.completion.chunk", choices=[choice])
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    if with_usage:
        chunk["usage"] = None
    begun = [False] * body.choices_per_prompt
    called = [False] * body.choices_per_prompt
    parsed = requests[0].parsed
    held: list[list[dict[str, Any]]] = [[] for _ in begun]  # log probabilities of text that is not yet sent
    texts: dict[int, TextEvents] = {}  # for choices that have begun and have only text until their end
    async with aclosing(engine.stream(requests, head.engine_id)) as parts:
        async for part in parts:
            index = choice["index"] = part.index
            usage.see(index, part)
            if index in texts and not part.finish_reason and not part.num_computed_tokens:
                if part.text:
                    yield texts[index].event(part.text)
                continue
            events = b""
            if body.timings_per_token:
                chunk["timings"] = head.timings_so_far(usage, part)
            if not begun[index]:
                begun[index] = True
                chunk["system_fingerprint"] = head.system_fingerprint
                choice["delta"] = {"role": "assistant", "content": "", "refusal": None}
                events += event(chunk)
                if not (parsed or body.logprobs or body.timings_per_token):
                    choice["delta"] = {"content": TEXT}
                    texts[index] = TextEvents(chunk)
            if part.num_computed_tokens:
                choice["delta"] = {}
                yield events + event({**chunk, "prompt_progress": _progress(part)})
                continue
            called[index] |= bool(part.tool_calls) and not body.names_function
            if body.logprobs:
                held[index] += chat_logprobs(part)
            for delta in deltas(part) if parsed else ({"content": part.text},) if part.text else ():
                choice["delta"] = delta
                choice["logprobs"] = {"content": held[index], "refusal": None} if body.logprobs else None
                events += event(chunk)
                choice["logprobs"] = None
                held[index] = []
            if part.finish_reason:
                choice["delta"] = {}
                choice["logprobs"] = {"content": held[index], "refusal": None} if held[index] else None
                choice["finish_reason"] = finish_reason(part.finish_reason, called[index])
                if usage.ended and not body.timings_per_token:
                    chunk |= head.timings(usage)
                events += event(chunk)
                choice["finish_reason"] = choice["logprobs"] = None
            if events:
                yield events
    if with_usage:
        yield event({**chunk, "choices": [], "usage": usage.to_json()}) + DONE
    else:
        yield DONE
