"""Access to Triton's ports: addresses, closed APIs, TLS (docs/security.md)."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shlex
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from charonia.errors import ServeError
from charonia.settings import ServeSettings, env_name

# Clients of a model do not need these APIs, which read, change or load things in the server's process.
_CLOSED = ("shared-memory", "logging", "trace", "model-repository", "statistics")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # and the address on this machine
_OPEN = ("01", "08")  # ESTABLISHED, CLOSE_WAIT: Linux's states of a connection that this side has not closed


class Port(NamedTuple):
    """A port of a process, and the variables that set it."""

    address: str
    number: int
    address_name: str
    number_name: str


def ports(settings: ServeSettings) -> list[Port]:
    """Triton's, then the gateway's where it is served."""
    own = [("triton_address", f"{name}_port") for name in ("http", "grpc", "metrics")]
    own += [("host", "gateway_port")] if settings.gateway else []
    return [
        Port(getattr(settings, address), getattr(settings, number), env_name(address), env_name(number))
        for address, number in own
    ]


def triton_options(settings: ServeSettings) -> list[str]:
    """The server's options that close APIs on HTTP and gRPC. Inference over HTTP is closed too, unless a setting opens
    it: the server parses the body of such a request with a JSON parser that overflows its stack.

    The server can only require a header. The name of this header has a colon, which neither HTTP nor gRPC can send. So
    the server rejects every request, although all users of the machine can read the command line.
    """
    closed = ",".join(_CLOSED)
    restricted = [
        f"http-restricted-api={closed}:none: it is closed",
        f"grpc-restricted-protocol={closed}:none: it is closed",
    ]
    if not settings.http_inference:
        restricted.append(f"http-restricted-api=inference:none: {env_name('http_inference')} opens it")
    return [f"--{option}={secrets.token_hex(16)}" for option in restricted]


def grpc_tls_options(settings: ServeSettings) -> list[str]:
    """The server's options for TLS on its gRPC port. ServeError for files that are missing."""
    names = [f"grpc_tls_{name}" for name in ("cert", "key", "client_ca")]
    names += [f"triton_tls_{name}" for name in ("ca", "cert", "key")]
    files: dict[str, Path | None] = {name: getattr(settings, name) for name in names}
    for name, file in files.items():
        if file is not None and not os.access(file, os.R_OK):
            raise ServeError(f"{env_name(name)}={file} cannot be read")
    cert, key, client_ca = (files[name] for name in names[:3])
    if (cert is None) != (key is None):
        raise ServeError(f"{env_name('grpc_tls_cert')} and {env_name('grpc_tls_key')} go together: set both, or none")
    if cert is None or key is None:
        if client_ca is not None:
            raise ServeError(f"{env_name('grpc_tls_client_ca')} needs {env_name('grpc_tls_cert')}")
        return []
    options = ["--grpc-use-ssl=true", f"--grpc-server-cert={cert.absolute()}", f"--grpc-server-key={key.absolute()}"]
    if client_ca is None:
        return options
    if settings.gateway and files["triton_tls_cert"] is None:
        raise ServeError(
            f"{env_name('grpc_tls_client_ca')} has Triton ask for certificates: give the gateway one with "
            f"{env_name('triton_tls_cert')} and {env_name('triton_tls_key')}"
        )
    return [*options, "--grpc-use-ssl-mutual=true", f"--grpc-root-cert={client_ca.absolute()}"]


