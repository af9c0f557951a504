"""The messages of `python -m charonia_gateway.check` about unusable settings."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import uvicorn
from charonia_gateway import check
from charonia_gateway.drain import Drain, DrainingServer
from charonia_gateway.port import bound_sockets
from fastapi import FastAPI

from charonia.errors import InvalidRequestError, ServeError
from charonia.serve.access import Port
from charonia.serve.checks import check_ports
from charonia.settings import read_settings


@pytest.fixture(autouse=True)
def _nothing_else_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("CHARONIA_GATEWAY_KEYS_FILE", "CHARONIA_GATEWAY_REDIS_URL", "CHARONIA_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "variable, value, code, says",
    [
        ("CHARONIA_HOST", "a..b", 1, "cannot listen on a..b, port 23333 (it is not a valid host name): set"),
        ("CHARONIA_GATEWAY_KEYS_FILE", "/" + "a" * 300, 2, "cannot be read (file name too long)"),
        ("CHARONIA_GATEWAY_LOG_REQUESTS", "/nowhere/log", 2, "cannot be written: name a file in an existing folder"),
        ("CHARONIA_GATEWAY_LOG_REQUESTS", "~/no/log", 2, f"={Path.home()}/no/log cannot be written"),
        ("CHARONIA_GATEWAY_RESUME_TIMEOUT_S", "inf", 2, "CHARONIA_GATEWAY_RESUME_TIMEOUT_S='inf': "),
        ("CHARONIA_DRAIN_TIMEOUT_S", "x", 2, "CHARONIA_GATEWAY_SHUTDOWN_TIMEOUT_S or CHARONIA_DRAIN_TIMEOUT_S='x': "),
        ("CHARONIA_TRACING_ENDPOINT", "HTTPS://me:secret@h", 2, "CHARONIA_TRACING_ENDPOINT: "),
        ("CHARONIA_GATEWAY_REDIS_URL", "redis://me:secret@h:no", 2, "CHARONIA_GATEWAY_REDIS_URL cannot be used"),
        ("CHARONIA_GATEWAY_WORKERS", "3", 2, "CHARONIA_GATEWAY_WORKERS=3 needs CHARONIA_GATEWAY_REDIS_URL"),
    ],
)
def test_wrong_setting_gives_one_line_without_a_password(
    variable: str,
    value: str,
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "keys.json").write_text('{"version": 1, "keys": []}')
    monkeypatch.setenv("CHARONIA_GATEWAY_KEYS_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        check.main()
    said = capsys.readouterr().err
    assert ended.value.code == code and says in said and said.count("\n") == 1 and "secret" not in said


def test_serve_shows_no_password_and_names_a_wrong_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_TRACING_ENDPOINT", "HTTPS://me:secret@h")
    with pytest.raises(InvalidRequestError, match="CHARONIA_TRACING_ENDPOINT: ") as refused:
        read_settings()
    assert "secret" not in str(refused.value)
    with pytest.raises(ServeError, match=r"CHARONIA_HOST=ü\.\.x is no name of a host"):
        check_ports([Port("ü..x", 23333, "CHARONIA_HOST", "CHARONIA_GATEWAY_PORT")])


def test_serve_names_all_ports_in_use_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        used = [server.getsockname()[1] for server in (one, other)]
        names = ("CHARONIA_GRPC_PORT", "CHARONIA_HTTP_PORT")
        ports = [Port("127.0.0.1", number, "", name) for number, name in zip(used, names, strict=True)]
        with pytest.raises(ServeError, match=rf"ports {used[0]} and {used[1]} are in use .* other ports with ") as told:
            check_ports(ports)
        assert "CHARONIA_GRPC_PORT (--grpc-port) and CHARONIA_HTTP_PORT (--http-port)" in str(told.value)


def test_serve_fails_if_another_process_takes_the_port() -> None:
    (one,) = bound_sockets("127.0.0.1", 0, shared=False)
    config = uvicorn.Config(FastAPI(), lifespan="off", loop="uvloop", log_config=None)
    with one, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(one.getsockname())
        other.listen()
        with pytest.raises(OSError, match="in use"):
            DrainingServer(config, Drain(0)).run([one])


def warnings_of_a_start(host: str, **env: str) -> tuple[int, list[str]]:
    """The port and the lines of a gateway whose port is in use."""
    with socket.socket() as other:
        other.bind((host, 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "charonia_gateway", "--host", host, "--port", str(port)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "cannot listen" in done.stderr, done.stderr
    return port, done.stderr.splitlines()


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_gateway_without_keys_warns_if_other_machines_reach_it(host: str, warned: bool) -> None:
    port, lines = warnings_of_a_start(host)
    found = [line for line in lines if "without API keys" in line]
    assert len(found) == warned and all(f"anyone with access to port {port}" in line for line in found)


def test_a_gateway_that_logs_requests_warns_about_the_prompts(tmp_path: Path) -> None:
    _, lines = warnings_of_a_start("127.0.0.1", CHARONIA_GATEWAY_LOG_REQUESTS=str(tmp_path / "log"))
    assert [line for line in lines if f"the texts of all prompts are written to {tmp_path}/log" in line]
