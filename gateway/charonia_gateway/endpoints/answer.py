"""The responses to one request: which server computes them, and what happens when that server fails.

Until something has arrived, any other server can take the request. After that, only a server with the same fingerprint
can: it receives the tokens that have arrived and computes the next ones, which are the same at both
(docs/determinism.md). The client sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from charonia_client import (
    BadRequest,
    CharoniaError,
    ConnectionLost,
    GenerateRequest,
    GenerateResponse,
    Moved,
    NotFound,
    Overloaded,
    Progress,
    Unavailable,
)

from charonia_gateway.endpoints.choice import choose
from charonia_gateway.endpoints.endpoint import Endpoint
from charonia_gateway.logprobs import MAX_ENTRIES, count_entries
from charonia_gateway.record import Record, current_record

log = logging.getLogger("charonia_gateway")

_MAX_LOST_CONNECTIONS = 2  # a request that crashes its server must not crash all servers
_MIN_TRIES = 3  # without a new token; with more servers, each may fail once
_MAX_RESUMES = 16  # of a request
_BEGIN_WAIT_S = 5.0  # for a server that can begin a request, after another one failed
_LOOK_AGAIN_S = 0.1  # for a server that can continue
_ASK_AGAIN_S = 0.5  # servers that were full


class Servers(Protocol):
    """The servers of a model: a pool.Pool."""

    endpoints: list[Endpoint]
    answers: set[Answer]
    resume_timeout_s: float
    on_retry: Callable[[], None]
    on_resume: Callable[[], None]

    def next_turn(self) -> int: ...

    async def owner(self, session_id: str | None) -> str | None: ...

    async def set_owner(self, session_id: str, target: str | None) -> None: ...

    async def lose(self, session_id: str | None, owner: str | None) -> None: ...

    def summary(self, failures: list[CharoniaError]) -> CharoniaError: ...

    async def explained(self, error: CharoniaError) -> CharoniaError: ...


class Answer:
    """`first` has the first part, or all parts of responses with `stream=False`. `rest` yields the others. Close it."""

    def __init__(self, pool: Servers, request: GenerateRequest, id: str, timeout_s: float | None) -> None:
        self.endpoint: Endpoint | None = None  # the server that has the request
        self.session_id = request.session_id
        self.first: list[GenerateResponse] = []
        self._rest: AsyncGenerator[GenerateResponse, None] | None = None
        self._pool = pool
        self._request = request
        self._id = id
        self._engine_id = id  # the request's id at the current server
        self._began = time.monotonic()
        self._timeout_s = timeout_s
        self._owner: str | None = None
        self._progress = Progress(request)
        self._stopped = False
        self._num_tokens = 0  # the most tokens that had arrived when a server failed
        # Since the last new token.
        self._tried: list[Endpoint] = []
        self._failures: list[CharoniaError] = []
        self._failed_at = 0.0  # time of the first failure
        self._num_asked = 0  # servers to continue
        self._num_resumes = 0  # the same without servers that were full
        self._record = current_record.get() or Record()
        self._num_logprobs = 0  # of `first`

    async def begin(self) -> None:
        """Sends the request. Returns when a response has begun. Raises the client's errors, and SessionLost."""
        pool = self._pool
        self._owner = await pool.owner(self._request.session_id)
        while endpoint := await self._choose():
            try:
                await self._send(endpoint)
                await self._read_first()
                return await self._keep_session(endpoint)
            except (Overloaded, Unavailable, NotFound) as error:  # another server may have the adapter
                if self._failed(error):
                    break
            except BaseException:
                await self.aclose()
                raise
        if not self._stopped:
            raise await pool.explained(pool.summary(self._failures))
        self._rest = _cancelled()
        await self._read_first()

    async def resume(self, error: CharoniaError) -> None:
        """Lets another server continue after an error of the current one: `rest` then has the next parts. If no server
        can, raises the first error since the last new token."""
        while (
            not self._failed(error)
            and (self._moves() or not self._progress.begun)
            and (endpoint := await self._choose())
        ):
            try:
                await self._send(endpoint)
                return await self._keep_session(endpoint)
            except (Overloaded, Unavailable, NotFound) as failure:
                error = failure
        if not self._stopped:
            lacks = any(isinstance(one, NotFound) for one in self._failures)
            raise adapter_gone(self._request) if lacks else self._failures[0]
        self._rest = _cancelled()

    def leave_draining_server(self) -> None:
        """Moves the request if its server drains and another server can continue."""
        able = any(one.has_adapter(self._request.lora_name) for one in self._able())
        if self.endpoint and self.endpoint.draining and self._moves() and able:
            self.endpoint.client.move(self._engine_id)

    def stop(self) -> None:
        """A stop request of the session has arrived. Ends the request if it waits for a server, or if the next server
        has not begun it, because that server may not know the session yet."""
        self._stopped = True
        if self.endpoint and self._failures and self._progress.num_tokens <= self._num_tokens:
            self.endpoint.client.move(self._engine_id)

    async def aclose(self) -> None:
        self._release()
        self._pool.answers.discard(self)
        if self._rest:
            await self._rest.aclose()

    @property
    def fingerprint(self) -> str | None:
        """Of the server."""
        return self._progress.fingerprint

    @property
    def rest(self) -> AsyncGenerator[GenerateResponse, None]:
        assert self._rest
        return self._rest

    # --- one server after the other

    def _moves(self) -> bool:
        """Whether tokens have arrived, and another server can continue after them."""
        return (
            self._progress.begun
            and self._progress.promise is not None
            and self._progress.resumable
            and not self._request.interactive
            and self._num_resumes < _MAX_RESUMES
        )

    def _able(self) -> list[Endpoint]:
        """The servers that can continue."""
        return [one for one in self._healthy() if one.promise == self._progress.promise]

    def _healthy(self) -> list[Endpoint]:
        return [one for one in self._pool.endpoints if one.usable and not one.doubtful]

    async def _choose(self) -> Endpoint | None:
        """Returns the next server to try. After a failure the request waits until a server is healthy, because the
        failed server may restart. A whole response begins again if no server can continue: its client has nothing."""
        while not self._stopped:
            choices = [self._pool.endpoints]
            if self._moves():
                choices = [self._able()] if self._request.stream else [self._able(), self._healthy()]
            for servers in choices:
                if endpoint := choose(servers, self._request, self._tried, self._owner):
                    return endpoint
            if time.monotonic() >= self._failed_at + self._wait_s():
                break
            await asyncio.sleep(_ASK_AGAIN_S if isinstance(self._failures[-1], Overloaded) else _LOOK_AGAIN_S)
            self._tried = [one for one in self._tried if one.doubtful]
        return None

    def _wait_s(self) -> float:
        """How long the request waits for a healthy server after its first failure."""
        if self._moves():
            return self._pool.resume_timeout_s
        full = not self._failures or isinstance(self._failures[-1], Overloaded | NotFound)
        if full or len(self._pool.endpoints) == 1 or self._request.interactive:
            return 0
        return min(_BEGIN_WAIT_S, self._pool.resume_timeout_s)

    async def _send(self, endpoint: Endpoint) -> None:
        """Sends the request, with the tokens that have arrived, to a server. `rest` then has the parts."""
        pool, request = self._pool, self._request
        # Before any other task runs, so that simultaneous requests are spread over the servers.
        self.endpoint = endpoint
        endpoint.acquire()
        endpoint.turn = pool.next_turn()
        self._tried.append(endpoint)
        moved = self._owner is not None and endpoint.target != self._owner
        if moved and self._owner and request.interactive:
            await pool.lose(request.session_id, self._owner)
        if not self._moves() or endpoint.promise != self._progress.promise:
            self._begin_again(endpoint)
        if self._progress.begun:
            self._num_asked += 1
            self._engine_id = f"{self._id}.{self._num_asked}"
            if not isinstance(self._failures[-1], Overloaded):
                self._num_resumes += 1
                self._record.num_resumes += 1
                pool.on_resume()
                log.warning(
                    "the response %s continues at server %s after %d tokens: %s",
                    self._id, endpoint.target, self._progress.num_tokens, self._failures[0],
                )  # fmt: skip
        elif self._failures:
            pool.on_retry()
        gone_s = time.monotonic() - self._began
        self._rest = endpoint.client.generate(
            _with_less_time(request, gone_s) if self._failures else request,
            request_id=self._engine_id,
            timeout_s=None if self._timeout_s is None else self._timeout_s - gone_s,
            progress=self._progress,
        )
        self._record.calls.append(partial(endpoint.client.until_over, self._engine_id))
        if moved and request.session_id is not None:  # an outdated history must not be continued
            await endpoint.client.end_session(request.session_id)

    def _begin_again(self, endpoint: Endpoint) -> None:
        joins = endpoint.promise is not None and not self._request.interactive
        self._progress = Progress(self._request, joins=joins)
        self.first.clear()
        self._record.num_logprobs -= self._num_logprobs
        self._num_logprobs = 0

    async def _read_first(self) -> None:
        """Reads the first part, or all of them. Raises BadRequest for more log probabilities than one HTTP response may
        have, which may have the responses to several prompts."""
        async for part in self.rest:
            self.first.append(part)
            entries = count_entries(part)
            self._num_logprobs += entries
            self._record.num_logprobs += entries
            if self._record.num_logprobs > MAX_ENTRIES:
                stream = "" if self._request.best_of else ", or send stream = true and no echo"
                raise BadRequest(
                    f"logprobs: the answer has more than {MAX_ENTRIES} log probabilities, top_logprobs included; "
                    f"ask for fewer, or send a smaller max_tokens{stream}"
                )
            if self._request.stream:
                break

    async def _keep_session(self, endpoint: Endpoint) -> None:
        if self._request.session_id is not None:
            self._owner = None if self._request.end_session else endpoint.target
            await self._pool.set_owner(self._request.session_id, self._owner)

    def _failed(self, error: CharoniaError) -> bool:
        """Notes that the current server failed. Returns whether no other server should be tried."""
        endpoint = self._release()
        if endpoint and isinstance(error, Unavailable) and not isinstance(error, Moved):
            endpoint.doubt()
        if self._progress.num_tokens > self._num_tokens:
            self._num_tokens = self._progress.num_tokens
            self._failures.clear()
            self._tried = [endpoint] if endpoint else []
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures.append(error)
        lost = sum(isinstance(one, ConnectionLost) for one in self._failures)
        failed = sum(isinstance(one, Unavailable) and not isinstance(one, Moved) for one in self._failures)
        late = self._timeout_s is not None and time.monotonic() - self._began >= self._timeout_s
        spent = late or self._num_resumes >= _MAX_RESUMES
        return spent or lost >= _MAX_LOST_CONNECTIONS or failed >= max(_MIN_TRIES, len(self._pool.endpoints))

    def _release(self) -> Endpoint | None:
        endpoint, self.endpoint = self.endpoint, None
        if endpoint:
            endpoint.release()
        return endpoint


def adapter_gone(request: GenerateRequest) -> NotFound:
    """The error for clients, who do not know the engine's names."""
    name = (request.lora_name or "").partition("=")[0]
    return NotFound(
        f"the LoRA adapter {name!r} is not loaded any more: it was unloaded, or its server was started again. Load it "
        "again"
    )


async def _cancelled() -> AsyncGenerator[GenerateResponse, None]:
    """The part that ends a stopped request."""
    yield GenerateResponse("", (), "cancelled")


def _with_less_time(request: GenerateRequest, gone_s: float) -> GenerateRequest:
    """The request with the rest of its own time limit."""
    if request.timeout_ms is None:
        return request
    return replace(request, timeout_ms=max(1, request.timeout_ms - int(gone_s * 1000)))
