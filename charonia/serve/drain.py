"""Lets calls of the ensemble come to their end before Triton is asked to shut down.

When it is asked to shut down, Triton 24.10 stops all models at once, and the calls of the ensemble that
are in flight lose their text. A model that is unloaded takes no new request and is not ready, but its calls in flight
go on. So the ensemble is unloaded first.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
import urllib.request
from collections.abc import Callable

ENSEMBLE = "ensemble"
_HEADER = "charonia-control"
_POLL_S = 0.05
_ANSWER_S = 5  # what Triton takes at most to answer about its models


class ModelControl:
    """Triton's API that loads and unloads models, for this process alone: callers have to know a key."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)

    def options(self) -> dict[str, str]:
        """The server's options for it. All models of the repository are loaded at the start, as without them."""
        restricted = f"model-repository:{_HEADER}={self._key}"
        return {
            "model-control-mode": "explicit",
            "load-model": "*",
            "http-restricted-api": restricted,
            "grpc-restricted-protocol": restricted,
        }

    def drain(self, url: str, limit_s: float, hurry: Callable[[], bool]) -> bool:
        """Unloads the ensemble of the Triton at `url` and returns once its calls have ended (true), or false after
        limit_s, when hurry() says so, or when Triton does not answer."""
        deadline = time.monotonic() + limit_s
        try:
            # Answered at once: the calls end afterwards.
            self._post(f"{url}/v2/repository/models/{ENSEMBLE}/unload")
            while self._is_unloading(url):
                if hurry() or time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        except (http.client.HTTPException, OSError):
            return False
        return True

    def _is_unloading(self, url: str) -> bool:
        models = json.loads(self._post(f"{url}/v2/repository/index"))
        return any(model["name"] == ENSEMBLE and model.get("state") == "UNLOADING" for model in models)

    def _post(self, url: str) -> bytes:
        request = urllib.request.Request(url, b"{}", {_HEADER: self._key, "Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ANSWER_S) as answer:
            body: bytes = answer.read()
            return body
