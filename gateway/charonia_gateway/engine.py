"""The engine as the routes use it: it runs several choices concurrently, and raises an error for every failed response.
charonia_gateway.endpoints chooses the server for a request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import replace

from charonia_client import (
    BadRequest,
    CharoniaError,
    GenerateRequest,
    GenerateResponse,
    NotFound,
    Overloaded,
    ServerError,
    Unavailable,
)

from charonia_gateway import __version__
from charonia_gateway.autoload import Autoload
from charonia_gateway.endpoints.answer import Answer, adapter_gone
from charonia_gateway.endpoints.pool import NotLoaded, Pool
from charonia_gateway.record import Record, current_key, current_owner, current_record
from charonia_gateway.usage import estimated_tokens

_SEED_BITS = 53  # every JSON reader keeps such a number
_MAX_HEADER_CHARACTERS = 500
_MAX_LOADS = 3  # of its model, for one request


log = logging.getLogger("charonia_gateway")


class Stopped(Unavailable):
    """A stop request has ended a response, or its server has shut down."""


class Engine:
    """`timeout_s` is the limit for each response; 0 means no limit. cache_by_key: each key has its own prefix cache.
    fit_max_tokens: the engine lowers a max_tokens that is larger than the room in the context, and does not reject it.
    model: its name for clients. autoload: loads the model when a request needs it; None: its operator does."""

    def __init__(
        self,
        pool: Pool,
        timeout_s: float = 0,
        *,
        cache_by_key: bool = True,
        fit_max_tokens: bool = True,
        model: str = "",
        autoload: Autoload | None = None,
    ) -> None:
        self.pool = pool
        self._autoload = autoload
        self._model = model
        self._cache_by_key = cache_by_key
        self._fit_max_tokens = fit_max_tokens
        self._timeout_s = timeout_s or None
        self._lora_name: str | None = None
        self._find_again: Callable[[], Awaitable[Engine]] | None = None

    def with_adapter(self, lora_name: str, find_again: Callable[[], Awaitable[Engine]]) -> Engine:
        """The same model with a LoRA adapter. lora_name: NAME=FINGERPRINT, so that no other adapter of this name
        computes a part of a response. find_again: returns the engine for the same name as it is then."""
        adapted = copy(self)
        adapted._lora_name = lora_name
        adapted._find_again = find_again
        return adapted

    @property
    def waits_for_load(self) -> bool:
        """Whether the next request loads the model."""
        return self._autoload is not None and not self.pool.usable

    @property
    def status(self) -> str:
        """As /v1/models shows it."""
        if self.pool.usable:
            return "ready"
        reachable = any(endpoint.reachable for endpoint in self.pool.endpoints)
        return "on demand" if self._autoload and reachable else "not ready"

    async def load(self) -> None:
        """Return when the model takes requests, if it is loaded on demand. Raises ApiError 503."""
        if self._autoload and self.waits_for_load:
            await self._autoload.ensure(self._model, self.pool)

    async def complete(self, requests: Sequence[GenerateRequest], id: str) -> list[GenerateResponse]:
        """Returns the whole responses in the order of `requests` and, within a request, of their index. `id` begins the
        engine's request ids."""
        answers: dict[int, GenerateResponse] = {}
        async with aclosing(self.stream(requests, id)) as parts:
            async for part in parts:
                answers[part.index] = part
        return [answers[index] for index in sorted(answers)]

    def stream(self, requests: Sequence[GenerateRequest], id: str) -> AsyncGenerator[GenerateResponse, None]:
        """Yield the parts of all responses as they arrive. Each part has the index of its response across `requests`,
        which all ask for the same number of responses. Closing the generator, or an error in one response, cancels the
        rest. Close it (contextlib.aclosing)."""
        if len(requests) == 1:
            return self.answer(requests[0], f"{id}#0")
        return self._merged(requests, id)

    async def _merged(self, requests: Sequence[GenerateRequest], id: str) -> AsyncGenerator[GenerateResponse, None]:
        # Bounded, so that chunks for a slow client wait in its stream, where they are joined.
        queue: asyncio.Queue[GenerateResponse | BaseException | None] = asyncio.Queue(2 * len(requests))
        tasks = [
            asyncio.create_task(self._pump(queue, number * (request.n or 1), request, f"{id}#{number}"))
            for number, request in enumerate(requests)
        ]
        running = len(tasks)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, GenerateResponse):
                    yield item
                elif item is None:
                    running -= 1
                else:
                    raise item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self,
        queue: asyncio.Queue[GenerateResponse | BaseException | None],
        first: int,
        request: GenerateRequest,
        id: str,
    ) -> None:
        try:
            async with aclosing(self.answer(request, id, first=first)) as parts:
                async for part in parts:
                    part.index += first
                    await queue.put(part)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    async def answer(
        self, request: GenerateRequest, id: str, *, first: int = 0, may_be_cancelled: bool = False
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the parts of one request's responses. A cancelled response is an error unless `may_be_cancelled`.
        `first`: the index of its first response in the HTTP request."""
        record = current_record.get()
        request = replace(
            request,
            # With a seed and a time, another server can continue the response, and it can be repeated later.
            seed=_seed(record, first) if request.seed is None else request.seed,
            prompt_time=record.prompt_time if record and request.messages is not None else None,
            lora_name=self._lora_name,
            fit_max_tokens=True if self._fit_max_tokens and request.max_tokens else request.fit_max_tokens,
        )
        if record:
            record.estimated_tokens += estimated_tokens(request)
            record.seeds[first] = request.seed
        with _client_session_names(request.session_id):
            async with aclosing(await self._begin(self._of_key(request), id)) as answer:
                if record:
                    record.system_fingerprint = self._fingerprint(answer.fingerprint)
                for part in answer.first:
                    yield _checked(part, record, first, may_be_cancelled)
                while True:
                    try:
                        async for part in answer.rest:
                            yield _checked(part, record, first, may_be_cancelled)
                        return
                    except Stopped:
                        raise
                    except (Overloaded, Unavailable, NotFound) as error:
                        await answer.resume(error)

    async def _begin(self, request: GenerateRequest, id: str) -> Answer:
        """Send the request. If the schemas of forced calls cannot be enforced, the calls have any object as arguments,
        and a header says so."""
        pool = self.pool
        try:
            return await self._begin_loaded(request, id)
        except NotFound:  # the adapter was replaced, or loaded for another model
            if self._find_again is None:
                raise
            found = await self._find_again()
            if found.pool is pool and found._lora_name == request.lora_name:  # the server did not list its adapters
                raise adapter_gone(request) from None
            self.__dict__.update(found.__dict__)
            return await self._begin(replace(request, lora_name=self._lora_name), id)
        except BadRequest as error:
            if not request.forces_calls:
                raise
            answer = await self._begin_loaded(replace(request, any_arguments=True), id)
            log.warning("arguments of calls are any object, not as their schemas say: %s", error)
            if record := current_record.get():
                record.not_enforced = re.sub(r"[^ -~]", "?", str(error))[:_MAX_HEADER_CHARACTERS]
            return answer

    async def _begin_loaded(self, request: GenerateRequest, id: str) -> Answer:
        """Send the request. If the model was unloaded since load(), another model took its memory: load it again."""
        for _ in range(_MAX_LOADS if self._autoload else 0):
            try:
                return await self.pool.begin(request, id, self._timeout_s)
            except NotLoaded:
                assert self._autoload
                await self._autoload.ensure(self._model, self.pool)
        return await self.pool.begin(request, id, self._timeout_s)

    def _fingerprint(self, server: str | None) -> str:
        """`system_fingerprint`, which changes when the tokens of a request may change. server: its fingerprint."""
        text = " ".join([self._model, __version__, str(server), *([self._lora_name] if self._lora_name else [])])
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    async def end_session(self, session_id: str) -> None:
        """Ends a session of the request's key."""
        with _client_session_names(session_id):
            await self.pool.end_session(_session(session_id))

    async def stop_session(self, session_id: str) -> None:
        with _client_session_names(session_id):
            await self.pool.stop_session(_session(session_id))

    async def cancel_session(self, session_id: str) -> None:
        with _client_session_names(session_id):
            await self.pool.cancel_session(_session(session_id))

    def _of_key(self, request: GenerateRequest) -> GenerateRequest:
        """Name the request's owner, and restrict the request to its key: with a session and a prefix cache of the key,
        and at most the key's priority."""
        key, owner, record = current_key(), current_owner(), current_record.get()
        if record and record.inner and (most := record.inner.max_priority) is not None:
            request = replace(request, priority=most if request.priority is None else min(request.priority, most))
        if key is None:
            return replace(request, owner=owner)
        session_id = None if request.session_id is None else _session(request.session_id)
        priority = request.priority
        if key.priority is not None:
            priority = key.priority if priority is None else min(priority, key.priority)
        cache_salt = key.cache_salt(request.cache_salt) if self._cache_by_key else request.cache_salt
        return replace(request, session_id=session_id, priority=priority, cache_salt=cache_salt, owner=owner)


def _seed(record: Record | None, first: int) -> int:
    given = record.given_seeds.get(first) if record else None
    return secrets.randbits(_SEED_BITS) if given is None else given


def _session(session_id: str) -> str:
    """The engine's name of a session: each key has a name space of its own."""
    key = current_key()
    return key.session(session_id) if key else session_id


@contextmanager
def _client_session_names(session_id: str | None) -> Iterator[None]:
    """In errors, replaces the engine's name of a session by the client's."""
    try:
        yield
    except CharoniaError as error:
        if session_id is not None and (own := _session(session_id)) != session_id:
            error.args = tuple(part.replace(own, session_id) if isinstance(part, str) else part for part in error.args)
        raise


def _checked(part: GenerateResponse, record: Record | None, first: int, may_be_cancelled: bool) -> GenerateResponse:
    if record and record.answers is not None:
        record.answers.setdefault(first + part.index, []).append(part.text)
    if record and record.tokens is not None:
        record.tokens.setdefault(first + part.index, []).extend(part.token_ids)
    if part.finish_reason in ("cancelled", "error") and record and record.usage:
        record.usage.see(first + part.index, part)  # the routes do not see this part, but its tokens count
    if part.finish_reason == "cancelled" and not may_be_cancelled:
        raise Stopped("the engine stopped this request: it is shutting down or received a stop request")
    if part.finish_reason == "error":
        raise ServerError("the engine could not finish this request; its log says why")
    return part
