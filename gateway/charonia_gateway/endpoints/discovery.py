"""The Triton servers that CHARONIA_TRITON_ENDPOINTS names. Each entry of the list is one of

    host:port          one server
    dns:///host:port   a server at every address of the name, which is resolved again and again

With a DNS name (a headless service, a scaled container), servers come and go while the gateway runs. While a name
cannot be resolved, its last addresses stay in use.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

log = logging.getLogger("charonia_gateway")

_DNS = "dns:///"


def entries(text: str) -> list[str]:
    """Split a list at commas and white space. Raises ValueError for an entry in neither form."""
    found = [entry for entry in re.split(r"[,\s]+", text) if entry]
    for entry in found:
        _address(entry)
    return found


def _address(entry: str) -> tuple[str, int]:
    """Host and port of an entry."""
    wrong = f"{entry!r} is not a server: write HOST:PORT or {_DNS}HOST:PORT"
    try:
        parts = urlsplit(f"//{entry.removeprefix(_DNS)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(wrong) from None
    if not host or not port or parts.path or parts.query or parts.username is not None:
        raise ValueError(wrong)
    return host, port


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Discovery:
    def __init__(self, text: str) -> None:
        self._entries = entries(text)
        self._addresses: dict[str, list[str]] = {}  # targets of each DNS entry when it was last resolved
        self._unresolved: set[str] = set()  # DNS entries whose failure has been logged

    async def targets(self) -> list[str]:
        """HOST:PORT of each server, without duplicates."""
        found = [await self._resolve(entry) for entry in self._entries]
        return list(dict.fromkeys(target for targets in found for target in targets))

    async def follow(self, use: Callable[[Iterable[str]], None], interval_s: float) -> None:
        """Call `use` with the servers every `interval_s` seconds. Returns immediately if no entry is a DNS name."""
        while any(entry.startswith(_DNS) for entry in self._entries):
            await asyncio.sleep(interval_s)
            use(await self.targets())

    async def _resolve(self, entry: str) -> list[str]:
        host, port = _address(entry)
        if not entry.startswith(_DNS):
            return [_target(host, port)]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._addresses[entry] = sorted({_target(str(address[0]), port) for *_, address in found})
            self._unresolved.discard(entry)
        except (OSError, UnicodeError) as error:
            if entry not in self._unresolved:
                self._unresolved.add(entry)
                kept = ", ".join(self._addresses.get(entry, [])) or "none"
                log.warning("cannot resolve %s (%s); its servers until then: %s", entry, error, kept)
        return self._addresses.get(entry, [])
