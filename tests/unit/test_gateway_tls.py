"""TLS of the gateway's port, of its connections to Triton, and of `charonia serve`'s options."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvicorn
from certificates import Authority, Pair
from charonia_client import Client, Tls
from charonia_gateway import files
from charonia_gateway.connection import bounded
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.settings import Settings
from charonia_gateway.tls import Certificates, TlsError, expiry_of
from cryptography import x509
from gateway_in_process import MODEL, gateway, listening

from charonia.errors import ServeError
from charonia.serve.access import grpc_tls_options
from charonia.serve.fetch import answers, takes_tls
from charonia.settings import ServeSettings

CHAT: dict[str, Any] = {"model": MODEL, "messages": "hi"}
HANG_S = 120


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "own")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other")


# --- the gateway's own port


def test_expiry_of_a_certificate_is_read(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue("server", "localhost")
    expected = x509.load_pem_x509_certificate(pair.cert.read_bytes()).not_valid_after_utc
    assert expiry_of(pair.cert) == expected.timestamp()
    (tmp_path / "text").write_text("no certificate")
    with pytest.raises(ValueError):
        expiry_of(tmp_path / "text")


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"5"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def served(certificates: Certificates, pair: Pair) -> AsyncIterator[int]:
    """Yield the port of a server that uses TLS like the gateway's."""

    def make(config: uvicorn.Config) -> uvicorn.Server:
        return DrainingServer(config, Drain(0), certificates=certificates)

    async with listening(hello, make, http=bounded(0), ssl_certfile=pair.cert, ssl_keyfile=pair.key) as (_, port):
        yield port


async def ask(port: int, authority: Authority, own: Pair | None = None) -> str:
    """Return the hash of the server's certificate. Raises ssl.SSLError or ConnectionError if it does not respond."""
    context = ssl.create_default_context(cafile=authority.ca)
    if own:
        context.load_cert_chain(own.cert, own.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), HANG_S)
        if not answer:
            raise ConnectionError("the server closed the connection")
        assert answer.endswith(b"https"), answer
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return hashlib.sha256(shown).hexdigest()
    finally:
        writer.close()


async def test_request_without_tls_gets_a_hint_to_use_https(authority: Authority) -> None:
    pair = authority.issue("server", "localhost", "127.0.0.1")
    async with served(Certificates(pair.cert, pair.key), pair) as port:
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as web:
            for method in ("GET", "POST"):
                answer = await web.request(method, f"http://127.0.0.1:{port}/v1/models")
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "use_https")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"no request at all")
        assert await asyncio.wait_for(reader.read(), HANG_S) in (b"", b"\x15\x03\x01\x00\x02\x02F")  # a TLS alert
        writer.close()
        await ask(port, authority)


