"""Converts typed requests to Triton's raw tensors (little-endian; BYTES: length as u32, then bytes), and raw tensors
and chunks of subscriptions to typed responses."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tritonclient.grpc import service_pb2 as pb  # type: ignore[import-untyped]

from charonia_client.contract import SCALARS
from charonia_client.delivery import Chunk
from charonia_client.types import (
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    Guide,
    Timings,
    Tokenized,
    TokenizeRequest,
    TopToken,
    as_json,
)

Action = Literal["stop", "cancel", "end_session"]

_FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
_REASONS: dict[int, FinishReason] = {
    value.number: value.name.lower()
    for value in Chunk.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values
    if value.number
}


def _numbers(message: Any, name: str, datatype: str, values: Sequence[float]) -> None:
    try:
        raw = struct.pack(f"<{len(values)}{_FORMATS[datatype]}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{name}: {list(values)} does not fit Triton's type {datatype}") from error
    message.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    message.raw_input_contents.append(raw)


def _texts(message: Any, name: str, values: Sequence[bytes]) -> None:
    message.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
    message.raw_input_contents.append(b"".join(struct.pack("<I", len(value)) + value for value in values))


def _prompt(message: Any, request: GenerateRequest | TokenizeRequest) -> None:
    if request.text is not None:
        _texts(message, "text_input", [request.text.encode()])
    elif request.prompt_token_ids is not None:
        _numbers(message, "prompt_token_ids", "INT32", request.prompt_token_ids)
    else:
        _texts(message, "messages", [as_json(request.messages).encode()])
    if request.tools:
        _texts(message, "tools", [as_json(request.tools).encode()])
    if request.tool_choice is not None:
        _texts(message, "tool_choice", [as_json(request.tool_choice).encode()])
    if request.chat_template_kwargs:
        _texts(message, "chat_template_kwargs", [as_json(request.chat_template_kwargs).encode()])
    if request.continue_final_message:
        _numbers(message, "continue_final_message", "BOOL", [True])


def encode(
    request: GenerateRequest, request_id: str, model: str, resumed: Sequence[Sequence[int] | None] | None = None
) -> Any:
    """The ModelInferRequest for `request`. resumed: the tokens that each response has received from another server,
    None for a response that has ended. Raises ValueError for a number outside of its tensor's type, and TypeError for
    an invalid guide."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    _prompt(message, request)
    if request.prompt_time is not None:
        _texts(message, "prompt_time", [request.prompt_time.encode()])
    if request.parallel_tool_calls is not None:
        _numbers(message, "parallel_tool_calls", "BOOL", [request.parallel_tool_calls])
    if request.any_arguments:
        _numbers(message, "any_arguments", "BOOL", [True])
    for field, (name, datatype) in SCALARS.items():
        value = getattr(request, field)
        if value is not None:
            _numbers(message, name, datatype, [value])
    if request.guide is not None:
        if not isinstance(request.guide, Guide):
            raise TypeError(
                f"guide = {request.guide!r} is not valid: use Guide.regex, Guide.json_schema or another method of Guide"
            )
        _texts(message, "guided_decoding_guide_type", [request.guide.type.encode()])
        if request.guide.text:
            _texts(message, "guided_decoding_guide", [request.guide.text.encode()])
    if request.pooling is not None:
        _texts(message, "pooling", [request.pooling.encode()])
    if request.end_id:
        _numbers(message, "end_id", "INT32", request.end_id)
    if request.stop_words:
        _texts(message, "stop_words", [word.encode() for word in request.stop_words])
    if request.bad_words:
        _texts(message, "bad_words", [word.encode() for word in request.bad_words])
    if request.logit_bias:
        _texts(message, "logit_bias", [as_json(dict(request.logit_bias)).encode()])
    _numbers(message, "stream", "BOOL", [request.stream])
    if request.echo:
        _numbers(message, "exclude_input_in_output", "BOOL", [False])
    if request.session_id is not None:
        _texts(message, "session_id", [request.session_id.encode()])
    if request.cache_salt is not None:
        _texts(message, "cache_salt", [request.cache_salt.encode()])
    if request.owner is not None:
        _texts(message, "owner", [request.owner.encode()])
    if request.lora_name is not None:
        _texts(message, "lora_name", [request.lora_name.encode()])
    for flag in ("interactive", "end_session"):
        if getattr(request, flag):
            _numbers(message, flag, "BOOL", [True])
    if request.logprobs is not None:
        _numbers(message, "return_log_probs", "BOOL", [True])
        _numbers(message, "top_logprobs", "INT32", [request.logprobs])
    if resumed is not None:
        _numbers(message, "resumed_ids", "INT32", [token for tokens in resumed for token in tokens or ()])
        lengths = [-1 if tokens is None else len(tokens) for tokens in resumed]
        _numbers(message, "resumed_lengths", "INT32", lengths)
    # A subscription receives the results. The requested outputs decide which models the ensemble runs.
    message.outputs.add(name="finish_reason")
    return message


