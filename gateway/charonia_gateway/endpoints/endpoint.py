"""One Triton server: its client, its health, and the work that it has from this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from charonia_client import CharoniaError, Client, GenerateRequest, GenerateResponse, Silent

from charonia_gateway.endpoints import load
from charonia_gateway.endpoints.affinity import Recent
from charonia_gateway.endpoints.health import Health, State

log = logging.getLogger("charonia_gateway")

_MOST_STALE_SESSIONS = 10_000
_TELLERS = 16  # end_session requests at once


class Lease:
    """A request's place at an endpoint, from its beginning to its end there."""

    __slots__ = ("_answering", "_prompt_tokens", "endpoint", "id", "tokens")

    def __init__(self, endpoint: Endpoint, id: str, request: GenerateRequest) -> None:
        self.endpoint = endpoint
        self.id = id
        self._answering = False
        self._prompt_tokens = load.prompt_tokens(request)
        self.tokens = self._prompt_tokens + load.answer_tokens(request)  # outstanding
        endpoint.outstanding_tokens += self.tokens
        endpoint.leases[id] = self

    def note(self, part: GenerateResponse) -> None:
        """What has come is not outstanding any more: with the first part the prompt, with each its tokens."""
        done = len(part.token_ids)
        if not self._answering:
            self._answering = True
            done += self._prompt_tokens
        done = min(done, self.tokens - 1)  # whatever the estimate was, a request that runs is work
        self.tokens -= done
        self.endpoint.outstanding_tokens -= done

    def close(self) -> None:
        if self.endpoint.leases.get(self.id) is self:
            del self.endpoint.leases[self.id]
            self.endpoint.outstanding_tokens -= self.tokens
            if self.endpoint.removed:
                self.endpoint.look_again()


class Endpoint:
    """`changed` is called when its state may have changed."""

    def __init__(self, client: Client, changed: Callable[[Endpoint], None]) -> None:
        self.client = client
        self.target = client.target
        self.health = Health()
        self.outstanding_tokens = 0
        self.leases: dict[str, Lease] = {}  # by request id
        self.removed = False  # takes nothing new, and ends with what it has
        self.turn = 0  # when it was chosen last: of equals the one that waits longest is next
        self.busy_until = 0.0  # on the choosers' clock: it has said until when it takes nothing
        # Sessions that went on elsewhere while it was down. What it may still know of them is old.
        self.stale_sessions: Recent[str, None] = Recent(_MOST_STALE_SESSIONS)
        self._changed = changed
        self._wake = asyncio.Event()
        self._checking = False
        self._checked = asyncio.Event()  # set, and replaced, when a check ends

    @property
    def usable(self) -> bool:
        return not self.removed and self.health.state is not State.DOWN

    def check_integrity(self) -> None:
        """AssertionError unless the outstanding tokens are those of the requests that run."""
        assert self.outstanding_tokens == sum(lease.tokens for lease in self.leases.values())

    def doubt(self, why: str) -> None:
        """A request failed there as Unavailable: the next check, made at once, says what to think of it."""
        before = self.health.state
        self.health.doubt(why)
        self.look_again()
        if self.health.state is not before:
            self._changed(self)

    def look_again(self) -> None:
        self._wake.set()

    async def checked(self) -> None:
        """Returns once a check that began after this call has ended."""
        self.look_again()
        if self._checking:
            await self._checked.wait()
        if not self.removed:
            await self._checked.wait()

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Checks it again and again, until it is removed and has nothing left to do."""
        try:
            while not self.removed or self.leases:
                self._wake.clear()
                self._checking = True
                before = self.health.state
                await self._check(timeout_s)
                self._checking = False
                self._tell_checked()
                if self.health.state is not before:
                    self._changed(self)
                if self.health.state is not State.IN_DOUBT:
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), interval_s)
        finally:
            self._tell_checked()

    def _tell_checked(self) -> None:
        self._checked.set()
        self._checked = asyncio.Event()

    async def _check(self, timeout_s: float) -> None:
        try:
            await self.client.check(timeout_s)
        except Silent as error:
            self.health.silent(str(error))
        except CharoniaError as error:
            self.health.away(str(error))
        else:
            await self._forget_stale_sessions()  # before it can be chosen for them again
            self.health.well()

    async def _forget_stale_sessions(self) -> None:
        async def tell() -> None:
            while self.stale_sessions:
                session_id, _ = self.stale_sessions.popitem()
                await self.client.end_session(session_id)

        if self.stale_sessions:
            try:
                await asyncio.gather(*(tell() for _ in range(_TELLERS)))
            except CharoniaError as error:
                log.warning("endpoint %s could not be told which sessions went on elsewhere: %s", self.target, error)
