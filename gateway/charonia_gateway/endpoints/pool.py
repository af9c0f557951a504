"""All endpoints: chooses one for each request, and tries another when the first one fails.

A request may go to another endpoint until the first part of its answer: when its server fails, rejects it as
overloaded, or is found down while the request waits there. After the first part it stays where it is. A server that is
only not ready, as one that drains, keeps all that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from charonia_client import (
    BadRequest,
    CharoniaError,
    Client,
    ConnectionLost,
    GenerateRequest,
    GenerateResponse,
    Overloaded,
    Tls,
    Tokenized,
    TokenizeRequest,
    Unavailable,
)
from charonia_client.client import Way
from charonia_client.waiting import end

from charonia_gateway.endpoints.affinity import MAX_SESSIONS, Recent
from charonia_gateway.endpoints.calls import Calls
from charonia_gateway.endpoints.chooser import Choice, Chooser, Reason
from charonia_gateway.endpoints.endpoint import Endpoint, InFlight
from charonia_gateway.endpoints.health import State
from charonia_gateway.endpoints.server import Server
from charonia_gateway.endpoints.sessions import (
    POLL_S,
    SharedEnds,
    SharedSessions,
    SharedStaleSessions,
    StaleSessions,
)
from charonia_gateway.logprobs import MAX_ENTRIES, count_entries
from charonia_gateway.shared import Shared

log = logging.getLogger("charonia_gateway")
Asked = TypeVar("Asked")

# A request may itself crash its server. It must not crash all of them.
_MAX_LOST_CONNECTIONS = 2
_DESCRIPTION_AGE_S = 10.0
_DESCRIPTION_TIMEOUT_S = 1.0
_MAX_TARGETS = 1000  # of which it is remembered what they were not told
_PRUNE_EVERY = 100  # new targets
_FIRST_CHECK_S = 1.0


class SessionLost(CharoniaError):
    """A turn would go on with a history that is on a server that takes no requests. The session's next turn begins
    anew."""


class NotLoaded(Unavailable):
    """The servers answer, and do not serve this one of their models."""


@dataclass
class Answer:
    """An answer that has begun: `first` is what has come of it, `rest` what comes. Close it."""

    in_flight: InFlight
    first: list[GenerateResponse]
    rest: AsyncGenerator[GenerateResponse, None]
    replaced: str | None = None  # the session whose outdated history this replaces, once it has come to its end

    async def aclose(self) -> None:
        if self.replaced and not self.in_flight.finished:
            self.in_flight.endpoint.stale_sessions.remember(self.replaced, None)
        await self.in_flight.aclose(self.rest)


class Pool:
    """The servers of one model. Use it as `async with`. `on_choice` and `on_retry` are told of what they are named for,
    `on_way` as Client has it.
    `model`: its name, where the servers have several; `label`: of its models in Triton, `ensemble.LABEL` and so on.
    `connect`: in place of a client of the Triton server at a target. `subscribe`: as Client has it. `shared`: with the
    gateway's other workers."""

    def __init__(
        self,
        targets: Iterable[str],
        *,
        check_interval_s: float = 1.0,
        check_timeout_s: float = 2.0,
        on_choice: Callable[[Reason], None] = lambda _: None,
        on_retry: Callable[[], None] = lambda: None,
        on_way: Callable[[Way], None] = lambda _: None,
        metadata: Callable[[], Sequence[tuple[str, str]]] | None = None,
        tls: Tls | None = None,
        subscribe: bool = False,
        model: str | None = None,
        label: str = "",
        connect: Callable[[str], Server] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._connect = connect or self._client
        self._tls = tls
        self._subscribe = subscribe and connect is None
        self._refusals: set[tuple[str, str]] = set()  # what was said of targets that do not take all by subscription
        self._model = model
        self._ensemble = f"ensemble.{label}" if label else "ensemble"
        self._targets = list(targets)
        self._check_interval_s = check_interval_s
        self._check_timeout_s = check_timeout_s
        self._on_choice = on_choice
        self._on_retry = on_retry
        self._on_way = on_way
        self._metadata = metadata
        self._shared = shared
        self._ends = SharedEnds(shared, f"ends {self._ensemble}") if shared else None
        self._chooser = Chooser(sessions=SharedSessions(shared, f"homes {self._ensemble}") if shared else None)
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.endpoints: list[Endpoint] = []
        self._descriptions: dict[str, tuple[float, Any]] = {}  # when each was asked for, and the answer
        self._formats: dict[str, str | None] | None = None  # None: no server has said
        self._formats_at = -math.inf  # when they were asked for
        self._asking: asyncio.Task[None] | None = None  # for them
        # By target: a server that leaves the list and comes back may have histories that are out of date.
        self._stale: Recent[str, StaleSessions | SharedStaleSessions] = Recent(_MAX_TARGETS)
        self._new_targets = 0

    async def __aenter__(self) -> Pool:
        self.set_targets(self._targets)
        return self

    async def __aexit__(self, *_: object) -> None:
        await end([*self._watches.values(), *([self._asking] if self._asking else [])])
        await asyncio.gather(*(endpoint.close() for endpoint in self.endpoints))

    async def first_checks(self) -> None:
        """Returns when each server has been asked, or after a second. Before, what it could take is refused."""
        if asked := [asyncio.create_task(endpoint.check_ended()) for endpoint in self.endpoints]:
            _, waiting = await asyncio.wait(asked, timeout=_FIRST_CHECK_S)
            await end(waiting)

    def set_targets(self, targets: Iterable[str]) -> None:
        """Adds new endpoints. One that is missing gets no new request and is dropped after its last one."""
        wanted = dict.fromkeys(targets)
        known = {endpoint.target: endpoint for endpoint in self.endpoints}
        for target, endpoint in known.items():
            if endpoint.removed is (target in wanted):
                endpoint.removed = target not in wanted
                log.info("endpoint %s %s", target, "is removed" if endpoint.removed else "is taken back")
                endpoint.look_again()
        for target in wanted:
            if target not in known:
                calls = Calls(self._shared, f"{self._ensemble} {target}") if self._shared else None
                endpoint = Endpoint(self._connect(target), self._changed, self._stale_at(target), calls)
                self.endpoints.append(endpoint)
                self._watches[target] = asyncio.create_task(self._watch(endpoint))

    def _client(self, target: str) -> Server:
        elsewhere = partial(self._look_up_elsewhere, target)
        return Client(
            target,
            model=self._ensemble,
            metadata=self._metadata,
            lookup_elsewhere=elsewhere,
            tls=self._tls,
            subscribe=self._subscribe,
            on_way=self._on_way,
            on_refusal=partial(self._note_refusal, target),
        )

    def _note_refusal(self, target: str, why: str) -> None:
        if (target, why) not in self._refusals and len(self._refusals) < _MAX_TARGETS:
            self._refusals.add((target, why))
            log.warning("answers of %s come by a stream each where no subscription has them: %s", target, why)

    async def _look_up_elsewhere(self, target: str, ids: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        """The names of tokens, for an answer of a server that ends and has them no more."""
        for endpoint in [one for one in self.endpoints if one.usable and one.target != target]:
            with contextlib.suppress(CharoniaError):
                return await endpoint.client.look_up(ids)
        raise Unavailable("no server knows the names of tokens")

    async def reasons(self) -> bool:
        """Whether the model's answers may hold reasoning."""
        return bool((await self.answer_formats()).get("reasoning"))

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """What the tokenizer of one of the servers makes of it. Raises the client's errors."""
        return await self._asked(lambda client: client.tokenize(request))

    async def tokenizer_info(self) -> dict[str, Any]:
        """What Client.tokenizer_info() of one of the servers says. Raises the client's errors."""
        return await self._asked(lambda client: client.tokenizer_info())

    async def _asked(self, action: Callable[[Server], Awaitable[Asked]]) -> Asked:
        """What a server answers, that with the least work first; of several servers one that cannot is passed over."""
        usable = [one for one in self.endpoints if one.usable or len(self.endpoints) == 1]
        failure: CharoniaError | None = None
        for endpoint in sorted(usable, key=lambda one: one.outstanding_tokens):
            try:
                return await action(endpoint.client)
            except (Overloaded, Unavailable) as error:
                failure = error
        raise await self._explained(failure or self._told([]))

    async def quality(self) -> list[dict[str, Any]]:
        """The quality records of the model, asked of one server and remembered for a while. [] where none can say."""
        return await self._described("quality", lambda client: client.quality(_DESCRIPTION_TIMEOUT_S), [])

    async def model_info(self) -> dict[str, Any]:
        """What Client.model_info() of one of the servers says, remembered for a while. {} where none can say."""
        return await self._described("info", lambda client: client.model_info(_DESCRIPTION_TIMEOUT_S), {})

    async def _described(self, what: str, ask: Callable[[Server], Awaitable[Asked]], nothing: Asked) -> Asked:
        known = self._descriptions.get(what)
        if known and known[0] > time.monotonic() - _DESCRIPTION_AGE_S:
            found: Asked = known[1]
            return found
        answer = nothing
        usable = [one for one in self.endpoints if one.usable]
        for endpoint in usable:
            with contextlib.suppress(CharoniaError):
                answer = await ask(endpoint.client)
                break
        if usable:  # also where none of them could say: the next one shall not wait as long
            self._descriptions[what] = (time.monotonic(), answer)
        return answer

    @property
    def usable(self) -> bool:
        """Whether a server takes requests, as far as the last checks say."""
        return any(endpoint.usable for endpoint in self.endpoints)

    async def _explained(self, error: CharoniaError) -> CharoniaError:
        """The error that a client gets. Of several models one may be unloaded while the servers are well: what they say
        of it is asked at once, as what a request meets there says less."""
        if self._model is None or not isinstance(error, Unavailable):
            return error
        await asyncio.gather(*(endpoint.checked() for endpoint in self.endpoints))
        if not all(endpoint.health.state is State.NOT_READY for endpoint in self.endpoints) or not self.endpoints:
            return error
        return NotLoaded(
            f"the model {self._model!r} is not loaded now, or is being loaded: /v1/models says which are ready; this "
            f"server's operator loads it with `charonia models load {self._model}`"
        )

    async def answer_formats(self) -> dict[str, str | None]:
        """The formats of the model's `tool_calls` and `reasoning`, asked of one server and remembered for a while. None
        where the model has none, and where no server can say. Only who asks before they are known waits, all of them
        for the same question."""
        age_s = time.monotonic() - self._formats_at
        if age_s > (_DESCRIPTION_TIMEOUT_S if self._formats is None else _DESCRIPTION_AGE_S):
            self._begin_asking()
        if self._formats is None and self._asking is not None:
            await asyncio.wait((self._asking,))
        return self._formats or {}

    def _begin_asking(self) -> None:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_formats())

    async def _ask_formats(self) -> None:
        usable = [one for one in self.endpoints if one.usable]
        try:
            for endpoint in usable:
                with contextlib.suppress(CharoniaError):
                    self._formats = await endpoint.client.answer_formats(_DESCRIPTION_TIMEOUT_S)
                    break
        finally:
            if usable:
                self._formats_at = time.monotonic()
            self._asking = None

    def _stale_at(self, target: str) -> StaleSessions | SharedStaleSessions:
        """What a server was not told. That of a listed one is its own, also where more targets came since."""
        for endpoint in self.endpoints:
            if endpoint.target == target:
                return endpoint.stale_sessions
        stale = self._stale.get(target)
        if stale is None:
            stale = self._new_stale(target)
        self._stale.remember(target, stale)
        return stale

    def _new_stale(self, target: str) -> StaleSessions | SharedStaleSessions:
        if self._shared is None:
            return StaleSessions(MAX_SESSIONS)
        beginning = f"stale {self._ensemble} "
        stale = SharedStaleSessions(self._shared, beginning + target, MAX_SESSIONS)
        self._new_targets += 1
        if self._new_targets % _PRUNE_EVERY == 0:
            with contextlib.suppress(sqlite3.Error):
                stale.prune_spaces(beginning, _MAX_TARGETS)
        return stale

    async def begin(self, request: GenerateRequest, id: str, timeout_s: float | None = None) -> Answer:
        """Sends the request, and returns once its answer has begun: with the first part, or, where nothing is sent to
        the client before the end (`stream=False`), with all. Raises the client's errors when no endpoint could,
        and SessionLost when one could that has not the history that the request goes on with."""
        began = time.monotonic()
        tried: list[str] = []
        failures: list[CharoniaError] = []
        lost_connections = 0
        while choice := self._chooser.choose(request, self.endpoints, tried):
            self._note_move(choice, request)
            self._note(choice, retry=bool(tried))
            endpoint = choice.endpoint
            tried.append(endpoint.target)
            gone_s = time.monotonic() - began
            sent = time.monotonic()
            asked = request if not failures else _with_less_time(request, gone_s)
            parts = endpoint.client.generate(
                asked, request_id=id, timeout_s=None if timeout_s is None else timeout_s - gone_s
            )
            entry = InFlight(endpoint, id, request)
            self._note_follower(entry)
            replaced: str | None = None
            try:
                replaced = await self._settle_session(endpoint, request)
                first = [await anext(parts)]
                entry.note(first[0])
                if entry.session_ended or self._was_ended(request, sent):
                    self._end_again(entry)
                else:
                    self._move(choice, request)
                    self._chooser.answered(request, endpoint)
                entries = _check_entries(0, first[0])
                if not request.stream:
                    async for part in parts:
                        entries = _check_entries(entries, part)
                        first.append(part)
                    entry.finished = first[-1].finish_reason in ("stop", "length")
                return Answer(entry, first, parts, replaced)
            except (Overloaded, Unavailable) as error:  # another one may take it
                entry.close()
                if replaced:
                    endpoint.stale_sessions.remember(replaced, None)
                failures.append(error)
                if isinstance(error, Overloaded):
                    endpoint.busy_until = time.monotonic() + error.retry_after
                    continue
                if timeout_s is not None and time.monotonic() - began >= timeout_s:
                    raise
                # A check may see that the connection broke before the request does, which is then taken from there.
                lost_connections += isinstance(error, ConnectionLost) or endpoint.broken
                endpoint.suspect(str(error))
                if lost_connections >= _MAX_LOST_CONNECTIONS:
                    break
                if request.session_id is not None and len(self.endpoints) > 1:
                    await endpoint.checked()  # whether the session's server is down
            except BaseException:
                if replaced:
                    endpoint.stale_sessions.remember(replaced, None)
                await entry.aclose(parts)
                raise
        raise await self._explained(self._told(failures))

    def _note(self, choice: Choice, *, retry: bool) -> None:
        if retry:
            self._on_retry()
        if choice.reason != "only":
            self._on_choice(choice.reason)

    def _note_move(self, choice: Choice, request: GenerateRequest) -> None:
        """Raises SessionLost where the request needs what the session's old server has."""
        session_id, before = request.session_id, choice.moved_from
        if session_id is None or before is None:
            return
        old = next((endpoint for endpoint in self.endpoints if endpoint.target == before), None)
        if old is None or old.removed:
            why = "was removed"
        elif choice.reason == "load":
            why = "did not take the request"
        else:
            why = f"is {old.health.state.value}: {old.health.reason}"
        log.warning("a session moves from %s, which %s, to %s", before, why, choice.endpoint.target)
        if choice.loses_history:
            self._move(choice, request)
            raise SessionLost(
                f"the history of session {session_id!r} is lost: it was on a server that takes no requests now; send "
                "this turn again to begin anew, with what the conversation has to know of it"
            )

    def _move(self, choice: Choice, request: GenerateRequest) -> None:
        """A session that has moved has its history on the new server, and its old one is to forget it."""
        if request.session_id is not None and choice.moved_from is not None:
            self._stale_at(choice.moved_from).remember(request.session_id, None)
            self._chooser.assign(request.session_id, choice.endpoint)

    async def _settle_session(self, endpoint: Endpoint, request: GenerateRequest) -> str | None:
        """No turn goes on with a history that is out of date: the server forgets it first. A request with the whole
        conversation replaces it once the server has taken it. Then the session's id is returned: if the request is not
        taken, its history stays out of date."""
        session_id = request.session_id
        if session_id is None or session_id not in endpoint.stale_sessions:
            return None
        if request.interactive:
            await endpoint.forget_stale_session(session_id)
            return None
        while session_id in endpoint.stale_sessions:
            await endpoint.forgotten(session_id)
            if endpoint.stale_sessions.take(session_id):
                return session_id
            await asyncio.sleep(POLL_S)  # somebody tells the server anew
        return None

    def _told(self, failures: list[CharoniaError]) -> CharoniaError:
        """The error for the client: with the time to retry if any server has given one, else the last server's."""
        overloaded = [failure for failure in failures if isinstance(failure, Overloaded)]
        if overloaded:
            return min(overloaded, key=lambda failure: failure.retry_after)
        return failures[-1] if failures else Unavailable(f"no server can take requests: {self._reasons()}")

    def _reasons(self) -> str:
        return "; ".join(f"{endpoint.target}: {endpoint.health.reason}" for endpoint in self.endpoints) or "none known"

    async def end_session(self, session_id: str) -> None:
        """Forgets a session. A server that is down is told when it comes back. Where a server cannot be told, that is
        raised, and it is told again after its next good check."""
        server = self._server_of(session_id)
        running = self._running(session_id)
        if self._ends is not None:  # requests of all workers look there
            self._ends.note(session_id)
        else:
            for entry in running:
                entry.session_ended = True
        if server is None and (affinity := self._chooser.sessions.get(session_id)):  # it may come back
            self._stale_at(affinity.target).remember(session_id, None)
        reached = any(entry.endpoint.health.state is not State.DOWN for entry in running)
        if server and len(self.endpoints) > 1 and not server.usable and not reached:
            server.stale_sessions.remember(session_id, None)
            del self._chooser.sessions[session_id]
            return
        await self._tell(
            session_id,
            lambda client: client.end_session(session_id),
            lambda endpoint: endpoint.stale_sessions.remember(session_id, None),
        )
        self._chooser.sessions.pop(session_id, None)

    def _note_follower(self, entry: InFlight) -> None:
        if entry.session_id is not None:
            for other in self._running(entry.session_id):
                other.followed = other is not entry
            if self._ends is not None:  # so that other workers' are followed, too
                del self._ends[entry.session_id]

    def _was_ended(self, request: GenerateRequest, sent: float) -> bool:
        """Whether any worker has ended the request's session since it was sent."""
        return self._ends is not None and request.session_id is not None and self._ends.since(request.session_id, sent)

    def _end_again(self, entry: InFlight) -> None:
        """The end of its session may have reached the server before this request, which then began the session anew.
        A later request of the session is one that the end was not for."""
        if entry.session_id is not None and not entry.followed:
            entry.endpoint.stale_sessions.remember(entry.session_id, None)
            entry.endpoint.look_again()

    async def stop_session(self, session_id: str) -> None:
        await self._tell(session_id, lambda client: client.stop(session_id=session_id))

    async def cancel_session(self, session_id: str) -> None:
        await self._tell(session_id, lambda client: client.cancel(session_id=session_id))

    def _server_of(self, session_id: str) -> Endpoint | None:
        affinity = self._chooser.sessions.get(session_id)
        return next((endpoint for endpoint in self.endpoints if affinity and endpoint.target == affinity.target), None)

    def _running(self, session_id: str) -> list[InFlight]:
        """Its requests in flight. One is at another server than the session's until it moves the session there."""
        entries = (entry for endpoint in self.endpoints for entry in endpoint.in_flight.values())
        return [entry for entry in entries if entry.session_id == session_id]

    async def _tell(
        self,
        session_id: str,
        action: Callable[[Server], Awaitable[None]],
        missed: Callable[[Endpoint], None] = lambda _: None,
    ) -> None:
        """Tells the session's server and those that have a request of it in flight. Where its server is not known,
        tells all: servers ignore unknown sessions. `missed` gets those that could not be told. Raises when none could
        be told, or when one could not that has such a request."""
        server = self._server_of(session_id)
        running = dict.fromkeys(entry.endpoint for entry in self._running(session_id))
        known = list(dict.fromkeys([server, *running])) if server else self.endpoints
        told = [
            endpoint
            for endpoint in known
            if endpoint.usable or (endpoint in running and endpoint.health.state is not State.DOWN)
        ] or known
        if not told:
            raise await self._explained(self._told([]))
        for endpoint in known:
            if endpoint not in told:
                missed(endpoint)
        outcomes = await asyncio.gather(*(action(endpoint.client) for endpoint in told), return_exceptions=True)
        for endpoint, outcome in zip(told, outcomes, strict=True):
            if isinstance(outcome, CharoniaError) and not isinstance(outcome, BadRequest):
                missed(endpoint)
        errors = {
            endpoint: outcome
            for endpoint, outcome in zip(told, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        }
        for endpoint, error in errors.items():
            if endpoint in running or len(errors) == len(told):
                raise await self._explained(error) if isinstance(error, CharoniaError) else error

    async def why_not_ready(self) -> str | None:
        """None when requests can be served."""
        if len(self.endpoints) == 1:
            try:
                await self.endpoints[0].client.check()
            except CharoniaError as error:
                return str(error)
            return None
        if any(endpoint.usable for endpoint in self.endpoints):
            return None
        return f"no server can take requests: {self._reasons()}"

    def _changed(self, endpoint: Endpoint) -> None:
        health = endpoint.health
        shown = endpoint.target if self._model is None else f"{endpoint.target} with {self._model}"
        if health.state is State.UP:
            log.info("endpoint %s is up", shown)
        else:
            log.warning("endpoint %s is %s: %s", shown, health.state.value, health.reason)
        self._rescue()

    def _rescue(self) -> None:
        """Requests that wait for their answer's beginning at a server that is down go to another, if there is one."""
        if not any(endpoint.usable and endpoint.health.state is State.UP for endpoint in self.endpoints):
            return
        for endpoint in self.endpoints:
            if endpoint.health.state is State.DOWN:
                for id in list(endpoint.in_flight):
                    endpoint.client.abort(id, f"endpoint {endpoint.target} is down: {endpoint.health.reason}")

    async def _watch(self, endpoint: Endpoint) -> None:
        while True:
            try:
                await endpoint.watch(self._check_interval_s, self._check_timeout_s)
                break
            except Exception:
                log.exception(
                    "a check of endpoint %s had an error of the gateway's own; the next follows", endpoint.target
                )
                await asyncio.sleep(self._check_interval_s)
        # It was removed and has no request left.
        self.endpoints.remove(endpoint)
        del self._watches[endpoint.target]
        with contextlib.suppress(CharoniaError):
            await endpoint.close()
        log.info("endpoint %s has ended what it had and is gone", endpoint.target)


def _check_entries(before: int, part: GenerateResponse) -> int:
    """How many log probabilities there are with this part. BadRequest for more than an answer may have in one piece."""
    entries = before + count_entries(part)
    if entries > MAX_ENTRIES:
        raise BadRequest(
            f"logprobs: the answer has more than {MAX_ENTRIES} log probabilities, of which top_logprobs has its share; "
            "ask for fewer, send max_tokens, or send stream = true and no echo"
        )
    return entries


def _with_less_time(request: GenerateRequest, gone_s: float) -> GenerateRequest:
    """The request with what is left of the time that it gave itself."""
    if request.timeout_ms is None:
        return request
    changes: dict[str, Any] = {"timeout_ms": max(1, request.timeout_ms - int(gone_s * 1000))}
    return replace(request, **changes)