def set_subscription(message: Any, subscription: str, key: int) -> None:
    """Sets or replaces the subscription that receives the results of a request of encode()."""
    names = [tensor.name for tensor in message.inputs]
    if "subscription" in names:
        kept = names.index("subscription")  # the inputs after it were added here
        del message.inputs[kept:], message.raw_input_contents[kept:]
    _texts(message, "subscription", [subscription.encode()])
    _numbers(message, "subscription_key", "UINT64", [key])


def encode_subscription(subscription: str, model: str, *, read: int | None = None, end: bool = False) -> Any:
    """The request to `engine` that opens a subscription, acknowledges its deliveries up to `read`, or ends it."""
    message = pb.ModelInferRequest(model_name=model)
    _texts(message, "subscription", [subscription.encode()])
    if read is not None:
        _numbers(message, "subscription_read", "UINT64", [read])
    elif end:
        _numbers(message, "subscription_end", "BOOL", [True])
    else:
        message.outputs.add(name="deliveries")
    return message


def encode_action(action: Action, model: str, *, request_id: str = "", session_id: str = "") -> Any:
    """The request to `engine` that ends all requests of an id or a session, or deletes a session (docs/contracts.md,
    "Stopping a request")."""
    message = pb.ModelInferRequest(model_name=model, id=request_id)
    _numbers(message, action, "BOOL", [True])
    if session_id:
        _texts(message, "session_id", [session_id.encode()])
    return message


def encode_adapters(model: str, *, name: str = "", path: str = "", unload: bool = False) -> Any:
    """The request to `engine` that loads the LoRA adapter `name` from `path`, unloads it, or only lists adapters."""
    message = pb.ModelInferRequest(model_name=model)
    if name:
        _texts(message, "lora_name", [name.encode()])
    if path:
        _texts(message, "lora_path", [path.encode()])
    else:
        _numbers(message, "lora_unload" if unload else "lora_list", "BOOL", [True])
    message.outputs.add(name="lora_adapters")
    return message


def decode_adapters(message: Any) -> list[dict[str, Any]]:
    """The loaded adapters of a response to encode_adapters."""
    (text,) = _unpack_texts(message.raw_output_contents[0])
    return list(json.loads(text))


def _unpack_texts(raw: bytes) -> list[bytes]:
    texts, at = [], 0
    while at < len(raw):
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        texts.append(raw[begin:at])
    return texts


