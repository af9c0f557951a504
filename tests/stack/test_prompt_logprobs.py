"""Log probabilities of a prompt, compared with transformers, and OpenAI's echo, which returns them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import openai
import pytest
from charonia_client import BadRequest, Client, GenerateRequest, GenerateResponse
from stack import DEMO_MODEL, Stack

PROMPT = "法国的首都是巴黎。 The capital of France is"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> Any:
    """The log probabilities [tokens - 1, vocab] after each token of the prompt, and the prompt's ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(ids).logits[0].double()
    return ids[0].tolist(), torch.log_softmax(logits, -1)[:-1].numpy()


async def asked(client: Client, **fields: Any) -> list[GenerateResponse]:
    request = GenerateRequest(text=PROMPT, temperature=0, max_tokens=3, prompt_logprobs=2, **fields)
    async with aclosing(client.generate(request)) as parts:
        return [part async for part in parts]


async def test_prompt_logprobs_equal_transformers(client: Client, reference: Any) -> None:
    ids, expected = reference
    (answer,) = await asked(client, stream=False)
    assert list(answer.prompt_ids) == ids
    assert len(answer.prompt_logprobs) == len(ids) - 1
    for at, (token, logprob, tops) in enumerate(
        zip(ids[1:], answer.prompt_logprobs, answer.prompt_top_logprobs, strict=True)
    ):
        assert logprob == pytest.approx(expected[at, token], abs=0.1)
        assert [top.logprob for top in tops] == pytest.approx(sorted(expected[at])[:-3:-1], abs=0.1)
    assert b"".join(answer.prompt_tokens).decode() == PROMPT


async def test_prompt_logprobs_are_sent_once(client: Client) -> None:
    (whole,) = await asked(client, stream=False)
    for parts in (await asked(client), await asked(client, n=3, seed=1), await asked(client, logprobs=1)):
        with_prompt = [part for part in parts if part.prompt_ids]
        assert len(with_prompt) == 1 and with_prompt[0].index == 0
        assert with_prompt[0].prompt_logprobs == whole.prompt_logprobs


async def test_session_turn_rejects_prompt_logprobs(client: Client) -> None:
    with pytest.raises(BadRequest, match="with the whole conversation"):
        await asked(client, session_id="s", interactive=True)


async def test_echo_has_logprobs_of_prompt_and_response(client: Client, api: openai.AsyncOpenAI, model: str) -> None:
    (whole,) = await asked(client, stream=False)
    answer = await api.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=3, logprobs=2, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == PROMPT + whole.text
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    count = len(whole.prompt_ids)
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs and logprobs.top_logprobs[0] is None
    assert tuple(logprobs.token_logprobs[1:count]) == whole.prompt_logprobs
    assert all(logprob is not None and logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) > count
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)
    assert answer.usage is not None and answer.usage.completion_tokens == whole.num_output_tokens


async def test_echo_without_response(api: openai.AsyncOpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "prompt": [PROMPT, "One"], "logprobs": 0, "echo": True, "max_tokens": 0}
    answer = await api.completions.create(**fields)
    assert [choice.text for choice in answer.choices] == [PROMPT, "One"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    first = answer.choices[0].logprobs
    assert first is not None and first.tokens is not None and "bytes:" not in first.tokens[0]
    assert len(first.tokens) == len(first.token_logprobs or [])
    texts = ["", ""]
    async for chunk in await api.completions.create(stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [PROMPT, "One"]


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_echo_equals_unstreamed(api: openai.AsyncOpenAI, model: str, n: int) -> None:
    fields: dict[str, Any] = {
        "model": model,
        "prompt": PROMPT,
        "n": n,
        "seed": 1,
        "max_tokens": 12,
        "logprobs": 1,
        "echo": True,
    }
    whole = await api.completions.create(**fields)
    texts: list[str] = [""] * n
    tokens: list[list[str]] = [[] for _ in range(n)]
    offsets: list[list[int]] = [[] for _ in range(n)]
    async for chunk in await api.completions.create(stream=True, **fields):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
