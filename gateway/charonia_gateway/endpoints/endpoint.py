"""One Triton server: its client, its health, and the work that it has from this gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from charonia_client import (
    BadRequest,
    CharoniaError,
    ConnectionLost,
    GenerateRequest,
    GenerateResponse,
    NotReady,
    Unresponsive,
)
from charonia_client.waiting import comes_within, end

from charonia_gateway.endpoints import load
from charonia_gateway.endpoints.calls import Calls
from charonia_gateway.endpoints.health import Health, State
from charonia_gateway.endpoints.server import Server
from charonia_gateway.endpoints.sessions import SharedStaleSessions, StaleSessions

log = logging.getLogger("charonia_gateway")

_TELLERS = 16  # end_session or cancel requests at once


class InFlight:
    """A request in flight at an endpoint, counted until it ends there."""

    __slots__ = (
        "_answering",
        "_prompt_tokens",
        "endpoint",
        "finished",
        "followed",
        "id",
        "session_ended",
        "session_id",
        "tokens",
    )

    def __init__(self, endpoint: Endpoint, id: str, request: GenerateRequest) -> None:
        self.endpoint = endpoint
        self.id = id
        self.session_id = request.session_id
        self.session_ended = False  # since it was sent: its answer begins no history
        self.followed = False  # another request of its session was sent later
        self._answering = False
        self.finished = False  # its answer came to its own end
        self._prompt_tokens = load.prompt_tokens(request)
        self.tokens = self._prompt_tokens + load.answer_tokens(request)  # outstanding
        endpoint.outstanding_tokens += self.tokens
        endpoint.in_flight[id] = self
        if endpoint.calls:
            endpoint.calls.begin(id)

    def note(self, part: GenerateResponse) -> None:
        """Takes what has come off the outstanding tokens: the prompt with the first part, and each part's tokens."""
        self.finished = part.finish_reason in ("stop", "length")
        done = len(part.token_ids)
        if not self._answering:
            self._answering = True
            done += self._prompt_tokens
        done = min(done, self.tokens - 1)  # whatever the estimate was, a request that runs is work
        self.tokens -= done
        self.endpoint.outstanding_tokens -= done

    def close(self) -> None:
        """It has ended at the server."""
        self._leave()
        self._forget()

    async def aclose(self, parts: AsyncGenerator[GenerateResponse, None]) -> None:
        """Leaves it, wherever it is. Until the server has been told, another worker would have to cancel it."""
        self._leave()
        try:
            await parts.aclose()
        finally:
            self._forget()

    def _leave(self) -> None:
        if self.endpoint.in_flight.get(self.id) is self:
            del self.endpoint.in_flight[self.id]
            self.endpoint.outstanding_tokens -= self.tokens
            if self.endpoint.removed:
                self.endpoint.look_again()

    def _forget(self) -> None:
        if self.endpoint.calls:
            self.endpoint.calls.end(self.id)


