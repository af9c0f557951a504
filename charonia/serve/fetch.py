"""What a server of this stack answers over HTTP."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request


class Silence(Exception):
    """The server takes connections, or none any more, and says nothing."""


def fetch(url: str, timeout_s: float) -> bytes | None:
    """The body of an answer with status 200; None for any other, and where the connection is refused or breaks. Raises
    Silence where nothing comes for timeout_s. No proxy is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return bytes(answer.read()) if answer.status == 200 else None
    except TimeoutError:
        raise Silence from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise Silence from None
        return None
    except (http.client.HTTPException, OSError):
        return None


def answers(url: str, timeout_s: float = 5) -> bool:
    """Whether the answer has status 200."""
    try:
        return fetch(url, timeout_s) is not None
    except Silence:
        return False
