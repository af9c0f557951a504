"""Which endpoint a request goes to.

1. A request of a session goes to the session's server, which has its history and its KV blocks. A session that has no
   server, or whose server is down, not ready or removed, gets one by rendezvous hashing, which is remembered. The
   choice says whether the request would go on with a history that is not there. Where the session's server is up but
   did not take a request with the whole conversation, another one answers it, and has the session from then on.
2. Another goes to the server that has computed the longest beginning of its prompt, as long as that one's outstanding
   tokens are not far above the least.
3. Else it goes to the server with the least outstanding tokens, of equals to the one that was not chosen for longest.

Servers that are down, not ready or removed are never chosen, and suspect ones only when no other is left or when they
have the session. A gateway with one server always uses it: the request itself is then the best check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from charonia_client import GenerateRequest

from charonia_gateway.endpoints import load
from charonia_gateway.endpoints.affinity import Affinity, Prefixes, SessionAffinity, prefix_keys, rendezvous
from charonia_gateway.endpoints.endpoint import Endpoint
from charonia_gateway.endpoints.health import State
from charonia_gateway.endpoints.sessions import SharedSessions

Reason = Literal["session", "prefix", "load", "only"]

# A known prefix is worth this much more work than the least, and this request's own on top.
_PREFIX_LOAD_FACTOR = 1.5


@dataclass(frozen=True)
class Choice:
    endpoint: Endpoint
    reason: Reason
    moved_from: str | None = None  # the target of the session's server before
    loses_history: bool = False  # the request goes on with the session's history, which is on that server


class Chooser:
    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sessions: SessionAffinity | SharedSessions | None = None
    ) -> None:
        self.sessions = SessionAffinity() if sessions is None else sessions
        self._prefixes = Prefixes()
        self._clock = clock
        self._turn = 0

    def choose(
        self, request: GenerateRequest, endpoints: Sequence[Endpoint], tried: Container[str] = ()
    ) -> Choice | None:
        """None when there is no endpoint that could take the request; those in `tried` (targets) have not."""
        if len(endpoints) == 1 and not endpoints[0].removed:
            if endpoints[0].target in tried:
                return None
            if request.session_id is None:
                return Choice(endpoints[0], "only")
            # There may be more of them later, or have been before.
            affinity = self.sessions.get(request.session_id)
            before = affinity.target if affinity and affinity.target != endpoints[0].target else None
            answered = bool(before and affinity and affinity.answered)
            if not answered:
                self.assign(request.session_id, endpoints[0])
            return Choice(endpoints[0], "only", before, loses_history=answered and bool(request.interactive))
        usable = {endpoint.target: endpoint for endpoint in endpoints if endpoint.usable}
        untried = {target: endpoint for target, endpoint in usable.items() if target not in tried}
        up = {target: endpoint for target, endpoint in untried.items() if endpoint.health.state is State.UP}
        candidates = up or untried
        if request.session_id is not None:
            choice = self._by_session(request, usable, candidates, tried)
        else:
            choice = self._by_prefix_or_load(request, candidates)
        if choice:
            self._turn += 1
            choice.endpoint.turn = self._turn
        return choice

    def assign(self, session_id: str, endpoint: Endpoint) -> None:
        """The session's requests go to this server from now on. Where a choice moves a session that has a history, its
        caller does this once the server has taken the request: if it does not, the history is still where it was."""
        affinity = self.sessions.get(session_id)
        same = affinity is not None and affinity.target == endpoint.target
        self.sessions.remember(session_id, affinity if affinity and same else Affinity(endpoint.target, answered=False))

    def answered(self, request: GenerateRequest, endpoint: Endpoint) -> None:
        """The request's answer has begun there: its session, if it goes on, has a history there."""
        session_id = request.session_id
        if (
            session_id is not None
            and (affinity := self.sessions.get(session_id))
            and affinity.target == endpoint.target
        ):
            self.sessions[session_id] = affinity._replace(answered=not request.end_session)

    def _by_session(
        self,
        request: GenerateRequest,
        usable: dict[str, Endpoint],
        candidates: dict[str, Endpoint],
        tried: Container[str],
    ) -> Choice | None:
        session_id = request.session_id
        assert session_id is not None
        affinity = self.sessions.get(session_id)
        if affinity and affinity.target in usable:
            if affinity.target not in tried:
                self.assign(session_id, usable[affinity.target])
                return Choice(usable[affinity.target], "session")
            # The server is up but has rejected this request. Elsewhere an interactive turn would lack its history.
            if request.interactive or not candidates:
                return None
            return Choice(self._least_loaded(candidates), "load", affinity.target)
        if not candidates:
            return None
        chosen = candidates[rendezvous(session_id, candidates)]
        if affinity is None or not affinity.answered:
            self.assign(session_id, chosen)
        if affinity is None:
            return Choice(chosen, "session")
        return Choice(chosen, "session", affinity.target, loses_history=affinity.answered and bool(request.interactive))

    def _by_prefix_or_load(self, request: GenerateRequest, candidates: dict[str, Endpoint]) -> Choice | None:
        if not candidates:
            return None
        least = self._least_loaded(candidates)
        keys = prefix_keys(request)
        known = self._prefixes.find(keys, candidates)
        choice = Choice(least, "load")
        if known and known.busy_until <= self._clock():
            own = load.prompt_tokens(request) + load.answer_tokens(request)
            if known.outstanding_tokens <= _PREFIX_LOAD_FACTOR * least.outstanding_tokens + own:
                choice = Choice(known, "prefix")
        self._prefixes.remember(keys, choice.endpoint.target)
        return choice

    def _least_loaded(self, candidates: dict[str, Endpoint]) -> Endpoint:
        now = self._clock()
        return min(
            candidates.values(),
            key=lambda endpoint: (endpoint.busy_until > now, endpoint.outstanding_tokens, endpoint.turn),
        )
