"""POST /v1/completions"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from charonia_client import GenerateRequest, GenerateResponse, TokenizeRequest
from charonia_client.offload import offload
from fastapi import APIRouter, Request, Response

from charonia_gateway.context import GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.engine import Engine
from charonia_gateway.logprobs import CompletionLogprobs, count_entries, joined
from charonia_gateway.schemas.requests import CompletionRequest
from charonia_gateway.schemas.responses import Completion
from charonia_gateway.sse import DONE, TEXT, EventStream, TextEvents, event, while_connected
from charonia_gateway.whole import whole_answer

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
            "log probabilities of the prompt": {"prompt": "Once upon", "echo": True, "max_tokens": 0, "logprobs": 1},
            "streamed": {"prompt": "Once upon a time", "max_tokens": 32, "stream": True},
        },
    ),
)
async def completions(request: Request, gateway: GatewayState) -> Response:
    """OpenAI's completions: the model gets the text or the token ids unchanged, without a chat template."""
    body = await gateway.read(request, CompletionRequest)
    await gateway.check_choices(body.choices_made)
    requests = body.engine_requests()
    if not body.stream:
        gateway.check_logprobs(requests)
    head = Head(gateway, request, body, "cmpl-")
    if body.stream:
        return EventStream(_stream(body, requests, head), head.headers, heartbeat_s=gateway.settings.heartbeat_s)
    return await while_connected(request, _whole(body, requests, head))


class _Choices:
    """The texts and log probabilities of one request's choices. With echo, the prompt precedes each choice."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[str]) -> None:
        """prompts: the texts of the prompts, if echo is set."""
        self._body = body
        self._prompts_text = prompts
        self.count = len(body.prompt) * body.choices_per_prompt
        self._begun = [False] * self.count
        # With echo, each token has an entry, because clients count tokens by position.
        every = bool(body.echo)
        self._logprobs = [CompletionLogprobs(every) for _ in range(self.count)] if body.logprobs is not None else None
        # For echo with log probabilities, by prompt: the part with the prompt's log probabilities, which only the first
        # choice has; and the parts of other choices that arrived before it.
        self._needs_prompt = bool(body.echo and self._logprobs)
        self._prompts: dict[int, GenerateResponse] = {}
        self._held: dict[int, list[tuple[int, GenerateResponse]]] = {}

    def ready(self, index: int, part: GenerateResponse) -> Sequence[tuple[int, GenerateResponse]]:
        """The parts that can be sent after this part has arrived, with the indices of their choices."""
        if not self._needs_prompt:
            return ((index, part),)
        number = index // self._body.choices_per_prompt
        if part.prompt_ids:
            self._prompts[number] = part
        if number in self._prompts:
            return (*self._held.pop(number, ()), (index, part))
        self._held.setdefault(number, []).append((index, part))
        return ()

    def of(self, index: int, part: GenerateResponse) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and log probabilities of a ready part."""
        text = "" if self._body.prompt_only else part.text
        number = index // self._body.choices_per_prompt
        first, self._begun[index] = not self._begun[index], True
        if first and self._body.echo:
            text = self._prompts_text[number] + text
        if self._logprobs is None:
            return text, None
        rows = []
        if first and self._needs_prompt:
            exact = not isinstance(self._body.prompt[number], str)
            rows.append(self._logprobs[index].of_prompt(self._prompts[number], self._prompts_text[number], exact=exact))
        if not self._body.prompt_only:
            rows.append(self._logprobs[index].of(part))
        return text, joined(rows) if rows else None

    def finish_reason(self, part: GenerateResponse) -> str | None:
        return "length" if part.finish_reason and self._body.prompt_only else part.finish_reason


async def _echoed(engine: Engine, body: CompletionRequest) -> list[str]:
    """The prompts' texts, if echo is set."""
    if not body.echo:
        return []

    async def text_of(prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return (await engine.pool.tokenize(TokenizeRequest(prompt_token_ids=prompt))).text

    return list(await asyncio.gather(*map(text_of, body.prompt)))


async def _whole(body: CompletionRequest, requests: Sequence[GenerateRequest], head: Head) -> Response:
    shown = _Choices(body, await _echoed(head.engine, body))
    usage = head.usage(body.choices_per_prompt, shown.count, prompt_only=body.prompt_only)
    answers = await head.engine.complete(requests, head.engine_id)
    for place, whole in enumerate(answers):
        usage.see(place, whole)

    def choices() -> Iterator[tuple[dict[str, Any], dict[str, list[Any]] | None]]:
        for place, whole in enumerate(answers):
            for index, answer in shown.ready(place, whole):
                text, logprobs = shown.of(index, answer)
                yield {"index": index, "text": text, "finish_reason": shown.finish_reason(answer)}, logprobs

    fields = head.of("text_completion", usage=usage.to_json(), **head.timings(usage))
    return await whole_answer(fields, choices(), sum(map(count_entries, answers)), head.headers)


async def _stream(
    body: CompletionRequest, requests: Sequence[GenerateRequest], head: Head
) -> AsyncGenerator[bytes, None]:
    """Yield one chunk per piece of text. The last chunk of a choice has the finish reason."""
    shown = _Choices(body, await _echoed(head.engine, body))
    usage = head.usage(body.choices_per_prompt, shown.count, prompt_only=body.prompt_only)
    # This is the hot path: one dictionary is reused for all chunks.
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    chunk = head.of("text_completion", choices=[choice])
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    if with_usage:
        chunk["usage"] = None
    only_text = not (body.logprobs is not None or body.prompt_only or body.timings_per_token)
    texts: dict[int, TextEvents] = {}  # for choices that have begun and have only text until their end
    async with aclosing(head.engine.stream(requests, head.engine_id)) as parts:
        async for come in parts:
            usage.see(come.index, come)
            if come.index in texts and not come.finish_reason:
                if come.text:
                    yield texts[come.index].event(come.text)
                continue
            chunk["system_fingerprint"] = head.system_fingerprint
            for index, part in shown.ready(come.index, come):
                choice["index"] = index
                choice["text"], choice["logprobs"] = await offload(count_entries(part), shown.of, index, part)
                choice["finish_reason"] = shown.finish_reason(part)
                if body.timings_per_token:
                    chunk["timings"] = head.timings_so_far(usage, part)
                elif choice["finish_reason"] and usage.ended:
                    chunk |= head.timings(usage)
                # A special token has no text, but it has a log probability.
                if choice["text"] or choice["finish_reason"] or (choice["logprobs"] or {}).get("tokens"):
                    yield event(chunk)
                if only_text and not choice["finish_reason"]:
                    choice["text"] = TEXT
                    texts[index] = TextEvents(chunk)
    if with_usage:
        yield event({**chunk, "choices": [], "usage": usage.to_json()}) + DONE
    else:
        yield DONE
