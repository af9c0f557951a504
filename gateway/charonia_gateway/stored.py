"""Stored responses of /v1/responses."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from charonia_gateway.errors import unavailable
from charonia_gateway.state import State, StateUnavailable

log = logging.getLogger("charonia_gateway")


@dataclass
class Stored:
    """A stored response. conversation: all messages, including the response. session_id: the engine's session, which
    the whole chain of responses shares. owner: the id of the key that created it. model: the model's own name, also if
    an adapter computed the response. size: the stored size in bytes."""

    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    session_id: str
    owner: str | None = None
    model: str = ""
    size: int = 0

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def to_json(self) -> bytes:
        return to_json([self.response, self.conversation, self.session_id, self.owner, self.model])


class ResponseStore:
    def __init__(self, state: State, limit: int, max_bytes: int) -> None:
        """limit: 0 means that nothing is stored. max_bytes: of one response."""
        self._state = state
        self._max_bytes = max_bytes
        self.limit = limit

    async def add(self, entry: Stored) -> bool:
        """False if it is too large, cannot be returned as JSON, or cannot be stored now."""
        try:
            data = entry.to_json()
            if len(data) > self._max_bytes:
                return False
            await self._state.add_response(entry.id, entry.session_id, data)
        except (ValueError, RecursionError, StateUnavailable) as error:
            log.warning("a response is not stored: %s", str(error) or type(error).__name__)
            return False
        return True

    async def get(self, id: str, owner: str | None = None) -> Stored | None:
        """None also for a response of another owner. Raises ApiError 503."""
        try:
            data = await self._state.response(id)
        except StateUnavailable:
            raise unavailable("stored responses cannot be read now: try again") from None
        if data is None:
            return None
        entry = Stored(*json.loads(data))
        entry.size = len(data)
        return entry if entry.owner == owner else None

    async def remove(self, entry: Stored) -> bool:
        """Remove a response that get() returned. Raises ApiError 503."""
        try:
            return await self._state.remove_response(entry.id, entry.session_id, entry.size)
        except StateUnavailable:
            raise unavailable("stored responses cannot be deleted now: try again") from None

    async def has_session(self, session_id: str) -> bool:
        """Whether another response of that chain is stored, as far as is known."""
        try:
            return await self._state.has_session(session_id)
        except StateUnavailable:
            return True

    async def try_continue(self, entry: Stored) -> bool:
        """Whether a response may continue the entry's session, because no other one has continued it or does. Then
        continued() must follow."""
        try:
            return await self._state.claim(entry.id)
        except StateUnavailable:
            return False  # the response begins a session of its own, with the whole conversation

    async def continued(self, entry: Stored, *, stored: bool) -> None:
        """stored: whether the response that continued the session was stored. If not, another one may continue it."""
        if not stored:
            with contextlib.suppress(StateUnavailable):
                await self._state.unclaim(entry.id)
