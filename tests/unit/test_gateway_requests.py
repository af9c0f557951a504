"""What the gateway makes of requests before anything is sent, and of answers before they are JSON."""

from __future__ import annotations

import json
import math

import pytest
from charonia_client import BadRequest, GenerateResponse, Overloaded, ServerError, Unavailable
from charonia_client.types import TopToken
from charonia_gateway.body import ignored_fields, parse
from charonia_gateway.errors import ApiError, from_engine
from charonia_gateway.logprobs import CompletionLogprobs, chat_logprobs
from charonia_gateway.schemas.requests import ChatRequest, CompletionRequest, derived_seed
from hypothesis import given
from hypothesis import strategies as st

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": USER, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def test_defaults_are_openais() -> None:
    (request,) = chat().engine_requests()
    assert request.max_tokens is None and request.temperature is None and request.stream is False
    (request,) = completion().engine_requests()
    assert request.max_tokens == 16


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    seeds = [request.seed for request in chat(n=4, seed=5).engine_requests()]
    assert seeds[0] == 5 and len(set(seeds)) == 4
    assert [request.seed for request in chat(n=2).engine_requests()] == [None, None]


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127))
def test_derived_seeds_fit_their_tensor(seed: int, choice: int) -> None:
    assert 0 <= derived_seed(seed, choice) < 2**64


def test_prompts_times_n_in_the_order_of_their_indices() -> None:
    requests = completion(prompt=["a", "b"], n=2, seed=1).engine_requests()
    assert [request.text for request in requests] == ["a", "a", "b", "b"]
    assert requests[0].seed == requests[2].seed != requests[1].seed


def test_values_that_others_use_for_everything_are_translated() -> None:
    (request,) = chat(top_k=-1, top_p=0).engine_requests()
    assert request.top_k == 0
    assert request.top_p is not None and 0 < request.top_p < 1e-3


def test_max_completion_tokens_wins_over_its_older_name() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).engine_requests()[0].max_tokens == 3


def test_messages_may_be_a_string_and_content_may_be_parts() -> None:
    assert chat(messages="hi").engine_requests()[0].messages == USER
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    (request,) = chat(messages=[{"role": "developer", "content": parts}]).engine_requests()
    assert request.messages == [{"role": "system", "content": "a b"}]


def test_a_tool_call_in_the_history_reaches_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "42"}]
    (request,) = chat(messages=history, tools=[{"type": "function"}]).engine_requests()
    assert request.messages is not None
    assert request.messages[1]["tool_calls"] == [call] and request.messages[2]["tool_call_id"] == "1"
    assert request.tools == [{"type": "function"}]
    assert chat(tools=[{"type": "function"}], tool_choice="none").engine_requests()[0].tools is None


def test_unknown_fields_are_named_when_they_fit_a_header() -> None:
    assert ignored_fields(chat(frobnicate=1, **{"x\r\ny": 2})) == ["frobnicate"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperature": math.nan}, "temperature", "finite"),
        ({"temperature": math.inf}, "temperature", "finite"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": 10**400}, "max_tokens", "less than or equal to 2147483647"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"seed": 2**64}, "seed", "less than or equal to"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": 5}, "stop", "a string or a list"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"1": math.nan}}, "logit_bias", "from -100 to 100"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "content is missing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "'image_url'"),
        ({"messages": 5}, "messages", "valid array"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs = true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true only"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported yet"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "True"),
    ],
)
def test_a_wrong_chat_field_is_named_with_what_would_be_right(fields: dict[str, object], param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param), error.message
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [1, 2]}, "prompt", "token ids"),
        ({"prompt": [[1], [2]]}, "prompt", "token ids"),
        ({"prompt": []}, "prompt", "a string or a list"),
        ({"prompt": {"a": 1}}, "prompt", "a string or a list"),
        ({"best_of": 3}, "best_of", "send n = 3"),
        ({"echo": True, "logprobs": 1}, "echo", "ask for one"),
        ({"suffix": "x"}, "suffix", "leave suffix out"),
        ({"model": None}, "model", "string"),
    ],
)
def test_a_wrong_completion_field_is_named_with_what_would_be_right(
    fields: dict[str, object], param: str, says: str
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param), caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b'{"model": "\\ud800"}', b'{"model": "\xff"}', b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"7"],
)
def test_what_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, body)
    assert caught.value.status == 400


def test_a_missing_field_has_openais_code() -> None:
    with pytest.raises(ApiError) as caught:
        parse(ChatRequest, b'{"model": "m"}')
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (BadRequest("max_tokens = -1 is out of range: it must be >= 1"), 400, "invalid_value", "max_tokens"),
        (BadRequest("text_input: empty; send at least one character"), 400, "invalid_value", "prompt"),
        (BadRequest("messages[0].content: missing; send it"), 400, "invalid_value", "messages[0].content"),
        (
            BadRequest("the prompt does not fit: it has 9 tokens and the context (session_len) holds 8"),
            400,
            "context_length_exceeded",
            None,
        ),
        (
            BadRequest("prompt and max_tokens do not fit: 9 and 8 make 17, and the context (session_len) holds 16"),
            400,
            "context_length_exceeded",
            None,
        ),
        (Overloaded("full", 2.2), 429, "overloaded", None),
        (Unavailable("away"), 503, "service_unavailable", None),
        (ServerError("broken"), 500, "engine_error", None),
    ],
)
def test_status_of_the_engines_errors(error: Exception, status: int, code: str, param: str | None) -> None:
    answer = from_engine(error)  # type: ignore[arg-type]
    assert (answer.status, answer.code, answer.param) == (status, code, param)
    if status == 429:
        assert answer.headers["Retry-After"] == "3"


def answer_with_logprobs() -> GenerateResponse:
    """a, then é in two tokens, then the end token."""
    response = GenerateResponse(" aé", (1, 2, 3, 4), logprobs=(-0.5, -1.0, -math.inf, -2.0))
    response.tokens = [b" a", b"\xc3", b"\xa9", b""]
    response.top_logprobs = [[TopToken(1, -0.5, b" a"), TopToken(4, -3.0, b"<|end|>")]] * 4
    return response


def test_chat_logprobs_join_to_the_text() -> None:
    entries = chat_logprobs(answer_with_logprobs())
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == " aé"
    assert [entry["token"] for entry in entries] == [" a", "\\xc3", "\\xa9"]
    assert entries[2]["logprob"] == -9999.0
    assert [top["token"] for top in entries[0]["top_logprobs"]] == [" a", "<|end|>"]


def test_completion_logprobs_offsets_count_characters_over_the_stream() -> None:
    logprobs = CompletionLogprobs()
    first = logprobs.of(answer_with_logprobs())
    assert first["tokens"] == [" a", "bytes:\\xc3", "bytes:\\xa9"]
    assert first["text_offset"] == [0, 2, 2]
    assert first["top_logprobs"][0] == {" a": -0.5, "<|end|>": -3.0}
    assert logprobs.of(answer_with_logprobs())["text_offset"] == [3, 5, 5]
