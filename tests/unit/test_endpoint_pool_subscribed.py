"""Tests of test_endpoint_pool.py once more, where the servers' answers come by subscriptions."""

from __future__ import annotations

from functools import partial

import pytest
import test_endpoint_pool
from charonia_client import Client, GenerateRequest
from charonia_gateway.endpoints.health import State
from charonia_gateway.endpoints.pool import Pool
from test_endpoint_pool import (
    Gateway,
    test_a_killed_server_takes_no_request_with_it_that_had_not_begun,
    test_a_request_that_brings_servers_down_does_not_bring_down_all,
    test_a_server_that_drains_keeps_what_it_has_begun,
    test_an_answer_that_has_begun_is_not_begun_again,
    test_leaving_a_request_cancels_it_where_it_is,
    test_of_answers_that_are_sent_whole_nothing_is_lost_before_the_last,
    test_servers_are_removed_and_returned_without_a_failed_request,
    test_the_time_of_a_request_is_that_of_all_its_tries,
    test_what_one_server_does_not_take_another_answers,
    test_what_waits_at_a_server_that_is_found_down_moves_and_what_has_begun_stays,
)
from triton_double import Double, unknown_tensor

__all__ = [
    "test_a_killed_server_takes_no_request_with_it_that_had_not_begun",
    "test_a_request_that_brings_servers_down_does_not_bring_down_all",
    "test_a_server_that_drains_keeps_what_it_has_begun",
    "test_an_answer_that_has_begun_is_not_begun_again",
    "test_leaving_a_request_cancels_it_where_it_is",
    "test_of_answers_that_are_sent_whole_nothing_is_lost_before_the_last",
    "test_servers_are_removed_and_returned_without_a_failed_request",
    "test_the_time_of_a_request_is_that_of_all_its_tries",
    "test_what_one_server_does_not_take_another_answers",
    "test_what_waits_at_a_server_that_is_found_down_moves_and_what_has_begun_stays",
]


@pytest.fixture(autouse=True)
def subscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_endpoint_pool, "Pool", partial(Pool, subscribe=True))


async def test_it_is_said_once_that_a_server_takes_no_subscription(caplog: pytest.LogCaptureFixture) -> None:
    async with Double() as server:
        server.refusal = unknown_tensor("input 'subscription'", "engine")
        gateway = Gateway([server])
        async with gateway.pool:
            await gateway.until_all_are(State.UP)
            (client,) = [endpoint.client for endpoint in gateway.pool.endpoints]
            assert isinstance(client, Client)
            for _ in range(2):
                assert await gateway.text(GenerateRequest(text="a")) == server.target
                client._refused_until.clear()
    said = [record.getMessage() for record in caplog.records if "no subscription has them" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"answers of {server.target} "), said
