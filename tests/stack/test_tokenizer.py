"""Tokenizing and detokenizing over REST, and completions of token ids, compared with transformers' tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from stack import DEMO_MODEL, HANG_S, Stack
from tiny_models import EOS, TEXTS, TokenizerKind, start_token

TEXT = "The capital of France is Paris. 法国"


@pytest.fixture
def web(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.gateway, timeout=HANG_S) as web:
        yield web


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def test_text_survives_tokenize_and_detokenize(web: httpx.Client, tokenizer: Any) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    answer = web.post("/tokenize", json={"prompt": TEXT, "return_token_strs": True})
    assert answer.status_code == 200 and answer.headers["x-request-id"]
    found = answer.json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert found["max_model_len"] > 1000
    assert web.post("/detokenize", json={"tokens": ids}).json() == {"prompt": tokenizer.decode(ids)}
    assert web.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    plain = web.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    assert plain["tokens"] == tokenizer(TEXT, add_special_tokens=False)["input_ids"] and plain["token_strs"] is None


@pytest.mark.parametrize(
    "end", [{}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False}]
)
def test_tokenized_conversation_equals_chat_prompt(web: httpx.Client, tokenizer: Any, end: dict[str, bool]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    if end:
        messages.append({"role": "assistant", "content": "Hi, I am"})
    text = tokenizer.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **end})
    found = web.post("/tokenize", json={"messages": messages, **end}).json()
    assert found["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    name = web.get("/v1/models").json()["data"][0]["id"]
    chat = web.post("/v1/chat/completions", json={"model": name, "messages": messages, "max_tokens": 1, **end})
    assert chat.json()["usage"]["prompt_tokens"] == found["count"]


def test_tokenizer_info_describes_tokenizer(web: httpx.Client, tokenizer: Any) -> None:
    info = web.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize("text", TEXTS)
def test_texts_in_every_script_survive_tokenization(parrot: Stack, kind: TokenizerKind, text: str) -> None:
    with httpx.Client(base_url=parrot.gateway, timeout=HANG_S) as web:
        ids = web.post("/tokenize", json={"prompt": text}).json()["tokens"]
        back = web.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        named = web.post("/tokenize", json={"prompt": start_token(0) + EOS}).json()["tokens"]
        special = web.post("/detokenize", json={"tokens": named}).json()["prompt"]
    assert back == text
    assert special == start_token(0) + EOS


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/tokenize", {}, "prompt", "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": "b"}, "prompt", "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": ""}, "prompt", "at least 1 character"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools", "only for a chat"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs", "only for a chat"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "only for a chat"),
        ("/tokenize", {"messages": "a", "continue_final_message": True}, "continue_final_message", "response last"),
        ("/tokenize", {"messages": "a", "chat_template": "{{ x }}"}, "chat_template", "leave chat_template out"),
        ("/detokenize", {"tokens": "a"}, "tokens", "a list of token ids"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens", "entry 1 is not a token id"),
        ("/detokenize", {"tokens": [1, 10**8]}, "tokens[1]", "100000000 is not a token id; send ids from 0 to "),
    ],
)
def test_wrong_tokenizer_requests_are_named(
    web: httpx.Client, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    answer = web.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error


async def test_token_ids_are_continued_like_text(api: openai.AsyncOpenAI, model: str, web: httpx.Client) -> None:
    prompts = ["The capital of", "One, two"]
    ids = [web.post("/tokenize", json={"prompt": prompt}).json()["tokens"] for prompt in prompts]
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 12}
    texts = [choice.text for choice in (await api.completions.create(prompt=prompts, **fields)).choices]
    tokens = await api.completions.create(prompt=ids, **fields)
    assert [choice.text for choice in tokens.choices] == texts
    assert tokens.usage is not None and tokens.usage.prompt_tokens == sum(map(len, ids))
    assert (await api.completions.create(prompt=ids[0], **fields)).choices[0].text == texts[0]
    streamed = ["", ""]
    async for chunk in await api.completions.create(prompt=ids, stream=True, echo=True, **fields):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


async def test_unknown_token_ids_are_named(api: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match=r"holds 100000000, which is not a token id") as error:
        await api.completions.create(model=model, prompt=[1, 10**8])
    assert error.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as error:
        await api.completions.create(model=model, prompt=[5] * 100_000)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_of_token_ids_has_entry_per_token(parrot: Stack, kind: TokenizerKind, max_tokens: int) -> None:
    """Also for the tokenizer's own tokens and for the end token: the positions of the prompt's tokens do not change."""
    async with openai.AsyncOpenAI(base_url=f"{parrot.gateway}/v1", api_key="none", max_retries=0) as api:
        model = (await api.models.list()).data[0].id
        async with httpx.AsyncClient(base_url=parrot.gateway, timeout=HANG_S) as web:
            asked = {"prompt": start_token(0) + TEXTS[0][:20] + EOS}
            ids = (await web.post("/tokenize", json=asked)).json()["tokens"]
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True}
        (choice,) = (await api.completions.create(model=model, prompt=ids, **fields)).choices
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(ids) + max_tokens
    assert logprobs.token_logprobs[0] is None and None not in logprobs.token_logprobs[1:]
    assert logprobs.tokens[0] == start_token(0) and logprobs.tokens[len(ids) - 1] == EOS
    assert choice.text.startswith(start_token(0))
