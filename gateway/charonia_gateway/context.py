"""State that the routes share: settings, engine, and each request's head."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from charonia_client import GenerateRequest, GenerateResponse
from charonia_client.turns import Turns
from fastapi import Depends, Request

from charonia_gateway.body import IGNORED_HEADER, ignored_fields, parse, read_body
from charonia_gateway.drain import Drain
from charonia_gateway.engine import Engine
from charonia_gateway.errors import ApiError
from charonia_gateway.logprobs import MAX_ENTRIES
from charonia_gateway.metrics import Metrics
from charonia_gateway.record import REQUEST_ID_HEADER, current_key, current_owner, current_record, record_of
from charonia_gateway.schemas.interactive import InteractiveRequest
from charonia_gateway.schemas.messages import CountTokensRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.requests import Sampling
from charonia_gateway.schemas.tokenizer import DetokenizeBody, TokenizeBody
from charonia_gateway.settings import Settings
from charonia_gateway.stored import ResponseStore
from charonia_gateway.usage import Usage

ForText = Sampling | InteractiveRequest | CountTokensRequest | ResponsesRequest
Body = TypeVar("Body", bound=ForText | TokenizeBody | DetokenizeBody)
_PROMPT_FIELDS = {"messages", "prompt", "system", "instructions", "input"}
_SMALL_BODY = 1 << 16  # bytes
_MAX_MODEL_CHARACTERS = 100  # of a requested model's name, in logs, spans and errors


@dataclass
class Gateway:
    """The state of the application."""

    settings: Settings
    metrics: Metrics
    drain: Drain
    started: int  # seconds since the epoch
    responses: ResponseStore
    # Adds the models that another process of this gateway has just loaded; this process adds them every second.
    refresh: Callable[[], Awaitable[None]]
    # Changed by add(). Engines by the name of the model, the default first. All names for clients, each with the
    # model's own name.
    engines: dict[str, Engine] = field(default_factory=dict, init=False)
    names: dict[str, str] = field(default_factory=dict, init=False)
    # Python runs one thread at a time. With several large bodies the event loop would wait for each of them.
    parsing: Turns = field(default_factory=lambda: Turns(1))

    def add(self, engines: Mapping[str, Engine]) -> None:
        """Add engines of models, by the models' own names."""
        self.engines.update(engines)
        own = list(self.engines)
        self.names = {**dict.fromkeys(self.settings.model_names, own[0]), **dict(zip(own, own, strict=True))}

    def allows(self, name: str) -> bool:
        """Whether the request's key may use a model, by this name or by the model's own name."""
        key = current_key()
        return key is None or key.allows_model(name) or key.allows_model(self.names.get(name, name))

    def allowed_models(self) -> list[str]:
        """The names that the request's key may use."""
        return [name for name in self.names if self.allows(name)]

    async def find(self, model: str | None) -> Engine:
        """Like engine_of(), but calls refresh() for an unknown model."""
        if model is not None and model not in self.names:
            await self.refresh()
        return self.engine_of(model)

    def engine_of(self, model: str | None) -> Engine:
        """The engine of a model, by name; None: the default model. Raises ApiError 404 for an unknown model, 403 for a
        model that the request's key may not use."""
        names = self.names
        name = next(iter(names)) if model is None else model
        if name not in names:
            shown = name[:_MAX_MODEL_CHARACTERS]
            there = ", ".join(map(repr, self.allowed_models())) or "no model that this key may use"
            raise ApiError(
                404,
                f"the model {shown!r} does not exist; this server has {there}",
                param="model",
                code="model_not_found",
            )
        key = current_key()
        if key and not self.allows(name):
            raise ApiError(
                403,
                f"the key {key.name!r} may not use the model {name!r}: it may use {', '.join(key.models or ())}",
                type="permission_error",
                param="model",
                code="model_not_allowed",
            )
        return self.engines[names[name]]

    async def read(self, request: Request, model: type[Body]) -> Body:
        """Read and check the body of a request for text or tokens. Raises ApiError 400, 403, 404, 413 or 415."""
        raw = await read_body(request, self.settings.max_body_bytes)
        if len(raw) <= _SMALL_BODY:
            body = parse(model, raw)
        else:
            async with self.parsing.turn(current_owner() or ""):
                body = await asyncio.to_thread(_parse_large, model, raw)
        record = record_of(request.scope)
        record.operation = body.operation
        record.names = {} if isinstance(body, TokenizeBody | DetokenizeBody) else body.engine_names
        record.model = None if body.model is None else body.model[:_MAX_MODEL_CHARACTERS]
        if self.settings.log_prompts:
            record.prompt = body.model_dump(include=_PROMPT_FIELDS, exclude_none=True)
            record.answers = {}
        engine = await self.find(body.model)
        if isinstance(body, Sampling) and body.logit_bias:
            _check_biases(body.logit_bias, (await engine.pool.model_info()).get("vocab_size"))
        if self.settings.log_requests and body.operation != "tokenize" and record.tokens is None:  # not a replay
            record.body, record.tokens = raw, {}
        return body

    async def check_choices(self, choices: int) -> None:
        """Raises ApiError 400 if a request asks for too many responses, and 429 if its key has too many running."""
        if choices > self.settings.max_choices:
            raise ApiError(
                400,
                f"prompts times n (or best_of) are {choices} answers: ask for at most {self.settings.max_choices} at "
                "once",
                param="n",
                code="invalid_value",
            )
        record = current_record.get()
        if record and record.hold:
            await record.hold(choices)

    def check_logprobs(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises ApiError 400 if responses without streaming could have too many log probabilities. Without max_tokens
        the limit is checked in the response (Pool.begin)."""
        entries = sum(
            (request.n or 1) * request.max_tokens * (request.logprobs + 1)
            for request in requests
            if request.logprobs is not None and request.max_tokens is not None
        )
        if entries > MAX_ENTRIES:
            # Only the end of a request with best_of says which responses are the best, so it cannot be a stream.
            stream = "" if any(request.best_of for request in requests) else ", or send stream = true"
            raise ApiError(
                400,
                f"answers times max_tokens times (top_logprobs + 1) are {entries} log probabilities: ask for at most "
                f"{MAX_ENTRIES} without streaming{stream}",
                param="logprobs",
                code="invalid_value",
            )


def _parse_large(model: type[Body], raw: bytes) -> Body:
    """Parse a body, and compute what reads all its messages. Other requests go on while a thread does this."""
    body = parse(model, raw)
    for cached in ("ignored_parts", "conversation"):
        getattr(body, cached, None)
    return body


def _check_biases(biases: Mapping[int, float], vocab_size: int | None) -> None:
    """vocab_size: None if it is not known; then the engine checks the biases."""
    if vocab_size is not None and (token := max(biases)) >= vocab_size:
        raise ApiError(
            400,
            f"logit_bias: the vocabulary has no token {token}: send token ids from 0 to {vocab_size - 1}",
            param="logit_bias",
            code="invalid_value",
        )


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


GatewayState = Annotated[Gateway, Depends(gateway_of)]


class Head:
    """The fields that all parts of one response share."""

    def __init__(self, gateway: Gateway, request: Request, body: ForText, prefix: str) -> None:
        self._record = record_of(request.scope)
        self.id = self._record.name(prefix)
        self._with_timings = bool(body.timings)
        self.engine = gateway.engine_of(body.model)
        self.engine_id = self._record.engine_id  # prefix of the engine's request ids
        self.fields = {
            "id": self.id,
            "object": "",
            "created": int(time.time()),
            "model": body.model,
        }
        self.headers = {REQUEST_ID_HEADER: self._record.request_id}
        if ignored := ignored_fields(body):
            self.headers[IGNORED_HEADER] = ", ".join(ignored)

    @property
    def system_fingerprint(self) -> str:
        """The fingerprint of the server that responds. Empty until its first part arrives."""
        return self._record.system_fingerprint

    def of(self, kind: str, **more: Any) -> dict[str, Any]:
        return {**self.fields, "object": kind, "system_fingerprint": self.system_fingerprint, **more}

    def usage(self, choices_per_prompt: int, choices: int, *, prompt_only: bool = False) -> Usage:
        """The usage of the request's choices, for the response and for its record."""
        usage = self._record.usage = Usage(choices_per_prompt, choices, prompt_only=prompt_only)
        return usage

    def timings(self, usage: Usage) -> dict[str, Any]:
        """The response's field `timings`, if requested."""
        return {"timings": self._with_resumes(usage.timings())} if self._with_timings else {}

    def timings_so_far(self, usage: Usage, part: GenerateResponse) -> dict[str, Any] | None:
        """The field `timings` of a stream's chunk."""
        return self._with_resumes(usage.timings_so_far(part))

    def _with_resumes(self, timings: dict[str, Any] | None) -> dict[str, Any] | None:
        if timings and self._record.num_resumes:
            timings["resumes"] = self._record.num_resumes
        return timings
