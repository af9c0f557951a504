"""Says whether structured output is there: after the first start of a checkout it is compiled while the server runs."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_S = 1


class StructuredOutput:
    def __init__(self, say: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """say(text, level) is called where something has changed, and never where all was there from the beginning."""
        self._say = say
        self._clock = clock
        self._state = ""
        self._look_at = -float("inf")

    def look(self) -> None:
        """Costs nothing once the library is there, and little before."""
        now = self._clock()
        if self._state == "there" or now < self._look_at:
            return
        self._look_at = now + _LOOK_S
        from charonia import _engine

        state, problem = _engine.guide_library()
        before, self._state = self._state, state
        if state == before:
            return
        if state == "compiling":
            self._say(
                "Structured output is still being compiled, for a few minutes after the first start: requests that "
                "need it get 503 meanwhile, others are answered",
                "info",
            )
        elif state == "missing":
            self._say(problem, "warning")
        elif before:
            self._say("Structured output is ready", "info")
