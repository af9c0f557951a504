"""Detection of a Triton that does not respond to a request. Every response counts, including an error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from certificates import Authority
from triton_double import Double, error, input_text, part
from tritonclient.grpc import service_pb2 as pb

from charonia.serve import liveness
from charonia.serve.liveness import Liveness
from charonia.settings import ServeSettings

HANG_S = 120


def probing(double: Double, limit_s: float, *ensembles: str, **settings: Path | str) -> Liveness:
    port = int(double.target.rpartition(":")[2])
    return Liveness(ServeSettings(grpc_port=port, hang_timeout_s=limit_s, **settings), lambda: ensembles)


async def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), HANG_S)


async def says_token(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
    yield part("b", "length")


async def rejects(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
    yield error("[429] the queue is full")


@pytest.mark.parametrize("behaviour", [says_token, rejects])
async def test_liveness_server_answers_is_not_hung(behaviour: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PAUSE_S", 0.01)
    async with Double() as double:
        double.behaviour = behaviour  # type: ignore[assignment]
        probe = probing(double, 2.0 * HANG_S, "ensemble", "ensemble.b")
        await until(lambda: len(double.requests) >= 4)
        probe.stop()
        assert not probe.hung
        first, second = double.requests[:2]
        assert (first.model_name, second.model_name) == ("ensemble", "ensemble.b")
        assert (input_text(first, "text_input"), input_text(first, "pooling")) == ("a", "any")
        shapes = [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in first.inputs]
        kinds = {"text_input": "BYTES", "max_tokens": "INT32", "timeout_ms": "INT32", "pooling": "BYTES"}
        assert shapes == [(name, kind, [1]) for name, kind in kinds.items()]
        assert [int.from_bytes(raw, "little") for raw in first.raw_input_contents[1:3]] == [1, HANG_S * 500]


async def test_liveness_server_with_mutual_tls_is_not_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_PAUSE_S", 0.01)
    authority = Authority(tmp_path)
    server, client = authority.issue("server", "triton.internal"), authority.issue("client", "charonia")
    credentials = grpc.ssl_server_credentials(
        [(server.key.read_bytes(), server.cert.read_bytes())], authority.ca.read_bytes(), require_client_auth=True
    )
    async with Double(credentials) as double:
        probe = probing(
            double,
            2.0 * HANG_S,
            "ensemble",
            grpc_tls_cert=server.cert,
            triton_tls_ca=authority.ca,
            triton_tls_cert=client.cert,
            triton_tls_key=client.key,
            triton_tls_name="triton.internal",
        )
        await until(lambda: len(double.requests) >= 1)
        probe.stop()


@pytest.mark.slow
async def test_liveness_server_is_silent_is_hung() -> None:
    async with Double() as double:
        double.streams_hang = True
        probe = probing(double, 5, "ensemble")
        await until(lambda: probe.hung)


async def test_liveness_server_is_gone_is_hung_after_the_timeout() -> None:
    async with Double() as double:
        pass
    began = time.monotonic()
    probe = probing(double, 5, "ensemble")
    await until(lambda: probe.hung)
    assert time.monotonic() - began >= 5


async def test_liveness_goes_on_after_a_certificate_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_MISSES", 1000)
    missing, errors = tmp_path / "missing.pem", ""

    def are_two() -> bool:
        nonlocal errors
        errors += capsys.readouterr().err
        return errors.count("the liveness probe of ensemble failed") >= 2

    async with Double() as double:
        probe = probing(double, 5, "ensemble", grpc_tls_cert=missing, triton_tls_ca=missing)
        await until(are_two)
        probe.stop()