class Endpoint:
    """`changed` is called when its state may have changed. `stale_sessions`: sessions that went on elsewhere or ended,
    which the server was not told: its histories of them are out of date. `calls`: of all workers, where there are
    several."""

    def __init__(
        self,
        client: Server,
        changed: Callable[[Endpoint], None],
        stale_sessions: StaleSessions | SharedStaleSessions,
        calls: Calls | None = None,
    ) -> None:
        self.client = client
        self.target = client.target
        self.health = Health()
        self.outstanding_tokens = 0
        self.in_flight: dict[str, InFlight] = {}  # by request id
        self.removed = False  # takes no new request, and is dropped when its last one has ended
        self.turn = 0  # when it was chosen last: of equals the one that waits longest is next
        self.broken = False  # a check found that its connection broke, and none has found it well since
        self.busy_until = 0.0  # on the chooser's clock: when its Retry-After ends
        self.stale_sessions = stale_sessions
        self.calls = calls
        self._changed = changed
        self._wake = asyncio.Event()
        self._checking = False
        self._told_all = True  # or it has been said that it could not be told
        self._forgetting: dict[str, asyncio.Task[None]] = {}  # by session
        self._cancelling: asyncio.Task[None] | None = None
        self._cancelled_all = True  # or it has been said that some could not be
        self._checked = asyncio.Event()  # set, and replaced, when a check ends

    @property
    def usable(self) -> bool:
        return not self.removed and self.health.usable

    def check_integrity(self) -> None:
        """AssertionError unless the outstanding tokens are those of the requests that run."""
        assert self.outstanding_tokens == sum(entry.tokens for entry in self.in_flight.values())

    def suspect(self, why: str) -> None:
        """A request failed there as Unavailable: it is suspect until the next check, which is made at once."""
        before = self.health.state
        self.health.suspect(why)
        self.look_again()
        if self.health.state is not before:
            self._changed(self)

    def look_again(self) -> None:
        self._wake.set()

    async def check_ended(self) -> None:
        """Returns when the next check has ended, or that which is under way."""
        await self._checked.wait()

    async def checked(self) -> None:
        """Returns once a check that began after this call has ended."""
        self.look_again()
        if self._checking:
            await self._checked.wait()
        if not self.removed:
            await self._checked.wait()

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Checks it periodically until it is removed and has no request in flight."""
        try:
            while not self.removed or self.in_flight:
                self._wake.clear()
                self._checking = True
                before = self.health.state
                await self._check(timeout_s)
                self._checking = False
                self._tell_checked()
                if self.health.state is not before:
                    self._changed(self)
                if self.health.state is not State.SUSPECT:
                    await comes_within(self._wake, interval_s)
        finally:
            self._checking = False
            self._tell_checked()

    def _tell_checked(self) -> None:
        self._checked.set()
        self._checked = asyncio.Event()

    async def _check(self, timeout_s: float) -> None:
        try:
            await self.client.check(timeout_s)
        except Unresponsive as error:
            self.health.unresponsive(str(error))
        except NotReady as error:
            self.broken = False
            self.health.not_ready(str(error))
            self._cancel_lost()  # one that drains takes that
        except CharoniaError as error:
            self.broken = self.broken or isinstance(error, ConnectionLost)
            self.health.away(str(error))
        else:
            self.broken = False
            await self._forget_stale_sessions()  # before it can be chosen for them again
            self.health.well()
            self._cancel_lost()

    async def forget_stale_session(self, session_id: str) -> None:
        """Raises CharoniaError where that fails; the next check tries again what the server could not take.

        A session is told once at a time: what came second could end the turn that had begun after the first."""
        task = self._forgetting.get(session_id)
        if task is None:
            task = self._forgetting[session_id] = asyncio.create_task(self._forget_stale_session(session_id))
            task.add_done_callback(lambda done: self._forgotten(session_id, done))
        await asyncio.shield(task)

    async def forgotten(self, session_id: str) -> None:
        """Returns when no end of that session is on its way to the server: it would end what begins now."""
        if task := self._forgetting.get(session_id):
            await asyncio.wait((task,))
        await self.stale_sessions.told_elsewhere(session_id)

    async def _forget_stale_session(self, session_id: str) -> None:
        while (claim := self.stale_sessions.claim(session_id)) == "theirs":
            await self.stale_sessions.told_elsewhere(session_id)
        if claim == "gone":
            return
        try:
            await self.client.end_session(session_id)
        except BadRequest:
            self.stale_sessions.pop(session_id, None)  # it would say the same again
            raise
        else:
            self.stale_sessions.pop(session_id, None)
        finally:
            self.stale_sessions.release(session_id)

    def _forgotten(self, session_id: str, task: asyncio.Task[None]) -> None:
        del self._forgetting[session_id]
        if not task.cancelled():
            task.exception()  # who waits for it raises it; nobody may be left

    async def _forget_stale_sessions(self) -> None:
        waiting = list(self.stale_sessions)

        async def tell() -> None:
            while waiting:
                session_id = waiting.pop()
                if session_id in self.stale_sessions:
                    await self.forget_stale_session(session_id)

        outcomes = await asyncio.gather(*(tell() for _ in range(min(_TELLERS, len(waiting)))), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in errors:
            if not isinstance(error, CharoniaError):
                raise error
        if errors and self._told_all:
            log.warning(
                "endpoint %s could not be told which sessions went on elsewhere or ended, and is told again: %s",
                self.target,
                errors[0],
            )
        self._told_all = not errors

    def _cancel_lost(self) -> None:
        """What workers that have died had running there. A cancel that hangs holds up no check."""
        if self.calls is None or self._cancelling is not None or not (lost := self.calls.take_lost()):
            return
        self._cancelling = asyncio.create_task(self._cancel(self.calls, lost))

    async def _cancel(self, calls: Calls, lost: list[str]) -> None:
        count, cancelled = len(lost), 0
        errors: list[BaseException] = []

        async def tell() -> None:
            nonlocal cancelled
            while lost:
                id = lost.pop()
                try:
                    await self.client.cancel(id)
                except BaseException as error:  # the next check tries again, and is not held up by the others
                    for one in (id, *lost):
                        calls.give_back(one)
                    lost.clear()
                    if isinstance(error, asyncio.CancelledError):
                        raise
                    errors.append(error)
                else:
                    calls.end(id)
                    cancelled += 1

        try:
            await asyncio.gather(*(tell() for _ in range(min(_TELLERS, count))))
        finally:
            self._cancelling = None
            for one in lost:  # of tellers that never began
                calls.give_back(one)
            if cancelled:
                log.warning("endpoint %s: requests of a worker that died were cancelled (%d)", self.target, cancelled)
            if errors and self._cancelled_all:
                log.warning(
                    "endpoint %s: requests of a worker that died could not be cancelled (%d), which is tried again: %s",
                    self.target,
                    count - cancelled,
                    repr(errors[0]),
                )
            self._cancelled_all = not errors

    async def close(self) -> None:
        if self._cancelling:
            await end((self._cancelling,))
        await self.client.close()
