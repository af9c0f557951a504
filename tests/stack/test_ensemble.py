"""Requests through the real server: preprocessing, engine, postprocessing."""

from __future__ import annotations

import asyncio
import json
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from stack import HANG_S, Stack, curl
from tiny_models import EOS, TEXTS, TokenizerKind, start_token
from triton_stream import Response, collect
from tritonclient.utils import InferenceServerException

AT_ONCE = 32
GREEDY = {"temperature": 0.0, "max_tokens": 500}


def text_of(responses: list[Response]) -> bytes:
    return b"".join(response.text for response in responses)


async def all_at_once(client: triton.InferenceServerClient, requests: list[dict[str, Any]]) -> list[list[Response]]:
    return list(await asyncio.gather(*(collect(client, fields) for fields in requests)))


async def test_stream_equals_text_in_every_script(parrot_client: triton.InferenceServerClient) -> None:
    prompts = list(islice(cycle(enumerate(TEXTS)), AT_ONCE))
    requests = [{"messages": start_token(index), "stream": True, **GREEDY} for index, _ in prompts]
    for (_, text), responses in zip(prompts, await all_at_once(parrot_client, requests), strict=True):
        assert text_of(responses) == text.encode()
        assert all(response.text.decode() is not None for response in responses)  # each part is valid UTF-8 by itself
        assert [response.finish_reason for response in responses] == [""] * (len(responses) - 1) + ["stop"]
        total = sum(len(response.ids) for response in responses)
        assert responses[-1].tensors["num_output_tokens"] == [total]


async def test_streams_of_random_tokens_equal_unstreamed_text(babbler_client: triton.InferenceServerClient) -> None:
    """Half of a babbler's tokens are bytes that are not valid characters. The text of a stream must not depend on its
    chunks."""
    fields = [
        {"messages": f"prompt {index}", "seed": index, "temperature": 1.5, "ignore_eos": True, "max_tokens": 150}
        for index in range(AT_ONCE)
    ]
    streamed, whole = await asyncio.gather(
        all_at_once(babbler_client, [{**one, "stream": True} for one in fields]), all_at_once(babbler_client, fields)
    )
    for responses, (one,) in zip(streamed, whole, strict=True):
        assert [token for response in responses for token in response.ids] == one.ids
        assert text_of(responses) == one.text
        assert "�" in one.text.decode()


async def test_raw_text_keeps_leading_space_and_chat_drops_it(
    kind: TokenizerKind, parrot_client: triton.InferenceServerClient
) -> None:
    (raw,) = await collect(parrot_client, {"text_input": start_token(0), **GREEDY})
    (chat,) = await collect(parrot_client, {"messages": start_token(0), **GREEDY})
    assert chat.text.decode() == TEXTS[0]
    assert raw.text.decode() == (" " if kind == "byte_fallback" else "") + TEXTS[0]


async def test_request_may_select_outputs(parrot_client: triton.InferenceServerClient) -> None:
    """Triton skips the steps of the ensemble that no output needs, but no other steps."""
    config = (await parrot_client.get_model_config("ensemble")).config
    every = [output.name for output in config.output]
    one = [[name] for name in every]
    with_these = ("text_output", "finish_reason")
    two = [[name, more] for name in every for more in with_these if name != more]
    for names in [*one, *two, every]:
        asked = collect(parrot_client, {"messages": start_token(0), **GREEDY}, outputs=names)
        (response,) = await asyncio.wait_for(asked, HANG_S)
        assert sorted(response.tensors) == sorted(names)
        if "text_output" in names:
            assert response.text.decode() == TEXTS[0]


async def test_echo_is_sent_once_and_first(parrot_client: triton.InferenceServerClient) -> None:
    fields = {"messages": start_token(1), "exclude_input_in_output": False, **GREEDY}
    expected = (start_token(1) + TEXTS[1]).encode()
    assert text_of(await collect(parrot_client, {**fields, "stream": True})) == expected
    assert text_of(await collect(parrot_client, fields)) == expected


async def test_token_ids_are_continued_and_echoed_as_text(
    parrot_client: triton.InferenceServerClient,
) -> None:
    (text,) = await collect(parrot_client, {"text_input": start_token(1), **GREEDY})
    assert text.tensors["num_input_tokens"] == [1]
    asked = {"text_input": start_token(1), "prompt_logprobs": 0, "max_tokens": 1}
    ids = (await collect(parrot_client, asked))[0].tensors["prompt_ids"].tolist()
    fields = {"prompt_token_ids": ids, **GREEDY}
    (answer,) = await collect(parrot_client, fields)
    assert (answer.text, answer.ids) == (text.text, text.ids)
    (echoed,) = await collect(parrot_client, {**fields, "exclude_input_in_output": False})
    assert echoed.text == start_token(1).encode() + text.text


