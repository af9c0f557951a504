"""Between typed requests and Triton's raw tensors; errors from texts; token bytes; messages from lines."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from charonia_client import (
    BadRequest,
    CharoniaError,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    Guide,
    Overloaded,
    ServerError,
    Unavailable,
)
from charonia_client.errors import from_triton
from charonia_client.tensors import decode, encode, encode_action
from charonia_client.terminal import messages_of, plain
from charonia_client.types import TopToken
from charonia_client.vocabulary import Vocabulary
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor


def inputs(message: pb.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def test_a_guide_that_is_none_names_what_makes_one() -> None:
    sent = inputs(encode(GenerateRequest(text="hi", guide=Guide.choice(["yes", "no"])), "id", "ensemble"))
    assert sent["guided_decoding_guide"][2] == serialize_byte_tensor(np.array([b'["yes", "no"]'], object)).item()
    request = GenerateRequest(text="hi", guide="[0-9]+")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"guide = '\[0-9\]\+' is not valid: it is made by Guide.regex"):
        encode(request, "id", "ensemble")


def test_what_is_not_set_is_not_sent() -> None:
    sent = inputs(encode(GenerateRequest(text="hi"), "id", "ensemble"))
    assert set(sent) == {"text_input", "stream"}
    assert sent["text_input"] == ("BYTES", [1], b"\x02\x00\x00\x00hi")


def test_every_field_has_its_type_and_shape() -> None:
    request = GenerateRequest(
        messages=[{"role": "user", "content": "你好"}],
        max_tokens=5,
        temperature=0.5,
        seed=2**64 - 1,
        stop_words=["a", "bc"],
        end_id=[1, 2, 3],
        ignore_eos=True,
        logit_bias={7: -1.5},
        logprobs=2,
        stream=False,
        echo=True,
        n=3,
        best_of=4,
        prompt_logprobs=0,
        timeout_ms=1500,
        session_id="é",
        interactive=True,
        end_session=True,
    )
    sent = inputs(encode(request, "id", "ensemble"))
    assert sent["messages"][2][4:].decode() == '[{"role": "user", "content": "你好"}]'
    assert sent["max_tokens"] == ("INT32", [1], struct.pack("<i", 5))
    assert sent["temperature"] == ("FP32", [1], struct.pack("<f", 0.5))
    assert sent["seed"] == ("UINT64", [1], b"\xff" * 8)
    assert sent["end_id"] == ("INT32", [3], struct.pack("<3i", 1, 2, 3))
    assert sent["ignore_eos"] == ("BOOL", [1], b"\x01")
    assert sent["stream"] == ("BOOL", [1], b"\x00")
    assert sent["exclude_input_in_output"] == ("BOOL", [1], b"\x00")
    assert sent["top_logprobs"] == ("INT32", [1], struct.pack("<i", 2))
    assert sent["num_return_sequences"] == ("INT32", [1], struct.pack("<i", 3))
    assert sent["best_of"] == ("INT32", [1], struct.pack("<i", 4))
    assert sent["prompt_logprobs"] == ("INT32", [1], struct.pack("<i", 0))
    assert sent["timeout_ms"] == ("INT32", [1], struct.pack("<i", 1500))
    assert sent["session_id"] == ("BYTES", [1], b"\x02\x00\x00\x00" + "é".encode())
    assert sent["interactive"] == sent["end_session"] == ("BOOL", [1], b"\x01")
    assert sent["logit_bias"][2][4:] == b'{"7": -1.5}'
    assert sent["stop_words"][:2] == ("BYTES", [2])
    assert list(deserialize_bytes_tensor(sent["stop_words"][2])) == [b"a", b"bc"]


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 2**31), ("seed", -1), ("seed", 2**64), ("repetition_penalty", 1e300)]
)
def test_a_number_that_its_tensor_cannot_hold_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        encode(GenerateRequest(text="x", **{field: value}), "id", "ensemble")


@pytest.mark.parametrize("both", [{}, {"text": "a", "messages": []}])
def test_exactly_one_of_text_and_messages(both: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        GenerateRequest(**both)  # type: ignore[arg-type]


@pytest.mark.parametrize("action", ["stop", "cancel"])
def test_an_action_names_the_request_or_the_session(action: Any) -> None:
    message = encode_action(action, "engine", request_id="the-id")
    assert (message.id, message.model_name) == ("the-id", "engine")
    assert inputs(message) == {action: ("BOOL", [1], b"\x01")}
    message = encode_action(action, "engine", session_id="s")
    assert inputs(message) == {action: ("BOOL", [1], b"\x01"), "session_id": ("BYTES", [1], b"\x01\x00\x00\x00s")}


def test_only_the_outputs_of_what_is_asked_for_are_asked_for() -> None:
    def wanted(**fields: Any) -> set[str]:
        return {output.name for output in encode(GenerateRequest(text="x", **fields), "id", "ensemble").outputs}

    plain = wanted()
    assert wanted(n=2) - plain == {"sequence_index"}
    assert wanted(session_id="s") - plain == {"num_session_tokens"}
    assert "prompt_ids" in wanted(prompt_logprobs=0) - plain
    assert "cum_log_probs" in wanted(best_of=2) & wanted(logprobs=0)


@pytest.mark.parametrize("flag", ["interactive", "end_session"])
def test_what_is_about_a_session_needs_one(flag: str) -> None:
    with pytest.raises(ValueError, match="session_id"):
        GenerateRequest(text="x", **{flag: True})


def test_the_log_probabilities_of_a_prompt_come_in_rows() -> None:
    message = response_message("a", "", [1], 0)
    for name, raw in {
        "prompt_ids": struct.pack("<3i", 7, 8, 9),
        "prompt_log_probs": struct.pack("<2f", -1, -2),
        "prompt_top_log_prob_ids": struct.pack("<4i", 1, 2, 3, 4),
        "prompt_top_log_probs": struct.pack("<4f", -1, -2, -3, -4),
        "sequence_index": struct.pack("<i", 5),
        "num_session_tokens": struct.pack("<i", 6),
        "cum_log_probs": struct.pack("<f", -7.5),
    }.items():
        message.outputs.add(name=name)
        message.raw_output_contents.append(raw)
    response = decode(message)
    assert (response.index, response.num_session_tokens, response.cum_logprob) == (5, 6, -7.5)
    assert response.prompt_ids == (7, 8, 9) and response.prompt_logprobs == (-1, -2)
    assert [[(top.id, top.logprob) for top in row] for row in response.prompt_top_logprobs] == [
        [(1, -1.0), (2, -2.0)],
        [(3, -3.0), (4, -4.0)],
    ]


def response_message(text: str, finish: str, ids: Sequence[int], tops: int) -> pb.ModelInferResponse:
    import numpy as np

    message = pb.ModelInferResponse()
    for name, values in {
        "text_output": np.array([text.encode()], np.object_),
        "finish_reason": np.array([finish.encode()], np.object_),
        "output_ids": np.array(ids, np.int32),
        "num_input_tokens": np.array([3], np.int32),
        "num_output_tokens": np.array([9], np.int32),
        "num_cached_tokens": np.array([1], np.int32),
        "timings": np.array([1, 2, 4], np.float32),
        "output_log_probs": np.array([-0.5] * len(ids), np.float32),
        "top_log_prob_ids": np.arange(len(ids) * tops, dtype=np.int32),
        "top_log_probs": -np.arange(len(ids) * tops, dtype=np.float32),
        "text_span": np.array([0, len(text.encode())], np.int32),
    }.items():
        message.outputs.add(name=name, datatype="", shape=list(values.shape))
        raw = serialize_byte_tensor(values).item() if values.dtype == np.object_ else values.tobytes()
        message.raw_output_contents.append(raw)
    return message


@given(st.text(), st.lists(st.integers(0, 2**31 - 1), max_size=5), st.integers(0, 3))
def test_responses_come_back_as_they_were(text: str, ids: list[int], tops: int) -> None:
    response = decode(response_message(text, "stop", ids, tops))
    assert (response.text, response.finish_reason, list(response.token_ids)) == (text, "stop", ids)
    assert (response.num_input_tokens, response.num_output_tokens, response.num_cached_tokens) == (3, 9, 1)
    assert response.timings is not None and response.timings.total_ms == 4
    assert len(response.logprobs) == len(ids)
    assert [[top.id for top in row] for row in response.top_logprobs] == [
        list(range(at * tops, (at + 1) * tops)) for at in range(len(ids))
    ]


def test_no_finish_reason_before_the_last() -> None:
    assert decode(response_message("a", "", [1], 0)).finish_reason is None


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        ("[400] top_p: 7 is out of range", BadRequest, "top_p: 7 is out of range"),
        ("in ensemble 'ensemble', [400] top_p: 7", BadRequest, "top_p: 7"),
        ("[request id: a-b] in ensemble 'e', [503] shutting down", Unavailable, "shutting down"),
        ("[429] 512 wait; retry after 3 s", Overloaded, "512 wait; retry after 3 s"),
        ("[429] busy", Overloaded, "busy"),
        ("in ensemble 'ensemble', [504] timeout_ms is over", DeadlineExceeded, "timeout_ms"),
        ("Request for unknown model: 'ensemble' is not found", Unavailable, "ensemble"),
        ("Request for unknown model: 'ensemble' has no available versions", Unavailable, "the server is shutting down"),
        ("Exceeds maximum queue size", Overloaded, "queue"),
        ("a text that quotes [400] in its middle", ServerError, "quotes [400]"),
        ("", ServerError, ""),
    ],
)
def test_kind_of_error_by_its_text(text: str, kind: type[CharoniaError], shown: str) -> None:
    error = from_triton(text)
    assert type(error) is kind
    assert shown in str(error)


def test_overload_says_when_to_come_again() -> None:
    error = from_triton("[429] 512 requests wait; retry after 2.5 s")
    assert isinstance(error, Overloaded) and error.retry_after == 2.5


PIECES = [b" hello", b" wor", b"ld", "é".encode()[:1], "é".encode()[1:], b"<|end|>"]


async def named(ids: Sequence[int], span: tuple[int, int], tops: Sequence[int] = ()) -> GenerateResponse:
    asked: list[int] = []

    async def lookup(wanted: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        asked.extend(wanted)
        return [PIECES[token] for token in wanted], [token == 5 for token in wanted]

    response = GenerateResponse("", tuple(ids), logprobs=(0.0,) * len(ids), text_span=span)
    response.top_logprobs = [[TopToken(top, 0.0) for top in tops] for _ in ids]
    vocabulary = Vocabulary(lookup)
    await vocabulary.name_tokens(response)
    again = GenerateResponse("", tuple(ids), logprobs=(0.0,) * len(ids), text_span=span)
    await vocabulary.name_tokens(again)
    assert len(asked) == len(set(asked)), "a token is asked for once"
    assert again.tokens == response.tokens
    return response


async def test_tokens_are_what_they_add_to_the_text() -> None:
    assert (await named([0, 1, 2], (0, 12))).tokens == [b" hello", b" wor", b"ld"]


async def test_a_leading_space_that_is_no_text_is_not_in_the_tokens() -> None:
    assert (await named([0, 1], (1, 10))).tokens == [b"hello", b" wor"]


async def test_a_stop_word_inside_a_token_cuts_it() -> None:
    assert (await named([0, 1, 2], (0, 8))).tokens == [b" hello", b" w", b""]


@pytest.mark.parametrize(
    ("ids", "end", "found"),
    [
        ([0, 1, 2], 8, "orl"),  # begins in a token and ends in the next one
        ([0, 1, 2], 12, None),  # the text came to its own end
        ([0, 1, 5], 10, None),  # a special token is no text
        ([0, 3, 4], 6, "é"),
    ],
)
async def test_the_stop_word_is_what_stands_behind_the_text(ids: list[int], end: int, found: str | None) -> None:
    async def lookup(wanted: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        return [PIECES[token] for token in wanted], [token == 5 for token in wanted]

    response = GenerateResponse("", tuple(ids), "stop", text_span=(0, end))
    assert await Vocabulary(lookup).stop_word(response, ["never", "orl", "é"]) == found


async def test_special_tokens_add_nothing_but_have_a_name_among_the_most_likely() -> None:
    response = await named([0, 5, 3, 4], (0, 8), tops=[5])
    assert response.tokens == [b" hello", b"", b"\xc3", b"\xa9"]
    assert response.top_logprobs[0][0].token == b"<|end|>"


async def test_a_server_that_goes_away_while_tokens_are_named_takes_no_names_along() -> None:
    """Another request of the same client may find it away at any time."""

    async def lookup(wanted: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        if 1 in wanted:
            vocabulary.forget()
        asked.append(list(wanted))
        return [PIECES[token] for token in wanted], [False for _ in wanted]

    asked: list[list[int]] = []
    vocabulary = Vocabulary(lookup)
    for ids in ((0,), (0, 1), (0,)):
        response = GenerateResponse("", ids, logprobs=(0.0,) * len(ids), text_span=(0, 100))
        await vocabulary.name_tokens(response)
        assert response.tokens == [PIECES[token] for token in ids]
    assert asked == [[0], [1], [0]], "what was forgotten is asked for again"


async def test_where_nobody_knows_names_those_heard_before_and_the_text_tell_what_they_can() -> None:
    async def lookup(wanted: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        if gone:
            raise Unavailable("the server is shutting down")
        return [PIECES[token] for token in wanted], [False for _ in wanted]

    async def tokens(text: str, *ids: int, begin: int = 0) -> list[bytes | None]:
        span = (begin, begin + len(text.encode()))
        response = GenerateResponse(text, ids, logprobs=(0.0,) * len(ids), text_span=span)
        await vocabulary.name_tokens(response)
        return response.tokens

    gone = False
    vocabulary = Vocabulary(lookup)
    await tokens(" hello", 0)
    gone = True
    vocabulary.forget()
    vocabulary.forget()
    assert await tokens(" hello wor", 0, 1) == [b" hello", b" wor"]
    assert await tokens("hello w", 0, 1, begin=1) == [b"hello", b" w"]
    assert await tokens(" hello", 0, 5) == [b" hello", b""]
    assert await tokens(" hello\ufffd", 0, 3) == [b" hello", None]
    assert await tokens(" wor hello", 1, 0) == [None, b" hello"]
    assert await tokens(" world", 1, 2) == [None, None]


@pytest.mark.parametrize(
    ("lines", "enter_sends", "messages"),
    [
        ("a\nb\n\nc\n\n", False, ["a\nb", "c"]),
        ("a\n\n\n\nb", False, ["a", "b"]),
        ("exit\n", False, ["exit"]),
        ("a\nexit\n", False, ["a\nexit"]),
        ("a\n\nexit\nb\n", False, ["a", "exit", "b"]),
        ("a\r\nb\n\nexit\n", True, ["a", "b", "exit"]),
        ("", False, []),
    ],
)
def test_lines_become_messages(lines: str, enter_sends: bool, messages: list[str]) -> None:
    assert list(messages_of(lines.splitlines(keepends=True), enter_sends)) == messages


def test_of_a_models_text_no_control_reaches_the_terminal() -> None:
    assert plain("a\tb\n\x1b]52;c;eA==\x07\x9b2Jc\r\x7fé\u00a0") == "a\tb\n]52;c;eA==2Jcé\u00a0"
