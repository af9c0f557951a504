"""The gateway's port, and the errors if the gateway cannot listen on it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket


class PortError(OSError):
    """The gateway cannot listen. The text names address, port and the settings to change."""

    def __init__(self, host: str, port: int, cause: OSError) -> None:
        reason = cause.strerror or "it is not a valid host name"
        if cause.errno == errno.EADDRINUSE:
            remedy = "end the process that uses it, or choose another port with CHARONIA_GATEWAY_PORT (--port)"
        elif cause.errno in (errno.EACCES, errno.EPERM):
            remedy = "a port below 1024 needs root: choose one from 1024 on with CHARONIA_GATEWAY_PORT (--port)"
        else:
            remedy = "set CHARONIA_HOST (--host) to an address of this machine"
        super().__init__(cause.errno, f"the gateway cannot listen on {host}, port {port} ({reason}): {remedy}")

    def __str__(self) -> str:
        return str(self.strerror)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a port at this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bound_sockets(host: str, port: int, *, shared: bool) -> list[socket.socket]:
    """A socket for each address of the host that this machine has; they do not listen yet. shared: other sockets may
    share the port. Raises PortError."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    with contextlib.ExitStack() as on_error:
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                try:
                    one = on_error.enter_context(socket.socket(family, kind, protocol))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if shared:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    if family == socket.AF_INET6:  # IPv4 has its own
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind(address)
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    missing = error  # as where IPv6 is off
                    continue
                sockets.append(one)
            if missing and not sockets:
                raise missing
        except OSError as error:
            raise PortError(host, port, error) from None
        except UnicodeError:  # a label is empty, or has more than 63 bytes
            raise PortError(host, port, OSError()) from None
        on_error.pop_all()
    return sockets


def held_port(host: str, port: int) -> list[socket.socket]:
    """Sockets that keep other gateways of several processes from the port until they are closed. Raises PortError if
    another process has it."""
    with contextlib.ExitStack() as on_error:
        held: list[socket.socket] = []
        for one in bound_sockets(host, port, shared=False):  # no other process listens
            on_error.enter_context(one)
            # The kernel lets other sockets bind as long as none listens. An abstract name is a lock that ends with its
            # process. The address is spelled as the kernel does: a host has several spellings.
            name = "\0charonia-gateway {}:{}".format(*one.getsockname()[:2])
            lock = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                lock.bind(name.encode())
            except OSError as error:
                raise PortError(host, port, error) from None
            held.append(lock)
            one.close()
        held += bound_sockets(host, port, shared=True)
        on_error.pop_all()
    return held


def machine_names() -> set[str]:
    """The host name of this machine, its first label, and this label in the domain `local` (mDNS)."""
    name = socket.gethostname().lower()
    label = name.partition(".")[0]
    return {name, label, f"{label}.local"}
