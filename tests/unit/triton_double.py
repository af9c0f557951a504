"""A gRPC server with the part of Triton's protocol that the client uses. A test controls its behaviour.

It can do what a real server does only by chance, or when it is overloaded or broken. As a program, it is a server that
dies of any request to its model: `python triton_double.py` prints its port.
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
from charonia_client import GenerateResponse, ToolCallDelta
from charonia_client.delivery import Chunk, Delivery
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

Behaviour = Callable[[pb.ModelInferRequest], AsyncIterator[Any]]  # yields Chunks
_REASONS = ("", "stop", "length", "cancelled", "error")


def part(text: str, reason: str = "", index: int = 0) -> Any:
    """A chunk with one token."""
    return Chunk(
        sequence_index=index,
        finish_reason=_REASONS.index(reason),
        text_output=[text.encode()],
        output_ids=[1],
        token_bytes=[text.encode()],
        text_end=len(text.encode()),
        num_input_tokens=5,
        num_output_tokens=1,
    )


def progress(computed: int) -> Any:
    """A chunk that says how much of the prompt is computed."""
    return Chunk(num_input_tokens=5, num_cached_tokens=1, num_computed_tokens=computed, queue_ms=10, total_ms=34)


def parsed(content: str = "", reasoning: str = "", reason: str = "", calls: Any = ()) -> Any:
    """A chunk that `scripted_parse` parses into these."""
    chunk = part("?", reason)
    chunk.token_bytes[0] = json.dumps({"content": content, "reasoning": reasoning, "calls": list(calls)}).encode()
    return chunk


def scripted_parse(self: Any, part: GenerateResponse, *, in_reasoning: bool) -> None:
    """Replaces ResponseParser.parse for chunks of `parsed`. Other chunks are content."""
    for raw in part.token_bytes:
        one = (
            json.loads(raw)
            if raw.startswith(b'{"content"')
            else {"content": raw.decode(), "reasoning": "", "calls": ()}
        )
        part.content += one["content"]
        part.reasoning += one["reasoning"]
        part.tool_calls += [ToolCallDelta(**call) for call in one["calls"]]
    part.num_reasoning_tokens = 1


def with_logprobs(chunk: Any, tokens: int, tops: int) -> Any:
    """Return the chunk with this number of tokens, each with log probabilities of itself and of the top tokens."""
    text = b"".join(chunk.text_output)
    chunk.output_ids[:] = range(tokens)
    chunk.token_bytes[:] = [text[at : at + 1] for at in range(tokens - 1)] + [text[tokens - 1 :]] * (tokens > 0)
    chunk.output_log_probs[:] = [-0.5] * tokens
    chunk.top_log_prob_ids[:] = range(tokens * tops)
    chunk.top_log_probs[:] = [-0.5] * (tokens * tops)
    chunk.top_token_bytes[:] = [str(token).encode() for token in range(tokens * tops)]
    return chunk


def error(text: str) -> Any:
    """Return the chunk that ends a request with an error."""
    return Chunk(finish_reason=4, text_output=[text.encode()])


def says(*chunks: Any) -> Behaviour:
    """The behaviour of a server that responds with these chunks."""

    async def behaviour(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        for chunk in chunks:
            copy = Chunk()
            copy.CopyFrom(chunk)
            yield copy

    return behaviour


def _call_error(text: str) -> pb.ModelStreamInferResponse:
    return pb.ModelStreamInferResponse(error_message=text)


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
    """Use it with `async with`. By default it responds with its own target."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None, port: int = 0) -> None:
        """credentials: of its port; None: no TLS. port: 0: any free port."""
        self._credentials = credentials
        self._port = port
        self.target = ""
        self.ready = True
        self.unloaded: set[str] = set()  # ensembles and engines that it does not serve, although the server is ready
        self.tokenizer_error = ""  # error of its tokenizer
        self.tokenized = pb.ModelInferRequest()  # the last request to it
        self.quality: list[Any] = []  # the records of its model
        self.formats: dict[str, Any] = {}  # of its model's responses
        self.info: dict[str, Any] = {}  # about its model
        self.arithmetic, self.deterministic = b"cpu", True
        self.asked: list[str] = []  # requested outputs of these kinds
        self.describes = asyncio.Event()  # set: it returns them
        self.describes.set()
        self.exiting = False  # rejects liveness requests
        self.refusals = 0  # number of rejected liveness requests
        self.streams_hang = False  # as if its thread for streams were blocked; other calls work
        self.requests: list[pb.ModelInferRequest] = []  # to the ensemble
        self.metadata: list[Any] = []  # of the calls of these requests
        self.actions: list[tuple[str, str]] = []  # (stop, cancel or end_session; request id or session id)
        self.adapters: dict[str, dict[str, str]] = {}  # folders of LoRA adapters, by engine and name
        self.adapters_error = ""  # the error of a request about adapters
        self.action_error = ""  # error for stop, cancel and end_session, instead of executing them
        self.refused: set[tuple[str, int | None]] = set()  # subscription and key of cancelled requests
        self.behaviour: Behaviour = self.say_name
        self.subscriptions: dict[str, asyncio.Queue[Any]] = {}  # future chunks, by name; None: end of the subscription
        self.opened = 0  # number of opened subscriptions
        self.forgets_subscriptions = False  # requests that name one fail
        self.end_of_subscriptions = ""  # the error that ends subscriptions
        self.refusal = ""  # the error instead of opening a subscription
        self.call_error = ""  # the error of a request's call
        self.takes = asyncio.Event()  # set: the engine receives requests of subscriptions
        self.takes.set()
        self.tells = asyncio.Event()  # set: the calls of these requests end
        self.tells.set()
        self.read: list[int] = []  # acknowledgements of subscriptions' readers
        self.deliveries: asyncio.Event = asyncio.Event()  # set: deliveries are sent
        self.deliveries.set()
        self._answering: dict[tuple[str, int | None], asyncio.Task[None]] = {}
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
        for task in list(self._answering.values()):
            task.cancel()
        await self._server.stop(None)

    async def go(self) -> None:
        """Close the port, like a process that ends."""
        await self._server.stop(None)

    def fall_asleep(self) -> None:
        """Accept connections and requests from now on, but never respond."""
        self._awake.clear()
        self.asleep.set()

    def wake_up(self) -> None:
        self.asleep.clear()
        self._awake.set()

    async def say_name(self, request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        chunk = part(self.target, "stop")
        chunk.pooled.extend([0.5] if input_text(request, "pooling") else [])
        yield chunk

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
        """Describe the model, or tokenize."""
        described = {"model_quality": self.quality, "answer_formats": self.formats, "model_info": self.info}
        wanted = [output.name for output in request.outputs]
        if len(wanted) != 1 or wanted[0] not in described:
            return await self._tokenize(request, context)
        self.asked.append(wanted[0])
        if request.model_name in self.unloaded:
            text = f"Request for unknown model: '{request.model_name}' has no available versions"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        await self.describes.wait()
        raw = json.dumps(described[wanted[0]]).encode()
        answer = pb.ModelInferResponse()
        answer.outputs.add(name=wanted[0])
        answer.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
        return answer

    async def _tokenize(self, request: Any, context: Any) -> pb.ModelInferResponse:
        """Tokenize: one token per character; the context has 10 tokens."""
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
                action = request.inputs[0].name
                if action == "subscription":
                    async for answer in self._subscription(request, subscription):
                        yield answer
                    continue
                if any(one.name.startswith("lora_") for one in request.inputs):
                    yield self._change_adapters(request)
                    continue
                if self.action_error:
                    yield _call_error(self.action_error)
                    continue
                self.actions.append((action, request.id or input_text(request, "session_id")))
                self._refuse(subscription, input_number(request, "subscription_key"))
                continue
            self.requests.append(request)
            self.metadata.append(context.invocation_metadata())
            if request.model_name in self.unloaded:
                yield _call_error(f"Request for unknown model: '{request.model_name}' has no available versions")
                continue
            await self._awake.wait()
            loaded = self.adapters.get(request.model_name.replace("ensemble", "engine"), {})
            lora_name = input_text(request, "lora_name")
            if lora_name and lora_name not in {f"{name}=of{path}" for name, path in loaded.items()}:
                yield _call_error(f"[404] lora_name = {lora_name}: there is no adapter of this name")
                continue
            if self.call_error:
                yield _call_error(self.call_error)
                continue
            await self.takes.wait()
            if (subscription, input_number(request, "subscription_key")) in self.refused:
                yield _call_error("[400] the request was cancelled before it arrived")
                continue
            if self.forgets_subscriptions or subscription not in self.subscriptions:
                yield _call_error(f"[503] there is no subscription {subscription!r}")
                continue
            task = asyncio.create_task(self._answer(request, self.subscriptions[subscription]))
            await self.tells.wait()
            place = subscription, input_number(request, "subscription_key")
            self._answering[place] = task
            task.add_done_callback(lambda _, place=place: self._answering.pop(place, None))  # type: ignore[misc]
        await self._awake.wait()

    def _change_adapters(self, request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
        name, path = input_text(request, "lora_name"), input_text(request, "lora_path")
        adapters = self.adapters.setdefault(request.model_name, {})
        if self.adapters_error:
            return _call_error(self.adapters_error)
        if request.model_name in self.unloaded:
            return _call_error("[503] the model is not ready")
        if path:
            adapters[name] = path
        elif any(one.name == "lora_unload" for one in request.inputs) and adapters.pop(name, None) is None:
            return _call_error(f"[404] lora_name = {name}: there is no adapter of this name")
        listed = json.dumps(
            [
                {"name": name, "path": path, "fingerprint": f"of{path}", "rank": 8, "bytes": 1}
                for name, path in adapters.items()
            ]
        )
        response = pb.ModelInferResponse()
        response.outputs.add(name="lora_adapters", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(listed).to_bytes(4, "little") + listed.encode())
        return pb.ModelStreamInferResponse(infer_response=response)

    async def _answer(self, request: pb.ModelInferRequest, chunks: asyncio.Queue[Any]) -> None:
        key = input_number(request, "subscription_key")
        async for chunk in self.behaviour(request):
            await self._awake.wait()
            chunk.subscription_key = key
            chunks.put_nowait(chunk)

    def _refuse(self, subscription: str, key: int | None) -> None:
        """Cancel the request, also if it has not arrived yet."""
        self.refused.add((subscription, key))
        if task := self._answering.pop((subscription, key), None):
            task.cancel()
            if chunks := self.subscriptions.get(subscription):
                ended = error("the request was cancelled")
                ended.subscription_key = key
                chunks.put_nowait(ended)

    async def _subscription(
        self, request: pb.ModelInferRequest, name: str
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Handle a request to open, read or end a subscription."""
        number = input_number(request, "subscription_read")
        if number is not None:
            self.read.append(number)
            return
        if input_number(request, "subscription_end"):
            if name in self.subscriptions:
                self.subscriptions[name].put_nowait(None)
            return
        if self.refusal:
            yield _call_error(self.refusal)
            return
        self.opened += 1
        chunks = self.subscriptions[name] = asyncio.Queue()
        delivery = Delivery(number=1, arithmetic=self.arithmetic, deterministic=self.deterministic)
        try:
            while True:
                raw = delivery if isinstance(delivery, bytes) else delivery.SerializeToString()
                answer = pb.ModelInferResponse()
                answer.outputs.add(name="deliveries", datatype="BYTES", shape=[1])
                answer.raw_output_contents.append(struct.pack("<I", len(raw)) + raw)
                yield pb.ModelStreamInferResponse(infer_response=answer)
                one = await chunks.get()
                await self.deliveries.wait()
                await self._awake.wait()
                waiting = [one, *(chunks.get_nowait() for _ in range(chunks.qsize()))]
                if None in waiting:
                    del self.subscriptions[name]  # before a client can receive its end
                    if self.end_of_subscriptions:
                        yield _call_error(self.end_of_subscriptions)
                    return
                invalid = next((one for one in waiting if isinstance(one, bytes)), None)
                delivery = invalid or Delivery(number=delivery.number + 1, chunks=waiting)
        finally:
            self.subscriptions.pop(name, None)


@contextlib.contextmanager
def process_that_dies_of_requests() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and its target."""
    process = subprocess.Popen([sys.executable, Path(__file__)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def _main() -> None:
    async def die(request: pb.ModelInferRequest) -> AsyncIterator[Any]:
        os._exit(1)
        yield

    async with Double() as double:
        double.behaviour = die
        print(double.target, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
