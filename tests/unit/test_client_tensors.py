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
from charonia_client.tensors import encode, encode_action, set_subscription
from charonia_client.terminal import messages_of, plain
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor


def inputs(message: pb.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }


def test_wrong_guide_error_names_the_constructors() -> None:
    sent = inputs(encode(GenerateRequest(text="hi", guide=Guide.choice(["yes", "no"])), "id", "ensemble"))
    assert sent["guided_decoding_guide"][2] == serialize_byte_tensor(np.array([b'["yes", "no"]'], object)).item()
    request = GenerateRequest(text="hi", guide="[0-9]+")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"guide = '\[0-9\]\+' is not valid: use Guide.regex"):
        encode(request, "id", "ensemble")


def test_unset_fields_are_not_sent() -> None:
    sent = inputs(encode(GenerateRequest(text="hi"), "id", "ensemble"))
    assert set(sent) == {"text_input", "stream"}
    assert sent["text_input"] == ("BYTES", [1], b"\x02\x00\x00\x00hi")


@pytest.mark.parametrize(
    ("field", "value", "name", "tensor"),
    [
        ("max_tokens", 5, "max_tokens", ("INT32", [1], struct.pack("<i", 5))),
        ("temperature", 0.5, "temperature", ("FP32", [1], struct.pack("<f", 0.5))),
        ("seed", 2**64 - 1, "seed", ("UINT64", [1], b"\xff" * 8)),
        ("end_id", [1, 2, 3], "end_id", ("INT32", [3], struct.pack("<3i", 1, 2, 3))),
        ("stream", False, "stream", ("BOOL", [1], b"\x00")),
        ("echo", True, "exclude_input_in_output", ("BOOL", [1], b"\x00")),
        ("logprobs", 2, "top_logprobs", ("INT32", [1], struct.pack("<i", 2))),
        ("logprobs", 2, "return_log_probs", ("BOOL", [1], b"\x01")),
        ("n", 3, "num_return_sequences", ("INT32", [1], struct.pack("<i", 3))),
        ("session_id", "é", "session_id", ("BYTES", [1], b"\x02\x00\x00\x00" + "é".encode())),
        ("logit_bias", {7: -1.5}, "logit_bias", ("BYTES", [1], b'\x0b\x00\x00\x00{"7": -1.5}')),
        ("stop_words", ["a", "bc"], "stop_words", ("BYTES", [2], b"\x01\x00\x00\x00a\x02\x00\x00\x00bc")),
    ],
)
def test_a_field_is_sent_as_a_tensor(field: str, value: Any, name: str, tensor: tuple[str, list[int], bytes]) -> None:
    messages = [{"role": "user", "content": "你好"}]
    sent = inputs(encode(GenerateRequest(messages=messages, **{field: value}), "id", "ensemble"))
    assert sent["messages"][2][4:].decode() == '[{"role": "user", "content": "你好"}]'
    assert sent[name] == tensor


def test_flags_of_a_session_are_sent() -> None:
    sent = inputs(
        encode(GenerateRequest(text="x", session_id="s", interactive=True, end_session=True), "id", "ensemble")
    )
    assert sent["interactive"] == sent["end_session"] == ("BOOL", [1], b"\x01")


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


def test_subscription_of_a_request_is_replaced() -> None:
    message = encode(GenerateRequest(text="x"), "id", "ensemble")
    for name, key in (("first", 1), ("second", 7)):
        set_subscription(message, name, key)
    sent = inputs(message)
    assert set(sent) == {"text_input", "stream", "subscription", "subscription_key"}
    assert (sent["subscription"][2][4:], sent["subscription_key"][2]) == (b"second", struct.pack("<Q", 7))
    assert [output.name for output in message.outputs] == ["finish_reason"]


@pytest.mark.parametrize("flag", ["interactive", "end_session"])
def test_session_flags_require_a_session_id(flag: str) -> None:
    with pytest.raises(ValueError, match="session_id"):
        GenerateRequest(text="x", **{flag: True})


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


def test_overload_error_has_the_time_to_retry() -> None:
    error = from_triton("[429] 512 requests wait; retry after 2.5 s")
    assert isinstance(error, Overloaded) and error.retry_after == 2.5


PIECES = [b" hello", b" wor", b"ld", "é".encode()[:1], "é".encode()[1:], b""]


def response_of(ids: Sequence[int], span: tuple[int, int]) -> GenerateResponse:
    return GenerateResponse("", tuple(ids), "stop", token_bytes=tuple(PIECES[token] for token in ids), text_span=span)


@pytest.mark.parametrize(
    ("ids", "span", "tokens"),
    [
        ([0, 1, 2], (0, 12), [b" hello", b" wor", b"ld"]),
        ([0, 1], (1, 10), [b"hello", b" wor"]),  # a leading space that is not text
        ([0, 1, 2], (0, 8), [b" hello", b" w", b""]),  # a stop word
        ([0, 5, 3, 4], (0, 8), [b" hello", b"", b"\xc3", b"\xa9"]),
    ],
)
def test_tokens_are_the_bytes_that_they_add_to_the_text(
    ids: list[int], span: tuple[int, int], tokens: list[bytes]
) -> None:
    assert response_of(ids, span).tokens == tokens


@pytest.mark.parametrize(
    ("ids", "end", "found"),
    [
        ([0, 1, 2], 8, "orl"),  # begins in a token and ends in the next one
        ([0, 1, 2], 12, None),  # the text ended by itself
        ([0, 1, 5], 10, None),  # a special token is not text
        ([0, 3, 4], 6, "é"),
    ],
)
def test_stop_word_follows_the_text(ids: list[int], end: int, found: str | None) -> None:
    assert response_of(ids, (0, end)).find_stop_word(["never", "orl", "é"]) == found


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


def test_control_characters_of_a_model_are_removed() -> None:
    assert plain("a\tb\n\x1b]52;c;eA==\x07\x9b2Jc\r\x7fé\u00a0") == "a\tb\n]52;c;eA==2Jcé\u00a0"
