"""When a Triton that died is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 600
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0


class Restarts:
    """Allows `limit` restarts in WINDOW_S, and as many one after the other none of which becomes ready, however long
    they take. Each comes after twice the delay of the one before: 1, 2, 4 ... 30 s."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._times: deque[float] = deque()
        self.unready = 0  # restarts since it was ready last

    @property
    def count(self) -> int:
        """In the last WINDOW_S, or since it was ready last where those are more."""
        while self._times and self._clock() - self._times[0] > WINDOW_S:
            self._times.popleft()
        return max(len(self._times), self.unready)

    def ready(self) -> None:
        """What was started again has become ready."""
        self.unready = 0

    def begin(self) -> float | None:
        """Counts a restart: seconds to wait before it; None where it is one too many."""
        count = self.count
        if count >= self.limit:
            return None
        self._times.append(self._clock())
        self.unready += 1
        return min(_FIRST_DELAY_S * 2.0**count, _MAX_DELAY_S)
