"""Loads models on demand: asks the `charonia serve` that started this gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

from charonia_gateway import control
from charonia_gateway.endpoints.pool import Pool
from charonia_gateway.errors import ApiError, unavailable

_LOOK_S = 0.05
_RETRY_S = 10


class Autoload:
    """folder: of the socket of `charonia serve`. timeout_s: how long a request waits for its model."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._loading: dict[str, asyncio.Task[None]] = {}

    async def ensure(self, model: str, pool: Pool) -> None:
        """Return when the model takes requests. All requests for a model wait for one order, which goes on if they
        leave. Raises ApiError 503."""
        task = self._loading.get(model)
        if task is None:
            task = self._loading[model] = asyncio.create_task(self._load(model, pool))
            task.add_done_callback(lambda done: self._forget(model, done))
        done, _ = await asyncio.wait((task,), timeout=self._timeout_s)
        if not done:
            text = f"the model {model!r} is still being loaded: try again"
            raise unavailable(text, _RETRY_S, code="model_not_loaded")
        task.result()

    async def _load(self, model: str, pool: Pool) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._timeout_s
        try:
            await control.ask(self._folder, do="ensure", name=model, limit_s=str(self._timeout_s))
        except ApiError as error:
            if error.status == 503:
                error.code = "model_not_loaded"
            raise
        while not pool.usable:
            if clock() >= deadline:  # it was unloaded again, or Triton ends
                raise unavailable(f"the model {model!r} is not ready: try again", _RETRY_S, code="model_not_loaded")
            for endpoint in pool.endpoints:
                endpoint.doubt()  # it is checked immediately
            await asyncio.sleep(_LOOK_S)

    def _forget(self, model: str, task: asyncio.Task[None]) -> None:
        del self._loading[model]
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs it if all requests have left
