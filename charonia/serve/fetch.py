"""What a server of this stack answers over HTTP."""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import urllib.error
import urllib.request


class Silence(Exception):
    """The server takes connections, or none any more, and says nothing."""


def fetch(url: str, timeout_s: float) -> bytes | None:
    """The body of an answer with status 200; None for any other, and where the connection is refused or breaks. Raises
    Silence where nothing comes for timeout_s. No proxy is asked."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_of_own_processes())
    )
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


@functools.cache
def _of_own_processes() -> ssl.SSLContext:
    """Of a process that was started here it does not matter whom its certificate is for, nor who signed it: reading the
    system's certificates at every check took 4 % of a core."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def takes_tls(host: str, port: int, timeout_s: float = 5) -> bool:
    """Whether a server shows its certificate, as one does that then asks for the client's: more than that only its
    clients can know."""
    try:
        with socket.create_connection((host, port), timeout_s) as raw, _of_own_processes().wrap_socket(raw):
            return True
    except OSError:
        return False


def answers(url: str, timeout_s: float = 5) -> bool:
    """Whether the answer has status 200."""
    try:
        return fetch(url, timeout_s) is not None
    except Silence:
        return False
