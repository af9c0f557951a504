"""The engine as the routes use it: it runs several choices concurrently, and raises an error for every failed response.
charonia_gateway.endpoints chooses the server for a request."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace

from charonia_client import (
    BadRequest,
    CharoniaError,
    GenerateRequest,
    GenerateResponse,
    Overloaded,
    ServerError,
    Unavailable,
)

from charonia_gateway import __version__
from charonia_gateway.endpoints.answer import Answer
from charonia_gateway.endpoints.pool import Pool
from charonia_gateway.record import Record, current_key, current_owner, current_record
from charonia_gateway.usage import estimated_tokens

_SEED_BITS = 53  # every JSON reader keeps such a number
_MAX_HEADER_CHARACTERS = 500


log = logging.getLogger("charonia_gateway")


class Stopped(Unavailable):
    """A stop request has ended a response, or its server has shut down."""


class Engine:
    """`timeout_s` is the limit for each response; 0 means no limit. cache_by_key: each key has its own prefix cache.
    fit_max_tokens: the engine lowers a max_tokens that is larger than the room in the context, and does not reject it.
    model: its name for clients."""

    def __init__(
        self,
        pool: Pool,
        timeout_s: float = 0,
        *,
        cache_by_key: bool = True,
        fit_max_tokens: bool = True,
        model: str = "",
    ) -> None:
        self.pool = pool
        self._model = model
        self._cache_by_key = cache_by_key
        self._fit_max_tokens = fit_max_tokens
        self._timeout_s = timeout_s or None

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
                    except (Overloaded, Unavailable) as error:
                        await answer.resume(error)

    async def _begin(self, request: GenerateRequest, id: str) -> Answer:
        """Send the request. If the schemas of forced calls cannot be enforced, the calls have any object as arguments,
        and a header says so."""
        try:
            return await self.pool.begin(request, id, self._timeout_s)
        except BadRequest as error:
            if not request.forces_calls:
                raise
            answer = await self.pool.begin(replace(request, any_arguments=True), id, self._timeout_s)
            log.warning("arguments of calls are any object, not as their schemas say: %s", error)
            if record := current_record.get():
                record.not_enforced = re.sub(r"[^ -~]", "?", str(error))[:_MAX_HEADER_CHARACTERS]
            return answer

    def _fingerprint(self, server: str | None) -> str:
        """`system_fingerprint`, which changes when the tokens of a request may change. server: its fingerprint."""
        return f"fp_{hashlib.sha256(f'{self._model} {__version__} {server}'.encode()).hexdigest()[:10]}"

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
        key, owner = current_key(), current_owner()
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
