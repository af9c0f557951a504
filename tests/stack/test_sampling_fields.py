"""Sampling parameters through the gateway and Triton: each value arrives unchanged and in its own field.

The Python API is the reference, because it parses its parameters separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc.aio as triton
from stack import HANG_S, Stack, running
from tiny_models import TokenizerKind, write_model
from triton_stream import collect
from waiting import until

from charonia import Engine, Output, SamplingParams

# The tokenizer has no effect on the parameters, so one server is enough.
pytestmark = pytest.mark.parametrize("kind", ["byte_level"], indirect=True, scope="session")

PROMPT = "What is a conch?"
# A few tokens are more likely, so that a response repeats them: presence_penalty and frequency_penalty then have
# different effects.
ALWAYS: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "seed": 11, "ignore_eos": True}
ALWAYS["logit_bias"] = dict.fromkeys(range(40, 46), 4.0)
PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.5},
    {"min_p": 0.2},
    {"top_p": 0.7},
    {"top_k": 3},
]

Answer = Callable[..., Output]


@pytest.fixture(scope="module")
def answer(babbler: Stack) -> Iterator[Answer]:
    """The response of the Python API with these parameters."""
    with Engine.from_pretrained(babbler.model, threads=2, cache_max_entry_count=64) as engine:
        yield lambda **fields: engine.generate(PROMPT, SamplingParams(**fields))[0]


def test_each_penalty_and_filter_changes_response(answer: Answer) -> None:
    answers = [answer(**ALWAYS, **fields).token_ids for fields in [{}, *PENALTIES]]
    assert len({tuple(ids) for ids in answers}) == len(answers)


@pytest.mark.parametrize("fields", PENALTIES, ids=lambda fields: next(iter(fields)))
async def test_penalties_and_filters_reach_engine(
    babbler: Stack, babbler_client: triton.InferenceServerClient, answer: Answer, fields: dict[str, Any]
) -> None:
    expected = answer(**ALWAYS, **fields)
    (through_triton,) = await collect(babbler_client, {"text_input": PROMPT, **ALWAYS, **fields})
    assert through_triton.ids == expected.token_ids
    body = {"model": "babbler", "prompt": PROMPT, **ALWAYS, **fields}
    async with httpx.AsyncClient(base_url=babbler.gateway, timeout=HANG_S) as http:
        through_gateway = (await http.post("/v1/completions", json=body)).json()
    assert through_gateway["choices"][0]["text"].encode() == through_triton.text


@pytest.fixture(scope="module")
def recommended(kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A babbler whose generation_config.json allows only one token."""
    folder = tmp_path_factory.mktemp("recommended")
    write_model(folder / "babbler", kind, "babbler")
    (folder / "babbler" / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 1}')
    with running(Stack(folder / "babbler", folder / "run")) as served:
        yield served


async def test_generation_config_sets_defaults_of_all_interfaces(recommended: Stack, answer: Answer) -> None:
    limits: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    greedy, seeded = answer(**limits, temperature=0), answer(**limits, seed=5)
    assert seeded.text != greedy.text
    async with triton.InferenceServerClient(recommended.grpc) as client:
        (unset,) = await collect(client, {"text_input": PROMPT, **limits})
        (given,) = await collect(client, {"text_input": PROMPT, **limits, "top_k": 0, "temperature": 1.0, "seed": 5})
    assert (unset.ids, given.ids) == (greedy.token_ids, seeded.token_ids)
    async with httpx.AsyncClient(base_url=recommended.gateway, timeout=HANG_S) as http:

        async def post(route: str, **body: Any) -> dict[str, Any]:
            found = await http.post(route, json={"model": "babbler", **body})
            assert found.status_code == 200, found.text
            response: dict[str, Any] = found.json()
            return response

        completion = await post("/v1/completions", prompt=PROMPT, **limits)
        messages = [{"role": "user", "content": PROMPT}]
        chat = await post("/v1/chat/completions", messages=messages, **limits)
        response = await post("/v1/responses", input=PROMPT, max_output_tokens=30)
        (listed,) = (await http.get("/v1/models")).json()["data"]
    assert completion["choices"][0]["text"] == chat["choices"][0]["message"]["content"] == greedy.text
    assert (response["temperature"], response["top_p"]) == (0.5, 1.0)
    defaults = {"temperature": 0.5, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert listed["default_sampling_parameters"] == defaults
    said = "generation_config.json: temperature = 0.5, top_k = 1."
    await until(lambda: said in recommended.log_file.read_text(), recommended.log)


async def test_end_ids_reach_engine(babbler_client: triton.InferenceServerClient, answer: Answer) -> None:
    """They replace the model's own end ids. A response ends at the first of them."""
    free = answer(**ALWAYS).token_ids
    place = next(at for at in range(10, len(free)) if free[at] not in free[:at])
    unused = next(token for token in range(3, 10_000) if token not in free)
    asked = {**ALWAYS, "ignore_eos": False, "end_id": [unused, free[place]]}
    (ended,) = await collect(babbler_client, {"text_input": PROMPT, **asked})
    assert ended.ids == free[: place + 1]
    assert ended.finish_reason == "stop"