@pytest.mark.parametrize("stop", ["jumps over", "brown fox j", ".", "T", "é, 42"])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_ends_before_stop_word(parrot_client: triton.InferenceServerClient, stop: str, stream: bool) -> None:
    fields = {"messages": start_token(0), "stop_words": ["never said", stop], "stream": stream, **GREEDY}
    responses = await collect(parrot_client, fields)
    assert text_of(responses).decode() == TEXTS[0].partition(stop)[0]
    assert responses[-1].finish_reason == "stop"


async def test_bad_words_and_logit_bias_reach_the_engine(parrot_client: triton.InferenceServerClient) -> None:
    (plain,) = await collect(parrot_client, {"messages": start_token(0), **GREEDY})
    banned = {str(plain.ids[3]): -100}
    (biased,) = await collect(parrot_client, {"messages": start_token(0), "logit_bias": json.dumps(banned), **GREEDY})
    assert biased.ids[:3] == plain.ids[:3]
    assert biased.ids[3] != plain.ids[3]
    # The end of the text is one token, and so it can be a bad word: then the response cannot contain it.
    fields = {"messages": start_token(0), "bad_words": [EOS], "temperature": 0.0, "max_tokens": len(plain.ids) + 4}
    (endless,) = await collect(parrot_client, fields)
    assert plain.ids[-1] not in endless.ids
    assert endless.finish_reason == "length"


async def test_log_probs_have_row_per_token(parrot_client: triton.InferenceServerClient) -> None:
    fields = {"messages": start_token(0), "return_log_probs": True, "top_logprobs": 3, "stream": True, **GREEDY}
    for response in await collect(parrot_client, fields):
        count = len(response.ids)
        assert response.tensors["output_log_probs"].shape == (count,)
        best = response.tensors["top_log_prob_ids"].reshape(count, 3)[:, 0]
        assert best.tolist() == response.ids
        assert (np.diff(response.tensors["top_log_probs"].reshape(count, 3)) <= 0).all()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "text_input, prompt_token_ids, messages"),
        ({"text_input": "a", "messages": "b"}, "text_input, prompt_token_ids, messages"),
        ({"messages": "[1"}, "messages"),
        ({"messages": "5"}, "messages: 5 is not a conversation"),
        ({"messages": "[" * 100_000}, "messages: nested deeper than 200 levels"),
        ({"messages": "a", "tools": "[" * 100_000}, "tools: nested deeper than 200 levels"),
        ({"messages": '[{"role": "wizard", "content": "x"}]'}, "unknown role wizard"),
        ({"text_input": b"\xff"}, "text_input"),
        ({"text_input": "a", "logit_bias": "{"}, "logit_bias"),
        ({"text_input": "a", "stop_words": [b"\xff"]}, "stop_words"),
        ({"text_input": "a", "temperature": -1.0}, "temperature"),
        ({"text_input": "a", "max_tokens": 0}, "max_tokens"),
        ({"text_input": "a", "max_tokens": 100000}, "100000"),
        ({"text_input": "word " * 5000}, "2048"),
    ],
)
async def test_wrong_request_field_is_named(
    parrot_client: triton.InferenceServerClient, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InferenceServerException) as error:
        await asyncio.wait_for(collect(parrot_client, fields), HANG_S)
    assert "[400] " in str(error.value)
    assert named in str(error.value)


async def test_rejected_request_does_not_affect_others(parrot_client: triton.InferenceServerClient) -> None:
    good = {"messages": start_token(2), "stream": True, **GREEDY}
    bad = {"messages": start_token(2), "temperature": -1.0}
    answers = await asyncio.gather(
        *(collect(parrot_client, fields) for fields in [good, bad] * 8), return_exceptions=True
    )
    for answer in answers[0::2]:
        assert isinstance(answer, list)
        assert text_of(answer).decode() == TEXTS[2]
    assert all(isinstance(answer, Exception) for answer in answers[1::2])


def test_generate_with_curl(parrot: Stack) -> None:
    body = {"messages": start_token(1), "max_tokens": 500, "temperature": 0}
    status, text = curl(f"{parrot.http}/v2/models/ensemble/generate", body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == TEXTS[1]
    assert json.loads(text)["finish_reason"] == "stop"


def test_generate_stream_with_curl(parrot: Stack) -> None:
    body = {"messages": start_token(1), "max_tokens": 500, "temperature": 0, "stream": True}
    status, text = curl(f"{parrot.http}/v2/models/ensemble/generate_stream", body)
    assert status == 200, text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == TEXTS[1]
    assert events[-1]["finish_reason"] == "stop"
