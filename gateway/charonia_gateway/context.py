"""State that the routes share: settings, engine, and each request's head."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from charonia_client import GenerateRequest, GenerateResponse
from charonia_client.turns import Turns
from fastapi import Depends, Request

from charonia_gateway.background import Backgrounds
from charonia_gateway.batches.store import BatchStore
from charonia_gateway.batches.worker import BatchWorker
from charonia_gateway.body import IGNORED_HEADER, ignored_fields, parse, read_body
from charonia_gateway.drain import Drain
from charonia_gateway.engine import Engine
from charonia_gateway.errors import ApiError, unavailable
from charonia_gateway.keys import Key
from charonia_gateway.logprobs import MAX_ENTRIES
from charonia_gateway.metrics import Metrics
from charonia_gateway.record import REQUEST_ID_HEADER, current_key, current_owner, current_record, record_of
from charonia_gateway.schemas.interactive import InteractiveRequest
from charonia_gateway.schemas.messages import CountTokensRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.pooling import PoolingBody
from charonia_gateway.schemas.requests import Sampling
from charonia_gateway.schemas.tokenizer import DetokenizeBody, TokenizeBody
from charonia_gateway.settings import Settings
from charonia_gateway.stored import ResponseStore
from charonia_gateway.usage import Usage

log = logging.getLogger("charonia_gateway")

ForText = Sampling | InteractiveRequest | CountTokensRequest | ResponsesRequest | PoolingBody
Body = TypeVar("Body", bound=ForText | TokenizeBody | DetokenizeBody)
_PROMPT_FIELDS = {"messages", "prompt", "system", "instructions", "input", "query", "documents", "text_1", "text_2"}
_SMALL_BODY = 1 << 16  # bytes
_MAX_MODEL_CHARACTERS = 100  # of a requested model's name, in logs, spans and errors


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter. model: its model's own name."""

    name: str
    model: str
    path: str
    fingerprint: str


