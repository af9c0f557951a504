"""A gRPC server that speaks Triton's protocol as far as the client does, and behaves as a test tells it to.

What a real server does only by chance, or when it is overloaded or broken, it does when asked. As a program it is a
server that dies of any request to its model: `python triton_double.py` prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

Behaviour = Callable[[pb.ModelInferRequest], AsyncIterator[pb.ModelStreamInferResponse]]


def part(text: str, reason: str = "", index: int = 0) -> pb.ModelStreamInferResponse:
    """A response of the ensemble with one token."""
    answer = pb.ModelInferResponse()
    texts = {"text_output": text, "finish_reason": reason}
    numbers = {
        "output_ids": 1,
        "num_input_tokens": 5,
        "num_output_tokens": 1,
        "num_cached_tokens": 0,
        "sequence_index": index,
    }
    for name, value in texts.items():
        answer.outputs.add(name=name, datatype="BYTES", shape=[1])
        answer.raw_output_contents.append(struct.pack("<I", len(value)) + value.encode())
    for name, number in numbers.items():
        answer.outputs.add(name=name, datatype="INT32", shape=[1])
        answer.raw_output_contents.append(struct.pack("<i", number))
    answer.outputs.add(name="timings", datatype="FP32", shape=[3])
    answer.raw_output_contents.append(struct.pack("<3f", 0, 0, 0))
    return pb.ModelStreamInferResponse(infer_response=answer)


def parsed(content: str = "", reasoning: str = "", reason: str = "", calls: Any = ()) -> pb.ModelStreamInferResponse:
    """A response to a request that asked for what parsing tells."""
    answer = part("?", reason)
    for name, text in {
        "content_output": content,
        "reasoning_output": reasoning,
        "tool_calls": json.dumps(calls),
    }.items():
        answer.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        answer.infer_response.raw_output_contents.append(struct.pack("<I", len(text)) + text.encode())
    answer.infer_response.outputs.add(name="num_reasoning_tokens", datatype="INT32", shape=[1])
    answer.infer_response.raw_output_contents.append(struct.pack("<i", 1))
    return answer


def with_logprobs(answer: pb.ModelStreamInferResponse, tokens: int, tops: int) -> pb.ModelStreamInferResponse:
    """The same response with that many tokens, each with its log probability and those of the most likely."""
    message = answer.infer_response
    ids = range(tokens)
    at = [tensor.name for tensor in message.outputs].index("output_ids")
    message.raw_output_contents[at] = struct.pack(f"<{tokens}i", *ids)
    for name, raw in {
        "output_log_probs": struct.pack(f"<{tokens}f", *(-0.5 for _ in ids)),
        "top_log_prob_ids": struct.pack(f"<{tokens * tops}i", *range(tokens * tops)),
        "top_log_probs": struct.pack(f"<{tokens * tops}f", *(-0.5 for _ in range(tokens * tops))),
        "text_span": struct.pack("<2i", 0, 1 << 30),
    }.items():
        message.outputs.add(name=name)
        message.raw_output_contents.append(raw)
    return answer


def error(text: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=text)


def unknown_tensor(tensor: str, model: str) -> str:
    """Triton's error for a tensor that the model has not."""
    return f"[request id: <id_unknown>] unexpected inference {tensor} for model '{model}'"


def options_chunk(key: int, options: str) -> bytes:
    """What the answers of a request are read by."""
    head = struct.Struct("<QIIiiiiiiiiffff").pack(key, len(options.encode()), 0, 0, 5, *[0] * 6, 0, 0, 0, 0)
    return head + options.encode()


