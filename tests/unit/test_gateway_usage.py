"""The engine's counts and times in responses of the gateway."""

from __future__ import annotations

import subprocess
import sys

import pytest
from charonia_client import GenerateResponse
from charonia_client.types import Timings
from charonia_gateway.record import Record
from charonia_gateway.tracing import traces_url
from charonia_gateway.usage import Usage


def response(tokens: int, *times: float, cached: int = 0) -> GenerateResponse:
    return GenerateResponse(
        "x",
        finish_reason="stop",
        num_input_tokens=30,
        num_output_tokens=tokens,
        num_cached_tokens=cached,
        timings=Timings(*times),
    )


def test_timings_of_one_answer() -> None:
    usage = Usage(1, 1)
    assert usage.timings() is None and not usage.ended
    usage.see(0, response(11, 5, 25, 125, cached=20))
    assert usage.ended
    assert usage.timings() == {
        "queue_ms": 5,
        "first_token_ms": 25,
        "total_ms": 125,
        "cache_n": 20,
        "prompt_n": 10,
        "prompt_ms": 20,
        "prompt_per_second": 500,
        "predicted_n": 11,
        "predicted_ms": 100,
        "predicted_per_second": 100,
    }


def test_timings_have_the_proposals_of_speculation_if_there_are_any() -> None:
    usage = Usage(1, 2)
    for index, (proposed, accepted) in enumerate(((8, 3), (4, 0))):
        part = response(11, 5, 25, 125)
        part.num_proposed_tokens, part.num_accepted_tokens = proposed, accepted
        usage.see(index, part)
    timings = usage.timings()
    assert timings is not None and (timings["draft_n"], timings["draft_n_accepted"]) == (12, 3)


def test_timings_of_several_responses_cover_first_wait_to_last_end() -> None:
    usage = Usage(2, 2)
    held, last, other = response(1, 5, 25, 25), response(2, 5, 25, 45), response(3, 7, 30, 55, cached=10)
    for index, running in ((0, held), (0, last), (1, other)):
        running.finish_reason = None
        usage.see(index, running)
    shown = ((held, (5, 25, 25, 1, 0, None)), (last, (5, 25, 45, 2, 0, 50)), (other, (7, 30, 55, 3, 10, 80)))
    for running, expected in shown:
        alone = usage.timings_so_far(running)
        names = ("queue_ms", "first_token_ms", "total_ms", "predicted_n", "cache_n", "predicted_per_second")
        assert alone is not None and tuple(alone[name] for name in names) == expected
    assert not usage.ended
    usage.see(0, response(3, 5, 25, 65))
    assert not usage.ended
    usage.see(1, response(4, 7, 30, 75))
    timings = usage.timings()
    assert timings is not None and usage.ended and usage.timings_so_far(last) == timings
    assert (timings["queue_ms"], timings["first_token_ms"], timings["total_ms"]) == (5, 25, 75)
    assert (timings["prompt_n"], timings["predicted_n"], timings["predicted_per_second"]) == (30, 7, 100)


def test_an_answer_that_ended_before_its_first_token_has_no_rates() -> None:
    usage = Usage(1, 1)
    usage.see(0, response(0, 5, 0, 9))
    timings = usage.timings()
    assert timings is not None
    assert (timings["first_token_ms"], timings["prompt_ms"], timings["predicted_ms"]) == (0, 4, 0)
    assert timings["predicted_per_second"] is None


@pytest.mark.parametrize("given", [b"shop-42", b"a" * 128, b"6f1/8:a_b.c=="])
def test_a_clients_request_id_is_taken(given: bytes) -> None:
    record = Record(given)
    name = record.name("chatcmpl-")
    assert record.request_id == given.decode()
    assert record.engine_id == f"{given.decode()}#{name}", "two requests of one name are two to the engine"


@pytest.mark.parametrize("given", [None, b"", b"a b", b"a#b", b"a" * 129, b'"}\n{', "ü".encode()])
def test_a_request_id_that_is_not_plain_is_replaced(given: bytes | None) -> None:
    record = Record(given)
    name = record.name("chatcmpl-")
    assert record.request_id == record.engine_id == name and name.startswith("chatcmpl-")


def test_a_request_without_an_answer_has_an_id_that_stays() -> None:
    record = Record()
    assert record.request_id == record.request_id and record.request_id.startswith("request-")


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_endpoint_is_a_collector_or_its_whole_url(endpoint: str) -> None:
    assert traces_url(endpoint) == "http://c:4318/v1/traces"


@pytest.mark.slow
def test_features_that_are_off_import_no_packages() -> None:
    code = (
        "import sys\n"
        "from charonia_gateway.app import create_app\n"
        "from charonia_gateway.settings import Settings\n"
        "create_app(Settings(_env_file=None))\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'pythonjsonlogger')\n"
        "print([name for name in sys.modules if name.startswith(heavy)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin"}
    )
    assert done.stdout.strip() == "[]", done.stdout
