"""Several responses to one prompt: each one equals a separate response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from charonia_client import Client, GenerateRequest, GenerateResponse
from stack import Stack

SEED = 2**64 - 2  # response 2 has the seed 0
FIELDS: dict[str, Any] = {"text": "One", "temperature": 1.5, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc) as client:
        yield client


async def alone(client: Client, count: int) -> list[GenerateResponse]:
    """The responses for `count` seeds from SEED on, each from a separate request."""
    return [
        await client.complete(GenerateRequest(**FIELDS, seed=(SEED + at) % 2**64, stream=False)) for at in range(count)
    ]


async def test_n_responses_equal_responses_with_their_seeds(client: Client) -> None:
    expected = await alone(client, 4)
    answers = await client.complete_all(GenerateRequest(**FIELDS, seed=SEED, n=4, stream=False))
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    assert len({answer.token_ids for answer in answers}) > 1
    for answer in answers:
        assert answer.cum_logprob == pytest.approx(sum(answer.logprobs), abs=1e-3)


async def test_echo_precedes_each_response(client: Client) -> None:
    answers = await client.complete_all(GenerateRequest(**FIELDS, seed=SEED, n=3, echo=True, stream=False))
    expected = await alone(client, 3)
    assert [answer.text for answer in answers] == ["One" + answer.text for answer in expected]


async def test_best_of_returns_highest_mean_log_probability(client: Client) -> None:
    def mean(answer: GenerateResponse) -> float:
        return sum(answer.logprobs) / len(answer.logprobs)

    ranked = sorted(await alone(client, 5), key=mean, reverse=True)
    best = await client.complete_all(GenerateRequest(**FIELDS, seed=SEED, n=2, best_of=5, stream=False))
    assert [answer.token_ids for answer in best] == [answer.token_ids for answer in ranked[:2]]
