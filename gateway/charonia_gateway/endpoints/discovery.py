"""Where the endpoints are. The setting is a list of entries, each of them

    host:port              one server
    dns:///host:port       a server at every address of that name, which is asked for again and again
    file:///absolute/path  the entries of a file, one a line, # before a comment; it is read again and again

so that servers can be removed and returned while the gateway runs: by a name (a headless service, a scaled container)
or by hand. While a name cannot be resolved, or a file not be read, the servers known before stay.

A file may be read while it is written, or have been cut by a full disk. So one without an entry, or without a line end
at its end, counts as one that cannot be read, and a server goes only when two readings in a row have the same text.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger("charonia_gateway")

FORMS = "HOST:PORT, dns:///HOST:PORT or file:///PATH"


def entries(text: str) -> list[str]:
    """The entries of a list that commas or line ends separate. ValueError for one that is none of the forms."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    found = [entry.strip() for line in lines for entry in line.split(",") if entry.strip()]
    for entry in found:
        if not entry.startswith("file:///"):
            _address(entry)
    return found


def _address(entry: str) -> tuple[str, int]:
    """Host and port of HOST:PORT or dns:///HOST:PORT."""
    try:
        parts = urlsplit(f"//{entry.removeprefix('dns:///')}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{entry!r} is no endpoint ({error}): write {FORMS}") from None
    if not host or not port or parts.path or parts.query or parts.username is not None:
        raise ValueError(f"{entry!r} is no endpoint: write {FORMS}")
    return host, port


def _target(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Discovery:
    """`text` is a list that entries() has passed."""

    def __init__(self, text: str) -> None:
        self._entries = entries(text)
        self._known: dict[str, list[str]] = {}  # by entry, what it stood for last
        self._texts: dict[str, str] = {}  # by entry, the text of its file at the last reading
        self._failed: set[str] = set()  # entries of which it was last said that they cannot be read
        self._changes = any("///" in entry for entry in self._entries)

    async def targets(self) -> list[str]:
        """HOST:PORT of each server, none twice."""
        found = [target for entry in self._entries for target in await self._targets_of(entry)]
        return list(dict.fromkeys(found))

    async def follow(self, use: Callable[[Iterable[str]], None], interval_s: float) -> None:
        """Calls `use` with the servers every `interval_s` seconds, if they can change."""
        while self._changes:
            await asyncio.sleep(interval_s)
            try:
                use(await self.targets())
            except Exception:
                log.exception("looking for endpoints had an error of the gateway's own; the next look follows")

    async def _targets_of(self, entry: str) -> list[str]:
        try:
            if entry.startswith("file:///"):
                self._known[entry] = await self._targets_of_file(entry)
            elif entry.startswith("dns:///"):
                host, port = _address(entry)
                # Of a name without an address it is said that there is no such name; so an error is no empty list.
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                self._known[entry] = sorted({_target(str(address[0]), port) for *_, address in found})
            else:
                return [_target(*_address(entry))]
            self._failed.discard(entry)
        except (OSError, ValueError) as error:
            if entry not in self._failed:
                self._failed.add(entry)
                kept = ", ".join(self._known.get(entry, [])) or "none"
                log.warning("the endpoints of %s are not known (%s); until they are: %s", entry, error, kept)
        return self._known.get(entry, [])

    async def _targets_of_file(self, entry: str) -> list[str]:
        text = await asyncio.to_thread(Path(entry.removeprefix("file://")).read_text, encoding="utf-8")
        before, self._texts[entry] = self._texts.get(entry), text
        inner = entries(text)
        if not inner:
            raise ValueError("it has no entry: a file of endpoints names one at least")
        if not text.endswith("\n"):
            raise ValueError("its last line has no line end, as if it were cut: end it with one")
        if nested := [name for name in inner if name.startswith("file:///")]:
            raise ValueError(f"{nested[0]!r}: a file of endpoints names no other file")
        found = [target for name in inner for target in await self._targets_of(name)]
        return found if text == before else list(dict.fromkeys([*found, *self._known.get(entry, [])]))
