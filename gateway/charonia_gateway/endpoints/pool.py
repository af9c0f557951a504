"""The servers of one model: chooses one for each request, and retries with another one until the response begins.

A request is retried when its server fails, rejects it as overloaded, or lacks something that it needs. A response that
has begun is continued by another server (answer.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from charonia_client import (
    CharoniaError,
    Client,
    GenerateRequest,
    NotFound,
    NotReady,
    Overloaded,
    Tls,
    Tokenized,
    TokenizeRequest,
    Unavailable,
)
from charonia_client.waiting import end

from charonia_gateway.endpoints.answer import Answer
from charonia_gateway.endpoints.endpoint import Endpoint
from charonia_gateway.endpoints.server import Server
from charonia_gateway.record import current_owner
from charonia_gateway.state import MemoryState, State

log = logging.getLogger("charonia_gateway")
Result = TypeVar("Result")

_DESCRIPTION_AGE_S = 10.0
_UNKNOWN_AGE_S = 1.0  # before a description that no server gave is requested again
# A response without the description would be incomplete, and preprocessing may be busy.
_DESCRIPTION_TIMEOUT_S = 10.0
_ADAPTERS_TIMEOUT_S = 1.0  # The engine responds without preprocessing, and else the last known adapters are used.
_FIRST_CHECK_S = 10.0
_NOBODY = ""  # as the owner of a session: its history is lost or has ended


class SessionLost(CharoniaError):
    """The history that an interactive turn continues is on a server that takes no requests. The session's next turn
    begins a new history."""


class NotLoaded(Unavailable):
    """The servers answer, but this model is not loaded."""


class Pool:
    """Use it as `async with`."""

    def __init__(
        self,
        targets: Iterable[str],
        *,
        check_interval_s: float = 1.0,
        check_timeout_s: float = 2.0,
        resume_timeout_s: float = 0,
        on_retry: Callable[[], None] = lambda: None,
        on_resume: Callable[[], None] = lambda: None,
        on_change: Callable[[str, bool | None], None] = lambda target, up: None,
        metadata: Callable[[], Sequence[tuple[str, str]]] | None = None,
        tls: Tls | None = None,
        label: str = "",
        connect: Callable[[str], Server] | None = None,
        state: State | None = None,
    ) -> None:
        """resume_timeout_s: how long a response that has begun waits for a server that can continue it. on_retry:
        called before each retry. on_resume: called before another server continues. on_change: called with a server's
        target and whether it is up; None: it is gone. metadata, tls: as Client has them. label: of its Triton models,
        `ensemble.LABEL` and so on. connect: makes the client of a target. state: has the owners of sessions."""
        self._connect = connect or self._client
        self._tls = tls
        self.model: str | None = None  # its name, if the servers have several
        self._ensemble = f"ensemble.{label}" if label else "ensemble"
        self._targets = list(targets)
        self._check_interval_s = check_interval_s
        self._check_timeout_s = check_timeout_s
        self.resume_timeout_s = resume_timeout_s
        self.on_retry = on_retry
        self.on_resume = on_resume
        self._on_change = on_change
        self._metadata = metadata
        self._state = state or MemoryState()
        self._turn = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        # For each the time of the last request and the last result: None if no server gave one.
        self._descriptions: dict[str, tuple[float, Any]] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.endpoints: list[Endpoint] = []
        self.answers: set[Answer] = set()

    async def __aenter__(self) -> Pool:
        self.set_targets(self._targets)
        return self

    async def __aexit__(self, *_: object) -> None:
        await end([*self._tasks, *self._asking.values()])
        await asyncio.gather(*(endpoint.client.close() for endpoint in self.endpoints))

    async def first_checks(self) -> None:
        """Wait until each server has been checked once, at most _FIRST_CHECK_S: a server that does not respond ends its
        check earlier."""
        if checks := [asyncio.create_task(endpoint.checked.wait()) for endpoint in self.endpoints]:
            _, waiting = await asyncio.wait(checks, timeout=_FIRST_CHECK_S)
            await end(waiting)

    def set_targets(self, targets: Iterable[str]) -> None:
        """Add new servers. A server that is missing gets no new request, and is closed after its last one."""
        wanted = dict.fromkeys(targets)
        for endpoint in self.endpoints:
            if endpoint.removed is (endpoint.target in wanted):
                endpoint.remove(endpoint.target not in wanted)
                log.info("server %s was %s", endpoint.target, "removed" if endpoint.removed else "added again")
        known = {endpoint.target for endpoint in self.endpoints}
        for target in wanted:
            if target not in known:
                endpoint = Endpoint(self._connect(target), self._changed)
                self.endpoints.append(endpoint)
                self._on_change(target, False)
                self._keep(asyncio.create_task(self._watch(endpoint)))

    async def _watch(self, endpoint: Endpoint) -> None:
        await endpoint.watch(self._check_interval_s, self._check_timeout_s)
        self.endpoints.remove(endpoint)
        self._on_change(endpoint.target, None)
        with contextlib.suppress(CharoniaError):
            await endpoint.client.close()
        log.info("closed the connection to server %s: all its requests have ended", endpoint.target)

    def _client(self, target: str) -> Server:
        return Client(
            target,
            model=self._ensemble,
            metadata=self._metadata,
            tls=self._tls,
        )

    # --- requests

    async def begin(self, request: GenerateRequest, id: str, timeout_s: float | None = None) -> Answer:
        """Sends the request, and returns when its response has begun: with the first part, or with all parts if nothing
        is sent to the client before the end (`stream=False`). Raises the client's errors, and SessionLost."""
        answer = Answer(self, request, id, timeout_s)
        self.answers.add(answer)
        try:
            await answer.begin()
        except BaseException:
            self.answers.discard(answer)
            raise
        return answer

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _changed(self, endpoint: Endpoint) -> None:
        """A server is up or down."""
        self._on_change(endpoint.target, endpoint.up)
        if endpoint.up and len(self.endpoints) > 1:
            self._keep(asyncio.create_task(self._compare()))
        if any(one.draining and one.requests for one in self.endpoints):
            self._keep(asyncio.create_task(self._leave_draining_servers()))

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _compare(self) -> None:
        """Warns if servers cannot continue each other's responses."""
        promises = {one.target: one.promise for one in self.endpoints if one.usable}
        if len(set(promises.values())) > 1:
            log.warning(
                "the servers differ in weights, settings or processor, so some cannot continue the responses of others "
                "(docs/operations.md): %s",
                ", ".join(f"{target} has fingerprint {promise or 'none'}" for target, promise in promises.items()),
            )

    async def _leave_draining_servers(self) -> None:
        for answer in list(self.answers):
            answer.leave_draining_server()

    def summary(self, failures: list[CharoniaError]) -> CharoniaError:
        """The error for the client: the shortest wait if a server was overloaded, else the last failure."""
        if overloaded := [failure for failure in failures if isinstance(failure, Overloaded)]:
            return min(overloaded, key=lambda failure: failure.retry_after)
        failures = [failure for failure in failures if not isinstance(failure, NotFound)] or failures
        return failures[-1] if failures else Unavailable(f"no server can take requests: {self._reasons()}")

    def _reasons(self) -> str:
        return "; ".join(f"{endpoint.target}: {endpoint.reason}" for endpoint in self.endpoints) or "none is known"

    async def explained(self, error: CharoniaError) -> CharoniaError:
        """The same error, or NotLoaded if the servers have other models but not this one."""
        if self.model is None or not isinstance(error, Unavailable) or not self.endpoints:
            return error
        checks = (endpoint.client.check(self._check_timeout_s) for endpoint in self.endpoints)
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
        if not all(isinstance(outcome, NotReady) for outcome in outcomes):
            return error
        return NotLoaded(
            f"the model {self.model!r} is not loaded now, or is being loaded: /v1/models says which are ready; this "
            f"server's operator loads it with `charonia models load {self.model}`"
        )

    # --- sessions

    async def owner(self, session_id: str | None) -> str | None:
        return None if session_id is None else await self._state.owner(f"{self._ensemble} {session_id}")

    async def set_owner(self, session_id: str, target: str | None) -> None:
        await self._state.set_owner(f"{self._ensemble} {session_id}", target)

    async def lose(self, session_id: str | None, owner: str | None) -> None:
        """Raises SessionLost, and lets the session's next turn begin a new history."""
        assert session_id is not None
        await self.set_owner(session_id, _NOBODY)
        log.warning("the history of a session is lost: its server %s takes no requests now", owner)
        raise SessionLost(
            f"the history of session {session_id!r} is lost: it was on a server that takes no requests now; send this "
            "turn again to begin a new history, with what the conversation needs to know of the old one"
        )

    async def stop_session(self, session_id: str) -> None:
        await self._stop(session_id, lambda client: client.stop(session_id=session_id))

    async def cancel_session(self, session_id: str) -> None:
        await self._stop(session_id, lambda client: client.cancel(session_id=session_id))

    async def _stop(self, session_id: str, action: Callable[[Server], Awaitable[None]]) -> None:
        for answer in [one for one in self.answers if one.session_id == session_id]:
            answer.stop()
        await self._notify(session_id, action)

    async def end_session(self, session_id: str) -> None:
        """Let the servers forget a session. If its server cannot be reached, its history is not continued later."""
        forgotten = False
        try:
            forgotten = await self._notify(session_id, lambda client: client.end_session(session_id))
        finally:
            await self.set_owner(session_id, None if forgotten else _NOBODY)

    async def _notify(self, session_id: str, action: Callable[[Server], Awaitable[None]]) -> bool:
        """Call `action` for every server that can be reached: servers ignore unknown sessions. Returns whether the
        session's owner is among them. Raises an error if it failed at the owner, or at all servers."""
        owner = await self.owner(session_id)
        notified = [one for one in self.endpoints if one.reachable] or self.endpoints
        outcomes = await asyncio.gather(*(action(one.client) for one in notified), return_exceptions=True)
        errors = {one.target: outcome for one, outcome in zip(notified, outcomes, strict=True) if outcome is not None}
        if owner in errors or len(errors) == len(notified):
            error = errors.get(owner or "") or next(iter(errors.values()), self.summary([]))
            raise await self.explained(error) if isinstance(error, CharoniaError) else error
        return not owner or any(one.target == owner for one in notified)

    # --- questions about the model

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Tokenize at a server. Raises the client's errors."""
        request = replace(request, owner=current_owner())
        return await self._request(lambda client: client.tokenize(request))

    async def tokenizer_info(self) -> dict[str, Any]:
        """Client.tokenizer_info() of a server. Raises the client's errors."""
        return await self._request(lambda client: client.tokenizer_info())

    async def _request(self, question: Callable[[Server], Awaitable[Result]]) -> Result:
        """Ask the least loaded server, then the others while it fails."""
        usable = [one for one in self.endpoints if one.usable or len(self.endpoints) == 1]
        failures: list[CharoniaError] = []
        for endpoint in sorted(usable, key=lambda one: one.requests):
            try:
                return await question(endpoint.client)
            except (Overloaded, Unavailable) as error:
                failures.append(error)
        raise await self.explained(self.summary(failures))

    async def reasons(self) -> bool:
        """Whether the model's answers may contain reasoning."""
        return bool((await self.answer_formats()).get("reasoning"))

    async def answer_formats(self) -> dict[str, Any]:
        """The formats of the model's `tool_calls` and `reasoning`. None if the model has none, {} if they are not
        known."""
        return await self._described("formats", lambda client: client.answer_formats(_DESCRIPTION_TIMEOUT_S), {})

    async def quality(self) -> list[dict[str, Any]]:
        """The quality records of the model, [] if they are not known."""
        return await self._described("quality", lambda client: client.quality(_DESCRIPTION_TIMEOUT_S), [])

    async def model_info(self) -> dict[str, Any]:
        """Client.model_info() of a server, {} if it is not known."""
        return await self._described("info", lambda client: client.model_info(_DESCRIPTION_TIMEOUT_S), {})

    # --- LoRA adapters

    async def adapters(self) -> tuple[dict[str, dict[str, Any]], bool]:
        """The LoRA adapters of all servers, by name, and whether these are all: False if a server does not respond.
        Then its last known adapters are among them. Not cached, because they change at any time."""
        usable = [one for one in self.endpoints if one.usable]
        asked = (one.client.adapters(_ADAPTERS_TIMEOUT_S) for one in usable)
        # A server that is only reachable has not loaded the model.
        known = bool(usable) or all(one.reachable for one in self.endpoints)
        for endpoint, found in zip(usable, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(found, list):
                endpoint.adapters = found
            elif isinstance(found, CharoniaError):
                known = False
            else:
                raise found
        listed: dict[str, dict[str, Any]] = {}
        for endpoint in sorted(self.endpoints, key=lambda one: not one.usable):
            for adapter in endpoint.adapters or ():
                listed.setdefault(adapter["name"], adapter)
        return listed, known

    @property
    def has_listed(self) -> bool:
        """Whether a server has listed its adapters."""
        return any(endpoint.adapters is not None for endpoint in self.endpoints)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter on all servers that can be reached; a server that has it does nothing. Raises the client's
        errors: then no server has it that did not have it before."""
        loaded: list[Endpoint] = []
        try:
            for endpoint in self._reachable():
                had = any(one["name"] == name for one in await endpoint.client.adapters())
                await endpoint.client.load_adapter(name, path)
                if not had:
                    loaded.append(endpoint)
        except BaseException:
            undone = (one.client.unload_adapter(name) for one in loaded)
            await asyncio.shield(asyncio.gather(*undone, return_exceptions=True))
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from all servers. Raises NotFound if no server has it, Unavailable if a server cannot be
        reached, and other errors of the client."""
        found = False
        failures: list[CharoniaError] = []
        for endpoint in self._reachable():
            try:
                await endpoint.client.unload_adapter(name)
                found = True
            except NotFound as error:
                failures.insert(0, error)
            except CharoniaError as error:
                failures.append(error)
        if failures and not (found and isinstance(failures[-1], NotFound)):
            raise failures[-1]
        if away := [one.target for one in self.endpoints if not one.reachable and not one.removed]:
            raise Unavailable(
                f"{name} was unloaded, but not from {', '.join(away)}, which cannot be reached: unload it again later"
            )

    def _reachable(self) -> list[Endpoint]:
        """Raises Unavailable if there is none."""
        if found := [one for one in self.endpoints if one.reachable]:
            return found
        raise self.summary([])

    async def _described(self, what: str, question: Callable[[Server], Awaitable[Result]], unknown: Result) -> Result:
        """The last known result of a request about the model. An old result is requested again in the background.
        Callers wait only while the result is unknown, all for the same request."""
        requested_at, answer = self._descriptions.get(what, (None, None))
        age = _UNKNOWN_AGE_S if answer is None else _DESCRIPTION_AGE_S
        old = requested_at is None or time.monotonic() - requested_at > age
        if old and what not in self._asking and self.usable:
            task = self._asking[what] = asyncio.create_task(self._describe(what, question, answer))
            task.add_done_callback(lambda _: self._asking.pop(what))
        if answer is None and what in self._asking:
            await asyncio.wait((self._asking[what],))
            _, answer = self._descriptions.get(what, (None, None))
        found: Result = unknown if answer is None else answer
        return found

    async def _describe(
        self, what: str, question: Callable[[Server], Awaitable[Result]], answer: Result | None
    ) -> None:
        """Asks all servers at the same time, because one may hang, and takes the first result. The other requests end
        by themselves: Triton may count a cancelled one as running for ever."""

        async def ask(server: Server) -> Result | None:
            with contextlib.suppress(CharoniaError):
                return await question(server)
            return None

        asked = [asyncio.create_task(ask(one.client)) for one in self.endpoints if one.usable]
        for task in asked:
            self._keep(task)
        for first in asyncio.as_completed(asked):
            if (found := await first) is not None:
                answer = found
                break
        self._descriptions[what] = (time.monotonic(), answer)

    # --- health

    @property
    def usable(self) -> bool:
        """Whether a server takes requests, as of the last checks."""
        return any(endpoint.usable for endpoint in self.endpoints)

    async def why_not_ready(self) -> str | None:
        """None when requests can be served."""
        if len(self.endpoints) == 1:
            try:
                await self.endpoints[0].client.check()
            except CharoniaError as error:
                return str(error)
            return None
        return None if self.usable else f"no server can take requests: {self._reasons()}"