@dataclass
class Gateway:
    """The state of the application."""

    settings: Settings
    metrics: Metrics
    drain: Drain
    started: int  # seconds since the epoch
    responses: ResponseStore
    backgrounds: Backgrounds
    batches: BatchStore | None  # None: the server has no folder for them
    # Adds the models that another process of this gateway has just loaded; this process adds them every second.
    refresh: Callable[[], Awaitable[None]]
    # Changed by add(). Engines by the name of the model, the default first. All names for clients, each with the
    # model's own name.
    engines: dict[str, Engine] = field(default_factory=dict, init=False)
    names: dict[str, str] = field(default_factory=dict, init=False)
    # By name. Changed by find_adapters().
    adapters: dict[str, Adapter] = field(default_factory=dict, init=False)
    _hidden: set[tuple[str, str]] = field(default_factory=set, init=False)  # (model, adapter) whose name is in use
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _asked: float = field(default=-1.0, init=False)  # when the last complete find_adapters() began
    _all_known: bool = field(default=False, init=False)  # its result
    batch_worker: BatchWorker | None = field(default=None, init=False)
    # Python runs one thread at a time. With several large bodies the event loop would wait for each of them.
    parsing: Turns = field(default_factory=lambda: Turns(1))

    def add(self, engines: Mapping[str, Engine]) -> None:
        """Add engines of models, by the models' own names."""
        self.engines.update(engines)
        own = list(self.engines)
        self.names = {**dict.fromkeys(self.settings.model_names, own[0]), **dict(zip(own, own, strict=True))}

    @property
    def is_reachable(self) -> bool:
        """Whether a server responds, even if no model is loaded."""
        return any(endpoint.reachable for engine in self.engines.values() for endpoint in engine.pool.endpoints)

    def wake_batches(self) -> None:
        """A batch is new, or was cancelled. A worker in another process finds it by itself."""
        if self.batch_worker:
            self.batch_worker.wake()

    def refused_key(self, name: str) -> Key | None:
        """The request's key if it may not use a model, neither by this name nor by the model's own name."""
        key = current_key()
        allowed = key is None or key.allows_model(name) or key.allows_model(self.model_of(name) or name)
        return None if allowed else key

    def model_of(self, name: str) -> str | None:
        """The own name of the model that a name, also of a LoRA adapter, stands for."""
        adapter = self.adapters.get(name)
        return self.names.get(name) or (adapter.model if adapter else None)

    def allows(self, name: str) -> bool:
        return self.refused_key(name) is None

    def allowed_models(self) -> list[str]:
        """The names that the request's key may use."""
        return [name for name in self.names if self.allows(name)]

    async def find(self, model: str | None) -> Engine:
        """Like engine_of(), but calls refresh() for an unknown model, and looks for an adapter of this name. Raises
        ApiError 503 if a server that may have the adapter does not respond."""
        if model is None or self.model_of(model):
            return self.engine_of(model)
        await self.refresh()
        if model in self.names:
            return self.engine_of(model)
        all_known = await self.find_adapters()
        own, first = next(iter(self.engines.items()))
        # Only the first model has adapters as soon as it is loaded.
        if model not in self.adapters and first.waits_for_load and not first.pool.has_listed and self.allows(own):
            await first.load()
            all_known = await self.find_adapters()
        if model not in self.adapters and not all_known:
            text = (
                f"no model is called {model[:_MAX_MODEL_CHARACTERS]!r}, and a server that may have an adapter of this "
            )
            raise unavailable(f"{text}name does not respond: try again", code="not_ready")
        return self.engine_of(model)

    async def find_adapters(self) -> bool:
        """Ask the servers for their LoRA adapters. Returns False if a server does not respond; then its last known
        adapters stay. Concurrent calls share a query that begins after them."""
        called = time.monotonic()
        async with self._asking:
            if self._asked < called:
                began, names = time.monotonic(), list(self.engines)
                found = await asyncio.gather(*(self.engines[name].pool.adapters() for name in names))
                self._take_adapters(dict(zip(names, (listed for listed, _ in found), strict=True)))
                self._asked, self._all_known = began, all(known for _, known in found)
            return self._all_known

    def _take_adapters(self, listed: Mapping[str, Mapping[str, dict[str, Any]]]) -> None:
        """listed: by model and name. If two models have adapters of one name, the name keeps its model."""
        owners = {name: one.model for name, one in self.adapters.items() if name in listed.get(one.model, ())}
        for model, names in listed.items():
            for name in names:
                owners.setdefault(name, model)
        self.adapters = {
            name: Adapter(name, owners[name], one["path"], one["fingerprint"])
            for model, names in listed.items()
            for name, one in names.items()
            if owners[name] == model and name not in self.names
        }
        hidden = {
            (model, name)
            for model, names in listed.items()
            for name in names
            if name in self.names or owners[name] != model
        }
        for model, name in hidden - self._hidden:
            log.warning(
                "the adapter %r of the model %r cannot be used, because another model or adapter has its name: unload "
                "it, and load it by another name",
                name, model,
            )  # fmt: skip
        self._hidden = hidden

    async def _find_again(self, adapter: str) -> Engine:
        """Raises the errors of engine_of()."""
        await self.find_adapters()
        return self.engine_of(adapter)

    def engine_of(self, model: str | None) -> Engine:
        """The engine of a model, by name; None: the default model. Raises ApiError 404 for an unknown model, 403 for a
        model that the request's key may not use."""
        names = self.names
        name = next(iter(names)) if model is None else model
        if name not in names and name not in self.adapters:
            shown = name[:_MAX_MODEL_CHARACTERS]
            allowed = (*self.allowed_models(), *filter(self.allows, self.adapters))
            there = ", ".join(map(repr, allowed)) or "no model that this key may use"
            raise ApiError(
                404,
                f"the model {shown!r} does not exist; this server has {there}",
                param="model",
                code="model_not_found",
            )
        if key := self.refused_key(name):
            raise ApiError(
                403,
                f"the key {key.name!r} may not use the model {name!r}: it may use {', '.join(key.models or ())}",
                type="permission_error",
                param="model",
                code="model_not_allowed",
            )
        if name not in names:
            one = self.adapters[name]
            found_again = partial(self._find_again, name)
            return self.engines[one.model].with_adapter(f"{name}={one.fingerprint}", found_again)
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
        if isinstance(body, ResponsesRequest) and body.background and not record.inner and not record.replays:
            record.background = raw
        engine = await self.find(body.model)
        await engine.load()
        if isinstance(body, Sampling) and body.logit_bias:
            _check_biases(body.logit_bias, (await engine.pool.model_info()).get("vocab_size"))
        has_tokens = body.operation not in ("tokenize", "embeddings")
        if self.settings.log_requests and has_tokens and record.tokens is None:  # not a replay
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

    def check_logprobs(
        self, requests: Sequence[GenerateRequest], *, streams: bool = True, param: str = "logprobs"
    ) -> None:
        """Raises ApiError 400 if responses without streaming could have too many log probabilities. Without max_tokens
        the limit is checked in the response (Pool.begin). streams: a stream may have more of them. param: the field
        that asks for them."""
        entries = sum(
            (request.n or 1) * request.max_tokens * (request.logprobs + 1)
            for request in requests
            if request.logprobs is not None and request.max_tokens is not None
        )
        if entries > MAX_ENTRIES:
            # Only the end of a request with best_of says which responses are the best, so it cannot be a stream.
            stream = "" if any(request.best_of for request in requests) else ", or send stream = true"
            if not streams:
                stream = " (with a smaller top_logprobs or max_output_tokens)"
            raise ApiError(
                400,
                f"answers times max_tokens times (top_logprobs + 1) are {entries} log probabilities: ask for at most "
                f"{MAX_ENTRIES}{' without streaming' if streams else ''}{stream}",
                param=param,
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
