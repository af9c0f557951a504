"""HTTP requests to the processes that this one has started."""

from __future__ import annotations

import functools
import http.client
import socket
import ssl
import urllib.error
import urllib.request


class Silence(Exception):
    """The server did not answer in time."""


def fetch(url: str, timeout_s: float) -> bytes | None:
    """The body of a response with status 200. None for another status, or if the connection is refused or breaks.
    Raises Silence after timeout_s without data. Uses no proxy."""
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
    """Does not verify the certificate, because this process has started the server. (Reading the system's certificates
    at every check took 4 % of a core.)"""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def takes_tls(host: str, port: int) -> bool:
    """Whether a server completes its part of a TLS handshake. A server that requires a client's certificate does so."""
    try:
        with socket.create_connection((host, port), timeout=5) as raw, _of_own_processes().wrap_socket(raw):
            return True
    except OSError:
        return False


def answers(url: str, timeout_s: float = 5) -> bool:
    """Whether the response has status 200."""
    try:
        return fetch(url, timeout_s) is not None
    except Silence:
        return False
