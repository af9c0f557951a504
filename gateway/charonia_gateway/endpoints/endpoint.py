"""One Triton server: its client, its health, and how many requests of this process it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from charonia_client import CharoniaError, NotReady, Unresponsive
from charonia_client.progress import promise_of
from charonia_client.waiting import comes_within

from charonia_gateway.endpoints.server import Server

log = logging.getLogger("charonia_gateway")

MISSED_UNTIL_DOWN = 3
PASSED_UNTIL_UP = 2


class Endpoint:
    """A server is up after its first passed check, and after two in a row if it was up before. It is down when a check
    is refused, when it reports that it is not ready, or when three checks in a row get no answer in time.

    A server is doubtful after a missed check or a failed request, until a check passes. It gets new requests only if no
    other server can take them."""

    def __init__(self, client: Server, on_change: Callable[[Endpoint], None] = lambda _: None) -> None:
        """on_change: called when `up` changes."""
        self.client = client
        self.target = client.target
        self.up = False
        self.draining = False  # it answers checks, but it is not ready
        self.doubtful = False
        self.reason = "it has not been checked yet"  # why it is not up
        self.info: dict[str, Any] = {}  # Client.model_info() at the last passed check
        self.adapters: list[dict[str, Any]] | None = None  # Client.adapters() as of the last answer; None: never asked
        self.removed = False  # it is no longer in the list: no new request, closed after its last one
        self.requests = 0
        self.turn = 0  # when it was chosen last: breaks ties
        self.checked = asyncio.Event()  # its first check has ended
        self._on_change = on_change
        self._missed = 0  # checks in a row
        self._passes_needed = 1  # checks that must pass until it is up
        self._wake = asyncio.Event()

    @property
    def usable(self) -> bool:
        """Whether it may get new requests."""
        return self.up and not self.removed

    @property
    def reachable(self) -> bool:
        """Whether it can receive stop requests."""
        return self.up or self.draining

    def has_adapter(self, lora_name: str | None) -> bool:
        """Whether it had the adapter NAME=FINGERPRINT when it was asked last."""
        return lora_name is None or any(
            f"{one['name']}={one['fingerprint']}" == lora_name for one in self.adapters or ()
        )

    def acquire(self) -> None:
        self.requests += 1

    def release(self) -> None:
        self.requests -= 1
        if self.removed:
            self._wake.set()

    def remove(self, removed: bool) -> None:
        self.removed = removed
        self._wake.set()

    def doubt(self) -> None:
        """A request failed here. The next check starts immediately."""
        self.doubtful = True
        self._wake.set()

    def passed(self) -> None:
        """A check passed."""
        self._missed, self.doubtful, self.draining = 0, False, False
        self._passes_needed -= 1
        if not self.up and self._passes_needed <= 0:
            self._change(True, "")

    def missed(self, why: str) -> None:
        """A check had no answer in time."""
        self._missed += 1
        self.doubtful = True
        if self._missed >= MISSED_UNTIL_DOWN or not self.up:
            self.failed(why)

    def failed(self, why: str, draining: bool = False) -> None:
        """A check was refused, or found that the server is not ready."""
        self.draining = draining
        self._passes_needed = PASSED_UNTIL_UP
        self._change(False, why)

    def _change(self, up: bool, reason: str) -> None:
        before, self.up, self.reason = self.up, up, reason
        if before is not up:
            if up:
                log.info("server %s is up", self.target)
            else:
                log.warning("server %s is down: %s", self.target, reason)
            self._on_change(self)

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        """Check the server periodically until it is removed and has no request left."""
        while self.requests or not self.removed:
            self._wake.clear()
            try:
                await self._check(timeout_s)
            except Exception as error:
                log.exception("the check of server %s failed", self.target)
                self.failed(repr(error))
            self.checked.set()
            if not (self.up and self.doubtful):  # a doubtful server is checked again immediately
                await comes_within(self._wake, interval_s)

    async def _check(self, timeout_s: float) -> None:
        try:
            await self.client.check(timeout_s)
            self.info = await self.client.model_info(timeout_s)
        except Unresponsive as error:
            self.missed(str(error))
        except CharoniaError as error:
            self.failed(str(error), draining=isinstance(error, NotReady))
        else:
            self.passed()

    @property
    def promise(self) -> str | None:
        """charonia_client's promise_of() at the last passed check."""
        return promise_of(self.info)