def warnings(settings: ServeSettings) -> Iterator[str]:
    """Warnings about ports that other machines or web pages can reach."""
    if not _is_local(settings.triton_address):
        also = ", one deeply nested body to HTTP ends it" if settings.http_inference else ""
        yield (
            f"Triton listens on {settings.triton_address} without a key: everyone who reaches ports "
            f"{settings.http_port}, {settings.grpc_port} and {settings.metrics_port} can use the model, continue, stop "
            f"and end the sessions and requests whose ids they know{also} (docs/security.md)"
        )
    elif settings.http_inference:
        yield (
            f"Triton's HTTP port {settings.http_port} answers inference ({env_name('http_inference')}): a web page in "
            "a browser on this machine can use it too, and one deeply nested body ends Triton (docs/security.md)"
        )
    if settings.gateway and settings.gateway_keys_file is None and not _is_local(settings.host):
        yield (
            f"the gateway listens on {settings.host} without a key: everyone who reaches port {settings.gateway_port} "
            f"can use the model; {env_name('gateway_keys_file')} asks for keys, {env_name('host')}=127.0.0.1 keeps it "
            "to this machine (docs/security.md)"
        )
    elif settings.gateway and settings.gateway_tls_cert is None and not _is_local(settings.host):
        yield (
            f"the gateway takes keys on {settings.host} without TLS: whoever reads the network reads them; set "
            f"{env_name('gateway_tls_cert')} or put a proxy before it (docs/security.md)"
        )


def gateway_url(settings: ServeSettings) -> str:
    """The URL of the gateway on this machine."""
    scheme = "https" if settings.gateway_tls_cert else "http"
    return f"{scheme}://{bracketed(loopback(settings.host))}:{settings.gateway_port}"


def outside_urls(url: str, host: str) -> list[str]:
    """The URLs of a gateway for other machines, if it listens on all addresses: `url` with the machine's address, where
    there is a network, and with its name."""
    if host not in _WILDCARDS:
        return []
    names = [socket.gethostname()]
    family, anywhere = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((anywhere, 9))  # sends nothing, and chooses the address for packets to other networks
        names.insert(0, bracketed(unsent.getsockname()[0]))
    return [url.replace(bracketed(loopback(host)), name) for name in names]


def page_lines(url: str, host: str) -> list[str]:
    """The addresses of the chat page."""
    lines = [url]
    if others := outside_urls(url, host):
        lines += [
            f"from other machines: {' or '.join(others)}",
            f"under another name: CHARONIA_GATEWAY_ALLOWED_ORIGINS={url.replace(bracketed(loopback(host)), 'NAME')}",
        ]
    return lines


def grpc_target(settings: ServeSettings) -> str:
    """HOST:PORT of Triton's gRPC on this machine."""
    return f"{bracketed(loopback(settings.triton_address))}:{settings.grpc_port}"


def curl_options(settings: ServeSettings) -> list[str]:
    """Options of curl for the gateway, quoted for a shell: the key, and the gateway's own certificate as the trusted
    one."""
    options = []
    if settings.gateway_keys_file:
        options.append('-H "Authorization: Bearer $CHARONIA_API_KEY"')
    if settings.gateway_tls_cert:
        options.append(f"--cacert {shlex.quote(str(settings.gateway_tls_cert.absolute()))}")
    if settings.gateway_tls_client_ca:
        options.append("--cert YOUR_CERTIFICATE --key ITS_KEY")
    return options


def curl_lines(settings: ServeSettings, route: str, body: Sequence[str]) -> list[str]:
    """The lines of a command that sends these lines of a JSON body to the gateway."""
    first = f"curl {gateway_url(settings)}{route} -H 'Content-Type: application/json'"
    data = [f"-d '{body[0]}", *body[1:]]
    data[-1] += "'"
    options = [f"{line} \\" for line in (first, *curl_options(settings))]
    return [options[0], *(f"  {line}" for line in (*options[1:], *data))]


def has_clients(ports: Collection[int]) -> bool:
    """Whether a process is connected to a process that listens on one of these ports of this machine or container."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text("ascii").splitlines()[1:]]
    return any(state in _OPEN and int(local.rpartition(":")[2], 16) in ports for _, local, _, state, *_ in rows)


def _is_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def loopback(host: str) -> str:
    """The address on this machine of a server that listens on `host`."""
    return _WILDCARDS.get(host, host)


def bracketed(host: str) -> str:
    """The host as it is written in a URL."""
    return f"[{host}]" if ":" in host else host