def packed_logprobs(raw: dict[str, bytes]) -> bytes:
    """Those of a response's tensors, as a subscription has them; of a response without, the tokens' own."""
    num_ids = len(raw["output_ids"]) // 4
    logprobs = raw.get("output_log_probs", struct.pack(f"<{num_ids}f", *[-0.5] * num_ids))
    ids, tops = raw.get("top_log_prob_ids", b""), raw.get("top_log_probs", b"")
    return logprobs + struct.pack("<I", len(ids) // len(logprobs) if logprobs else 0) + ids + tops


def chunk(key: int, answer: pb.ModelStreamInferResponse, parsed: bool = False, logprobs: bool = False) -> bytes:
    """What a subscription has of a response of part() or error(). parsed: with the bytes of its token, or of several,
    with one each but for the last. logprobs: with what with_logprobs() has added."""
    head = struct.Struct("<QIIiiiiiiiiffff")
    if answer.error_message:
        text = answer.error_message.encode()
        return head.pack(key, len(text), 0, 0, 4, *[0] * 6, 0, 0, 0, 0) + text
    message = answer.infer_response
    raw = {tensor.name: value for tensor, value in zip(message.outputs, message.raw_output_contents, strict=True)}
    text, ids, reason = raw["text_output"][4:], raw["output_ids"], raw["finish_reason"][4:].decode()
    numbers = [
        int.from_bytes(raw[name], "little")
        for name in ("sequence_index", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
    ]
    code = ("", "stop", "length", "cancelled").index(reason) + (16 if parsed else 0) + (32 if logprobs else 0)
    num_ids = len(ids) // 4
    span = struct.unpack("<2i", raw["text_span"]) if "text_span" in raw else (0, len(text))
    sizes = [1] * (num_ids - 1) + [len(text) - num_ids + 1] * (num_ids > 0)
    return (
        head.pack(key, len(text), num_ids, numbers[0], code, *span, *numbers[1:], 0, 0, 0, 0, 0)
        + ids
        + (struct.pack(f"<{num_ids}I", *sizes) if parsed else b"")
        + (packed_logprobs(raw) if logprobs else b"")
        + text
    )


def input_text(request: pb.ModelInferRequest, name: str) -> str:
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.name == name:
            return bytes(raw[4:]).decode()
    return ""


def input_number(request: pb.ModelInferRequest, name: str) -> int | None:
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.name == name:
            return int.from_bytes(raw, "little")
    return None


class Double(pb_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Use it as `async with`. It answers with its own target unless told otherwise."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        """credentials: of its port; None: it has no TLS. port: 0: any that is free."""
        self._credentials = credentials
        self._port = port
        self.target = ""
        self.ready = True
        self.unloaded: set[str] = set()  # ensembles that it does not serve, while it is well
        self.vocabulary_gone = False  # as where it drains
        self.lookups = 0
        self.tokenizer_error = ""  # what its tokenizer answers
        self.tokenized = pb.ModelInferRequest()  # what it was asked last
        self.quality: list[Any] = []  # the records of its model
        self.formats: dict[str, str | None] = {}  # of its model's answers
        self.info: dict[str, Any] = {}  # of its model
        self.asked: list[str] = []  # which of these
        self.describes = asyncio.Event()  # they are told
        self.describes.set()
        self.exiting = False  # refuses to be asked whether it lives
        self.refusals = 0  # of such questions
        self.streams_hang = False  # as where its thread for streams waits for ever; it answers other calls
        self.requests: list[pb.ModelInferRequest] = []  # to the ensemble
        self.actions: list[tuple[str, str]] = []  # (stop, cancel or end_session; request id or session id)
        self.action_error = ""  # what it answers to stop, cancel and end_session in place of doing them
        self.behaviour: Behaviour = self.say_name
        self.subscriptions: dict[str, asyncio.Queue[bytes | None]] = {}  # chunks to come, by name; None: it ends
        self.opened = 0  # subscriptions
        self.forgets_subscriptions = False  # no request may name one
        self.end_of_subscriptions = ""  # the error that they end with
        self.refusal = ""  # the error of a subscription in place of its opening
        self.ensemble_is_old = False  # it has no subscriptions, which the engine has
        self.no_logprobs = False  # its engine has none by subscription
        self.forgets_logprobs = False  # and does not say so
        self.call_error = ""  # of the call of a request whose answers would come by a subscription
        self.options = ""  # what answers that are parsed are read by
        self.takes = asyncio.Event()  # of requests by subscription: the engine gets them
        self.takes.set()
        self.tells = asyncio.Event()  # and their calls end
        self.tells.set()
        self.read: list[int] = []  # what readers of subscriptions said
        self.deliveries: asyncio.Event = asyncio.Event()  # are sent
        self.deliveries.set()
        self._answering: set[asyncio.Task[None]] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self.asleep = asyncio.Event()  # the opposite

    async def __aenter__(self) -> Double:
        self._server = grpc.aio.server()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        if self._credentials:
            port = self._server.add_secure_port(f"127.0.0.1:{self._port}", self._credentials)
        else:
            port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.target = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._answering:
            task.cancel()
        await self._server.stop(None)

    async def go(self) -> None:
        """Ends as a process does: its port is closed."""
        await self._server.stop(None)

    def fall_asleep(self) -> None:
        """From now on it takes connections and requests, and answers nothing."""
        self._awake.clear()
        self.asleep.set()

    def wake_up(self) -> None:
        self.asleep.clear()
        self._awake.set()

    async def say_name(self, request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
        yield part(self.target, "stop")

    async def ServerLive(self, request: Any, context: Any) -> pb.ServerLiveResponse:
        await self._awake.wait()
        if self.exiting:
            self.refusals += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server exiting")
        return pb.ServerLiveResponse(live=True)

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        await self._awake.wait()
        return pb.ModelReadyResponse(ready=self.ready and request.name not in self.unloaded)

    async def ModelInfer(self, request: Any, context: Any) -> pb.ModelInferResponse:
        """The bytes of tokens: each one's number."""
        described = {"model_quality": self.quality, "answer_formats": self.formats, "model_info": self.info}
        wanted = [output.name for output in request.outputs]
        if len(wanted) == 1 and wanted[0] in described:
            self.asked.append(wanted[0])
            if request.model_name in self.unloaded:
                text = f"Request for unknown model: '{request.model_name}' has no available versions"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
            await self.describes.wait()
            text = json.dumps(described[wanted[0]]).encode()
            answer = pb.ModelInferResponse()
            answer.outputs.add(name=wanted[0])
            answer.raw_output_contents.append(struct.pack("<I", len(text)) + text)
            return answer
        if request.model_name.partition(".")[0] == "preprocessing":
            return await self._tokenize(request, context)
        self.lookups += 1
        if self.vocabulary_gone:
            text = "Request for unknown model: 'postprocessing' has no available versions"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        (ids,) = [
            raw
            for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
            if tensor.name == "text_tokens"
        ]
        names = [str(token).encode() for (token,) in struct.iter_unpack("<i", ids)][4:]
        answer = pb.ModelInferResponse()
        for name, raw in {
            "token_bytes": b"".join(struct.pack("<I", len(text)) + text for text in names),
            "token_special": bytes(len(names)),
        }.items():
            answer.outputs.add(name=name)
            answer.raw_output_contents.append(raw)
        return answer

    async def _tokenize(self, request: Any, context: Any) -> pb.ModelInferResponse:
        """A token for each character; the context has 10."""
        self.tokenized = request
        if self.tokenizer_error:
            await context.abort(grpc.StatusCode.INTERNAL, self.tokenizer_error)
        text = input_text(request, "text_input") + input_text(request, "messages")
        answer = pb.ModelInferResponse()
        for name, numbers in {"input_ids": range(len(text)), "context_length": [10]}.items():
            answer.outputs.add(name=name)
            answer.raw_output_contents.append(struct.pack(f"<{len(numbers)}i", *numbers))
        return answer

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        if self.streams_hang:
            await asyncio.Event().wait()
        async for request in requests:
            subscription = input_text(request, "subscription")
            if request.model_name.partition(".")[0] == "engine":
                await self._awake.wait()
                if subscription:
                    async for answer in self._subscription(request, subscription):
                        yield answer
                    continue
                if self.action_error:
                    yield error(self.action_error)
                    continue
                self.actions.append((request.inputs[0].name, request.id or input_text(request, "session_id")))
                continue
            self.requests.append(request)
            if request.model_name in self.unloaded:
                yield error(f"Request for unknown model: '{request.model_name}' has no available versions")
                continue
            await self._awake.wait()
            if subscription and self.call_error:
                yield error(self.call_error)
                continue
            if subscription and self.ensemble_is_old:
                yield error(unknown_tensor("input 'subscription'", request.model_name))
                continue
            if subscription and self.no_logprobs and input_number(request, "return_log_probs"):
                yield error(
                    f"in ensemble 'ensemble', [400] subscription is '{subscription}', and log probabilities do not go "
                    "through one: send the request without subscription"
                )
                continue
            if subscription:
                await self.takes.wait()
            if subscription and (self.forgets_subscriptions or subscription not in self.subscriptions):
                yield error(f"[503] there is no subscription {subscription!r}")
                continue
            if subscription:
                task = asyncio.create_task(self._answer(request, self.subscriptions[subscription]))
                await self.tells.wait()
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
                continue
            async for answer in self.behaviour(request):
                await self._awake.wait()
                yield answer
        await self._awake.wait()

    async def _answer(self, request: pb.ModelInferRequest, chunks: asyncio.Queue[bytes | None]) -> None:
        key = input_number(request, "subscription_key") or 0
        parsed = bool(input_number(request, "subscription_parsing"))
        logprobs = bool(input_number(request, "return_log_probs")) and not self.forgets_logprobs
        if parsed and self.options:
            chunks.put_nowait(options_chunk(key, self.options))
        async for answer in self.behaviour(request):
            await self._awake.wait()
            chunks.put_nowait(chunk(key, answer, parsed and bool(self.options), logprobs))

    async def _subscription(
        self, request: pb.ModelInferRequest, name: str
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """A request to open, read or end one."""
        number = input_number(request, "subscription_read")
        if number is not None:
            self.read.append(number)
            return
        if input_number(request, "subscription_end"):
            if name in self.subscriptions:
                self.subscriptions[name].put_nowait(None)
            return
        if self.refusal:
            yield error(self.refusal)
            return
        self.opened += 1
        chunks = self.subscriptions[name] = asyncio.Queue()
        packed, number = b"", 0
        try:
            while True:
                number += 1
                raw = struct.pack("<Q", number) + packed
                answer = pb.ModelInferResponse()
                answer.outputs.add(name="deliveries", datatype="BYTES", shape=[1])
                answer.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
                yield pb.ModelStreamInferResponse(infer_response=answer)
                one = await chunks.get()
                await self.deliveries.wait()
                await self._awake.wait()
                waiting = [one, *(chunks.get_nowait() for _ in range(chunks.qsize()))]
                if None in waiting:
                    del self.subscriptions[name]  # before anybody can hear of its end
                    if self.end_of_subscriptions:
                        yield error(self.end_of_subscriptions)
                    return
                packed = b"".join(one for one in waiting if one is not None)
        finally:
            self.subscriptions.pop(name, None)


@contextlib.contextmanager
def process_that_dies_of_requests() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its target."""
    process = subprocess.Popen([sys.executable, Path(__file__)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def _main() -> None:
    async def die(request: pb.ModelInferRequest) -> AsyncIterator[pb.ModelStreamInferResponse]:
        os._exit(1)
        yield

    async with Double() as double:
        double.behaviour = die
        print(double.target, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