def _ints(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def _int(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little", signed=True)


def _text(raw: bytes) -> str:
    return raw[4:].decode(errors="replace")


def num_logprobs(chunk: Any) -> int:
    return sum(map(len, (chunk.output_log_probs, chunk.top_log_prob_ids, chunk.prompt_top_log_prob_ids)))


def decode(chunk: Any) -> GenerateResponse:
    """The typed response of a chunk of a subscription, without log probabilities."""
    return GenerateResponse(
        b"".join(chunk.text_output).decode(errors="replace"),
        tuple(chunk.output_ids),
        _REASONS.get(chunk.finish_reason),
        chunk.num_input_tokens,
        chunk.num_output_tokens,
        chunk.num_cached_tokens,
        Timings(chunk.queue_ms, chunk.first_token_ms, chunk.total_ms),
        token_bytes=tuple(chunk.token_bytes),
        text_span=(chunk.text_begin, chunk.text_end),
        index=chunk.sequence_index,
        cum_logprob=chunk.cum_log_probs,
        num_session_tokens=chunk.num_session_tokens,
        num_computed_tokens=chunk.num_computed_tokens,
        num_proposed_tokens=chunk.num_proposed_tokens,
        num_accepted_tokens=chunk.num_accepted_tokens,
        pooled=array("f", chunk.pooled) if chunk.pooled else (),
    )


def decode_with_logprobs(chunk: Any) -> GenerateResponse:
    response = decode(chunk)
    if chunk.output_log_probs:
        response.logprobs = tuple(chunk.output_log_probs)
        tops = zip(chunk.top_log_prob_ids, chunk.top_log_probs, chunk.top_token_bytes, strict=True)
        response.top_logprobs = _rows(len(response.logprobs), tops)
    if chunk.prompt_ids:
        response.prompt_ids = tuple(chunk.prompt_ids)
        response.prompt_tokens = list(chunk.prompt_token_bytes)
        response.prompt_special = list(chunk.prompt_token_special)
        response.prompt_logprobs = tuple(chunk.prompt_log_probs)
        tops = zip(chunk.prompt_top_log_prob_ids, chunk.prompt_top_log_probs, chunk.prompt_top_token_bytes, strict=True)
        response.prompt_top_logprobs = _rows(len(response.prompt_logprobs), tops)
    return response


def _rows(count: int, tops: Iterable[tuple[int, float, bytes]]) -> list[list[TopToken]]:
    """Split a flat list into `count` rows of equal length."""
    flat = [TopToken(*entry) for entry in tops]
    width = len(flat) // count if count else 0
    return [flat[width * at : width * (at + 1)] for at in range(count)]


def encode_quality(model: str) -> Any:
    """The request to postprocessing for the quality records of the model."""
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="text_tokens", datatype="INT32", shape=[1, 2])  # no text is requested
    message.raw_input_contents.append(bytes(8))
    message.inputs.add(name="echo", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(bytes(4))
    message.outputs.add(name="model_quality")
    return message


def encode_question(output: str, model: str) -> Any:
    """The request to preprocessing for an output about the model, which needs no prompt."""
    message = pb.ModelInferRequest(model_name=model)
    message.outputs.add(name=output)
    return message


def decode_described(message: Any) -> dict[str, Any]:
    """Decode the response to encode_question, a JSON object."""
    (text,) = _unpack_texts(message.raw_output_contents[0])
    return dict(json.loads(text))


def with_arithmetic(info: dict[str, Any], arithmetic: bytes, deterministic: bool) -> dict[str, Any]:
    """Client.model_info(): `info` of preprocessing, with the facts about the engine."""
    text = f"{info.get('fingerprint')} {deterministic} ".encode() + arithmetic
    return {**info, "fingerprint": hashlib.sha256(text).hexdigest()[:16], "deterministic": deterministic}


def encode_tokenize(request: TokenizeRequest, model: str) -> Any:
    """The request to preprocessing only. Raises ValueError for an id that is not an INT32."""
    message = pb.ModelInferRequest(model_name=model)
    _prompt(message, request)
    if request.add_special_tokens is not None:
        _numbers(message, "add_special_tokens", "BOOL", [request.add_special_tokens])
    wanted = ["input_ids", "context_length"]
    if request.with_strings:
        wanted.append("token_strings")
    if request.prompt_token_ids is not None:
        _numbers(message, "exclude_input_in_output", "BOOL", [False])
        wanted.append("echo")
    for name in wanted:
        message.outputs.add(name=name)
    return message


def decode_tokenize(message: Any) -> Tokenized:
    """Decode the response to encode_tokenize."""
    values = {tensor.name: raw for tensor, raw in zip(message.outputs, message.raw_output_contents, strict=True)}
    strings = _unpack_texts(values["token_strings"]) if "token_strings" in values else None
    return Tokenized(
        list(_ints(values["input_ids"])),
        _text(values["echo"]) if "echo" in values else "",
        _int(values["context_length"]) or None,
        None if strings is None else [one.decode(errors="replace") for one in strings],
    )


def decode_quality(message: Any) -> list[dict[str, Any]]:
    """The quality records of a response to encode_quality. Records that are not objects are left out."""
    (text,) = _unpack_texts(message.raw_output_contents[0])
    records = json.loads(text)
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []
