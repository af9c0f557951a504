"""TLS of gRPC connections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]


class Tls:
    """A client's certificates: they check the server and identify the client. The PEM files are read here, once.

    `ca`: the CA certificates for the server's certificate; None: the public CAs that gRPC knows. `cert` and `key`: the
    client's certificate and private key, for a server that requires one. `name`: the name in the server's certificate,
    if it is not the host of the address.
    """

    def __init__(
        self, ca: Path | None = None, cert: Path | None = None, key: Path | None = None, name: str | None = None
    ) -> None:
        """Raises ValueError for an unreadable file, and for a certificate without its key."""
        if (cert is None) != (key is None):
            raise ValueError("a client's certificate and its key belong together: give both or neither")
        self.name = name or None
        self.credentials: Any = grpc.ssl_channel_credentials(_read(ca), _read(key), _read(cert))

    @property
    def options(self) -> list[tuple[str, str]]:
        """The options of the channel."""
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise ValueError(f"{path} is not a PEM file")
    return text
