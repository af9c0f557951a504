"""TLS of the gateway's own port. New connections use changed certificates."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from charonia_gateway.files import FollowedFiles

_WITHOUT_TLS = b"""{"error": {"message": "this port uses TLS: write https:// instead of http://", \
"type": "invalid_request_error", "param": null, "code": "use_https"}}
"""
_HEAD = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"


class _Connection(ssl.SSLObject):
    """Answers a request without TLS with an error. Without it the connection would be closed without a word."""

    outgoing: ssl.MemoryBIO
    _answered = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if error.reason != "HTTP_REQUEST" or self._answered:
                raise
            self._answered = True
            self.outgoing.write(_HEAD % len(_WITHOUT_TLS) + _WITHOUT_TLS)
            raise ssl.SSLWantReadError from None  # the response is sent; the client then closes the connection


class _Context(ssl.SSLContext):
    sslobject_class = _Connection

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **more)
        assert isinstance(made, _Connection)
        made.outgoing = outgoing
        return made


class TlsError(ValueError):
    """The files of certificates cannot be used; the message says why."""


class Certificates(FollowedFiles):
    """`cert`: the server's chain, `key`: its private key, `client_ca`: clients need a certificate of one of these. All
    are PEM."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises TlsError if a file is missing or wrong, or if the key does not match the certificate."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        super().__init__(cert, key, *([client_ca] if client_ca else []))

    def _read(self) -> None:
        self._current = self._new_context()

    def context(self) -> ssl.SSLContext:
        """A context for a server. Each new connection uses the latest certificate, key and CA, which were read
        together."""
        first = self._new_context()

        def take_current(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self._current

        first.sni_callback = take_current  # also called for clients that send no server name
        return first

    def _new_context(self) -> ssl.SSLContext:
        context = _Context(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # OpenSSL must not prompt for the password of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise TlsError(f"{self._cert} and {self._key} cannot be used: {_reason(error)}") from None
        if self._client_ca:
            try:
                context.load_verify_locations(self._client_ca)
            except (OSError, ValueError) as error:
                raise TlsError(f"{self._client_ca} cannot be used: {_reason(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
            # No session resumption: a client must send its certificate again, because the CA may have changed.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context


def expiry_of(certificate: Path) -> float:
    """When the first certificate of a PEM file expires, in seconds since 1970. Raises OSError or ValueError for a file
    without a certificate."""
    text = certificate.read_text(encoding="ascii", errors="replace")
    begin = text.index(ssl.PEM_HEADER)
    pem = text[begin : text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)]
    try:
        (_, whole), *_ = _der_fields(ssl.PEM_cert_to_DER_cert(pem))
        (_, signed), *_ = _der_fields(whole)
        _, _, _, (_, validity), *_ = (field for field in _der_fields(signed) if field[0] != _VERSION)
        _, (tag, end) = _der_fields(validity)
    except IndexError:
        raise ValueError(f"the certificate in {certificate} is cut off") from None
    year = "" if tag == _LONG_YEAR else "19" if end[:2] >= b"50" else "20"  # RFC 5280, 4.1.2.5
    return datetime.strptime(year + end.decode(), "%Y%m%d%H%M%S%z").timestamp()


_VERSION, _LONG_YEAR = 0xA0, 0x18  # DER tags


def _der_fields(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each value in a sequence."""
    while der:
        tag, size, begin = der[0], der[1], 2
        if size & 0x80:
            begin += size & 0x7F
            size = int.from_bytes(der[2:begin], "big")
        yield tag, der[begin : begin + size]
        der = der[begin + size :]


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        # If OpenSSL has no name for the error, the file is not PEM, or the key needs a password.
        return error.reason or "expected a certificate and a key in PEM, the key without a password"
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
