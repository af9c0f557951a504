"""Structured output of the real server through the gateway, the client library and Triton's own client."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
from charonia_client import BadRequest, Client, GenerateRequest, Guide
from stack import HANG_S, Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is seven plus five?"}]


async def test_every_streamed_response_matches_grammar(api: openai.AsyncOpenAI, model: str) -> None:
    texts = [""] * 3
    stream = await api.chat.completions.create(
        model=model,
        messages=QUESTION,
        n=3,
        stream=True,
        max_tokens=60,
        temperature=1.5,
        logprobs=True,
        extra_body={"structured_outputs": {"regex": "(red|green)( and (red|green)){2}!"}},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        assert re.fullmatch("(red|green)( and (red|green)){2}!", text), text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
            "at its root: Unimplemented keys",
        ),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "regex"),
        ({"structured_outputs": {"grammar": "x ::= 1"}}, "structured_outputs", "is not understood"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs", "guide_max_bytes"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, None, "min_tokens"),
    ],
)
async def test_wrong_constraint_is_400_that_names_field(
    stack: Stack, model: str, fields: dict[str, Any], param: str | None, says: str, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=HANG_S) as http:
        answer = await http.post(
            "/v1/chat/completions", json={"model": model, "messages": QUESTION, "stream": stream, **fields}
        )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


async def test_client_sends_every_type_and_metrics_count_grammars(stack: Stack) -> None:
    guides = {
        Guide("json"): r"\{.*\}",
        Guide("json_schema", '{"type": "integer", "minimum": 10, "maximum": 99}'): "[1-9][0-9]",
        Guide("regex", "[0-9]{3}"): "[0-9]{3}",
        Guide("ebnf_grammar", 'root ::= "(" root ")" | "x"'): r"\(*x\)*",
        Guide("choice", '["日本", "é"]'): "日本|é",
    }
    async with Client(stack.grpc) as client:
        answers = await asyncio.gather(
            *(
                client.complete(GenerateRequest(text="x", guide=guide, max_tokens=400, seed=3, stream=False))
                for guide in guides
            )
        )
        for answer, pattern in zip(answers, guides.values(), strict=True):
            if answer.finish_reason == "stop":
                assert re.fullmatch(pattern, answer.text, re.DOTALL), answer.text
        assert sum(answer.finish_reason == "stop" for answer in answers) >= 3
        with pytest.raises(BadRequest, match="guided_decoding_guide_type"):
            await client.complete(GenerateRequest(text="x", guide=Guide("xml", "x"), stream=False))  # type: ignore[arg-type]
        async with aclosing(client.generate(GenerateRequest(text="x", guide=Guide("regex", "[0-9]{3}")))) as parts:
            assert re.fullmatch("[0-9]{3}", "".join([part.text async for part in parts]))
    async with httpx.AsyncClient(timeout=HANG_S) as http:
        text = (await http.get(f"{stack.metrics}")).text
    counted = dict(
        re.findall(r"^(charonia_guide_\w+|charonia_token_mask_seconds_count)(?:\{[^}]*\})? (\S+)$", text, re.M)
    )
    assert float(counted["charonia_guide_compile_seconds_count"]) >= 5
    assert float(counted["charonia_token_mask_seconds_count"]) >= 10
