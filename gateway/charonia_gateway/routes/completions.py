"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from charonia_gateway.context import Gateway, GatewayState, Head, Usage
from charonia_gateway.documentation import describe
from charonia_gateway.engine import Engine
from charonia_gateway.logprobs import CompletionLogprobs
from charonia_gateway.schemas.requests import CompletionRequest
from charonia_gateway.schemas.responses import Completion
from charonia_gateway.sse import DONE, EventStream, event, while_connected

router = APIRouter()


@router.post(
    "/v1/completions",
    summary="Continue a text",
    tags=["OpenAI"],
    **describe(
        CompletionRequest,
        Completion,
        {
            "whole": {"prompt": "Once upon a time", "max_tokens": 32},
            "several": {"prompt": ["One, two,", "Red, green,"], "n": 2, "seed": 7, "temperature": 0.8},
            "streamed": {"prompt": "Once upon a time", "max_tokens": 32, "stream": True},
        },
    ),
)
async def completions(request: Request, gateway: GatewayState) -> Response:
    """OpenAI's completions: the text goes to the model as it is, without a chat template."""
    body = await gateway.read(request, CompletionRequest)
    requests = body.engine_requests()
    gateway.check_choices(requests)
    head = Head(gateway, body, "cmpl")
    if body.stream:
        return EventStream(_stream(gateway.engine, body, requests, head), head.headers)
    return JSONResponse(await while_connected(request, _whole(gateway, body, requests, head)), headers=head.headers)


def _echo(body: CompletionRequest, index: int) -> str:
    return body.prompt[index // body.choices_per_prompt] if body.echo else ""


async def _whole(
    gateway: Gateway, body: CompletionRequest, requests: Sequence[GenerateRequest], head: Head
) -> dict[str, Any]:
    usage = Usage(body.choices_per_prompt, len(requests))
    choices = []
    for index, answer in enumerate(await gateway.engine.complete(requests, head.id)):
        usage.see(index, answer)
        choices.append(
            {
                "index": index,
                "text": _echo(body, index) + answer.text,
                "logprobs": CompletionLogprobs().of(answer) if body.logprobs is not None else None,
                "finish_reason": answer.finish_reason,
            }
        )
    return head.of("text_completion", choices=choices, usage=usage.to_json())


async def _stream(
    engine: Engine, body: CompletionRequest, requests: Sequence[GenerateRequest], head: Head
) -> AsyncGenerator[bytes, None]:
    """One chunk for each piece of text; each choice's last has the finish reason."""
    usage = Usage(body.choices_per_prompt, len(requests))
    # This is the hot path: one dictionary is made, and changed for each chunk.
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    chunk = head.of("text_completion", choices=[choice])
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    if with_usage:
        chunk["usage"] = None
    echoes = [_echo(body, index) for index in range(len(requests))]
    logprobs = [CompletionLogprobs() for _ in requests] if body.logprobs is not None else None
    async with aclosing(engine.stream(requests, head.id)) as parts:
        async for index, part in parts:
            usage.see(index, part)
            if not part.text and not part.finish_reason and not echoes[index]:
                continue
            choice["index"] = index
            choice["text"] = echoes[index] + part.text
            echoes[index] = ""
            choice["logprobs"] = logprobs[index].of(part) if logprobs else None
            choice["finish_reason"] = part.finish_reason
            yield event(chunk)
    if with_usage:
        yield event({**chunk, "choices": [], "usage": usage.to_json()}) + DONE
    else:
        yield DONE