async def test_a_certificate_that_changes_is_the_next_connections(
    authority: Authority, stranger: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHECK_INTERVAL_S", HANG_S)  # it checks the files only when the test calls it
    pair = authority.issue("server", "localhost", "127.0.0.1")
    certificates = Certificates(pair.cert, pair.key)
    async with served(certificates, pair) as port:
        assert await asyncio.to_thread(answers, f"https://127.0.0.1:{port}/"), "as charonia serve looks at it"
        first = await ask(port, authority)
        with pytest.raises(ssl.SSLError):
            await ask(port, stranger)
        authority.issue("server", "localhost", "127.0.0.1")
        certificates.refresh()
        second = await ask(port, authority)
        assert second != first
        for wrong in (b"", pair.cert.read_bytes()):  # a partly written file, and a file without a key
            pair.key.write_bytes(wrong)
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                certificates.refresh()
            assert len([one for one in caplog.records if one.name == "charonia_gateway"]) == 1
            assert await ask(port, authority) == second, "what held before still holds"


async def test_clients_need_a_certificate_of_the_ca_of_the_moment(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("server", "localhost", "127.0.0.1")
    mine, other = authority.issue("client", "client"), stranger.issue("client", "client")
    accepted = tmp_path / "accepted.pem"
    accepted.write_bytes(authority.ca.read_bytes())
    certificates = Certificates(pair.cert, pair.key, accepted)
    async with served(certificates, pair) as port:
        await ask(port, authority, mine)
        for own in (None, other):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await ask(port, authority, own)
        # charonia serve, which has no client certificate, sees that the server works.
        assert await asyncio.to_thread(takes_tls, "127.0.0.1", port)
        accepted.write_bytes(stranger.ca.read_bytes())
        certificates.refresh()
        await ask(port, authority, other)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(port, authority, mine)


@pytest.mark.parametrize("wrong", ["missing", "of another", "client_ca"])
def test_files_that_cannot_be_used_are_named(authority: Authority, wrong: str) -> None:
    pair, other = authority.issue("server", "localhost"), authority.issue("other", "localhost")
    files = {
        "missing": (pair.cert, pair.key.with_name("no.key"), None),
        "of another": (pair.cert, other.key, None),
        "client_ca": (pair.cert, pair.key, pair.key),
    }
    with pytest.raises(TlsError, match=r"\.key cannot be used: "):
        Certificates(*files[wrong])


def test_settings_that_go_together_are_asked_for(authority: Authority) -> None:
    with pytest.raises(ValueError, match="belong together"):
        Settings(_env_file=None, tls_cert=authority.ca)
    with pytest.raises(ValueError, match="belong together"):
        Settings(_env_file=None, triton_tls_cert=authority.ca).tls_to_triton()
    with pytest.raises(ValueError, match="cannot be read"):
        Settings(_env_file=None, triton_tls_ca=authority.ca.with_name("none")).tls_to_triton()
    assert Settings(_env_file=None).tls_to_triton() is None
    assert Settings(_env_file=None, triton_tls=True).tls_to_triton() is not None


# --- to Triton


def server_credentials(pair: Pair, client_ca: Path | None = None) -> grpc.ServerCredentials:
    root = client_ca.read_bytes() if client_ca else None
    pairs = [(pair.key.read_bytes(), pair.cert.read_bytes())]
    return grpc.ssl_server_credentials(pairs, root, require_client_auth=client_ca is not None)


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_gateway_speaks_tls_with_triton(authority: Authority, stranger: Authority, mutual: bool) -> None:
    pair, own = authority.issue("triton", "triton.internal"), authority.issue("gateway", "gateway")
    server = server_credentials(pair, authority.ca if mutual else None)
    good: dict[str, Any] = {"triton_tls_ca": authority.ca, "triton_tls_name": "triton.internal"}
    if mutual:
        good |= {"triton_tls_cert": own.cert, "triton_tls_key": own.key}
    async with gateway(server, **good) as (web, _):
        assert (await web.post("/v1/chat/completions", json=CHAT)).status_code == 200
    other = stranger.issue("gateway", "gateway")
    bad: list[dict[str, Any]] = [
        {},
        {**good, "triton_tls_ca": stranger.ca},
        {**good, "triton_tls_name": ""},  # the certificate is not for 127.0.0.1
    ]
    if mutual:
        bad.append({**good, "triton_tls_cert": None, "triton_tls_key": None})
        bad.append({**good, "triton_tls_cert": other.cert, "triton_tls_key": other.key})
    for settings in bad:
        async with gateway(server, **settings) as (web, double):
            assert (await web.post("/v1/chat/completions", json=CHAT)).status_code == 503, settings
            assert not double.requests


async def test_the_client_library_speaks_tls(authority: Authority) -> None:
    pair = authority.issue("triton", "triton.internal")
    async with gateway(server_credentials(pair)) as (_, server):
        async with Client(server.target, tls=Tls(authority.ca, name="triton.internal")) as client:
            assert await client.server_live()
        async with Client(server.target) as client:
            assert not await client.server_live()


# --- charonia serve


def test_charonia_serve_gives_triton_its_certificates(authority: Authority) -> None:
    pair = authority.issue("triton", "localhost")
    none: dict[str, Any] = {"_env_file": None}
    own: dict[str, Any] = {**none, "grpc_tls_cert": pair.cert, "grpc_tls_key": pair.key}
    assert grpc_tls_options(ServeSettings(**none)) == []
    assert grpc_tls_options(ServeSettings(**own)) == [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={pair.cert}",
        f"--grpc-server-key={pair.key}",
    ]
    mutual = {**own, "grpc_tls_client_ca": authority.ca}
    with pytest.raises(ServeError, match="give the gateway one with CHARONIA_TRITON_TLS_CERT"):
        grpc_tls_options(ServeSettings(**mutual))
    with_gateway = ServeSettings(**mutual, triton_tls_cert=pair.cert, triton_tls_key=pair.key)
    for settings in (ServeSettings(**mutual, gateway=False), with_gateway):
        assert grpc_tls_options(settings)[3:] == ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={authority.ca}"]
    for wrong, said in (
        ({"grpc_tls_cert": pair.cert}, "go together"),
        ({"grpc_tls_client_ca": authority.ca}, "needs CHARONIA_GRPC_TLS_CERT"),
        ({**own, "triton_tls_ca": Path("nowhere.pem")}, "CHARONIA_TRITON_TLS_CA=nowhere.pem cannot be read"),
    ):
        with pytest.raises(ServeError, match=said):
            grpc_tls_options(ServeSettings(**{**none, **wrong}))
