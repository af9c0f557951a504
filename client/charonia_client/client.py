"""The asynchronous gRPC client: one channel, one subscription for all responses (subscription.py).

Disconnecting. Triton does not pass the cancellation of an ensemble call on to the step that runs, and counts some such
calls as running forever, so that it can neither unload the model nor shut down in order. So the client sends the engine
a cancel request with the same id (docs/contracts.md), in a task that outlives the caller's. Closing the iterator,
cancelling the task, a time limit and closing the client all end the work on the server.

Failing servers. A killed process closes its connection, and every call ends immediately. A server can also become
unresponsive (its machine or network fails, its process is stopped), or only its one thread for streams does. So two
small calls probe the server every few seconds while a subscription is open. That traffic also prevents gRPC's keepalive
pings to a server that answers: Triton's default policy treats such pings as abuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from charonia_client.errors import (
    BadRequest,
    CharoniaError,
    DeadlineExceeded,
    Moved,
    NotReady,
    ServerError,
    Unavailable,
    Unresponsive,
    from_rpc,
    from_triton,
)
from charonia_client.progress import Progress
from charonia_client.stream import Stream
from charonia_client.subscription import Subscription
from charonia_client.tensors import (
    Action,
    decode_adapters,
    decode_described,
    decode_quality,
    decode_tokenize,
    encode,
    encode_action,
    encode_adapters,
    encode_quality,
    encode_question,
    encode_tokenize,
    set_subscription,
)
from charonia_client.tls import Tls
from charonia_client.turns import Turns
from charonia_client.types import (
    GenerateRequest,
    GenerateResponse,
    ModelMetadata,
    ServerMetadata,
    Tokenized,
    TokenizeRequest,
)
from charonia_client.waiting import comes_within

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A client finds a restarted server within two seconds. Clients do not share failed connections.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # Ignore proxy settings of the environment: they are for web pages.
    ("grpc.enable_http_proxy", 0),
]
_PROBE_INTERVAL_S = 5.0
_PROBE_TIMEOUT_S = 15.0
# A server that shuts down rejects calls while running calls end, which takes a little longer than drain_timeout_s. Some
# servers then keep their connections open forever.
_REFUSED_TIMEOUT_S = 40.0
_UNARY_TIMEOUT_S = 5.0
# Preprocessing may be busy with texts of megabytes.
_TOKENIZE_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 300.0  # of a LoRA adapter
# A cancel request that fails is repeated after these times. It is idempotent.
_CANCEL_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)
_CANCEL_TIMEOUT_S = 1.0
# Preprocessing has one queue, in order of arrival, and its requests cannot be cancelled. So only this many requests are
# there at a time; the others wait here, where clients take turns. Large requests do not delay the small ones: they use
# all processes of preprocessing except one.
_LARGE_BYTES = 1 << 16
_MAX_SMALL = 16


def _sibling(ensemble: str, part: str) -> str:
    """The model of this kind that belongs to the ensemble."""
    _, dot, label = ensemble.partition(".")
    return f"{part}{dot}{label}"


class Client:
    """A connection to Triton's gRPC port. Create it inside a running event loop; use it with `async with`, or close it.

    `target` is HOST:PORT. `model` is the ensemble, `engine` the model for stop and cancel requests, and `tokenizer` the
    model that tokenizes. By default they belong to the ensemble: for `ensemble.LABEL` they are `engine.LABEL` and so
    on. Any number of requests may run at the same time.
    `metadata` returns the gRPC metadata of a request's call, such as a `traceparent`. `tls`: None for a server without
    TLS.
    """

    def __init__(
        self,
        target: str,
        *,
        model: str = "ensemble",
        engine: str | None = None,
        tokenizer: str | None = None,
        metadata: Callable[[], Sequence[tuple[str, str]]] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.target = target
        self._subscription: Subscription | None = None
        self._left: list[Subscription] = []  # unknown to the server by now, but their responses may still arrive
        self.model = model
        self.engine = engine or _sibling(model, "engine")
        self.tokenizer = tokenizer or _sibling(model, "preprocessing")
        self._metadata = metadata
        if tls:
            options = [*_CHANNEL_OPTIONS, *tls.options]
            self._channel = grpc.aio.secure_channel(target, tls.credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.GRPCInferenceServiceStub(self._channel)
        # The call takes a stream of requests, but only one is sent. So it is opened as a unary request, which is the
        # same on the wire and is sent together with the start and the end of the call. A separate write to a connection
        # that has just broken would fail with an internal status of gRPC instead of the actual error.
        self._stream_infer = self._channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self._active: dict[str, Stream] = {}  # by request id
        self._stops: set[asyncio.Task[None]] = set()
        self._ending: dict[str, Stream] = {}  # abandoned streams by request id, until the server has ended them
        self._small, self._large = Turns(_MAX_SMALL), Turns(1)
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, timeout_s: float = 3.0) -> None:
        """Ends running requests, waits for pending cancel requests (at most `timeout_s`), and closes the channel."""
        self._closing.set()
        if self._watch:
            self._watch.cancel()
        for request_id, stream in list(self._active.items()):
            stream.fail(Unavailable("the client was closed"))
            self._disconnect(request_id, stream)
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        if self._stops:
            await asyncio.wait(set(self._stops), timeout=timeout_s)
        for subscription in (*self._left, self._subscription):
            if subscription:
                await subscription.end(max(0.0, deadline - clock()))
        await self._channel.close()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the parts of the response, the last with a finish_reason; with `stream=False` one part. With `n`
        responses their parts arrive in any order, each with its `index`.

        Leaving the iterator (`break` with `contextlib.aclosing`, cancellation, an exception) cancels the request on the
        server, and a session drops the turn. `request_id` must be unique among the running requests; by default it is a
        new UUID. `timeout_s` is a limit for the whole call, the request's `timeout_ms` for its work on the server.
        `progress` has the tokens from other servers; the parts continue after them.
        Raises BadRequest, Overloaded, DeadlineExceeded, Unavailable or ServerError.
        """
        request_id = request_id or str(uuid.uuid4())
        progress = progress or Progress(request)
        running = progress.num_running
        stream = self._begin(request, request_id, progress)
        deadline = None
        if timeout_s is not None:
            late = DeadlineExceeded(
                f"Triton at {self.target} did not answer in time ({max(0, round(timeout_s, 2)):g} s)"
            )
            deadline = asyncio.get_running_loop().call_later(timeout_s, lambda: stream.fail(late))
        try:
            while (response := await stream.next()) is not None:
                running -= response.finish_reason is not None
                if request.name_stop_word and response.finish_reason == "stop":
                    response.stop_word = response.find_stop_word(request.stop_words)
                yield response
            if running:
                raise ServerError(f"Triton at {self.target} ended the response without a finish reason")
        finally:
            if deadline:
                deadline.cancel()
            self._active.pop(request_id, None)
            if running and not stream.over:
                tried = self._disconnect(request_id, stream)
                # Another task sends the cancel request, even if this task is cancelled. But an ending event loop waits
                # only for the tasks that existed when it cancelled all of them, so this task waits. After a lost
                # connection it does not wait, because the caller may try another server.
                if not stream.task.done():
                    await comes_within(tried, _CANCEL_TIMEOUT_S)

    def move(self, request_id: str) -> None:
        """Ends a running request with Moved, so that its caller continues it at another server."""
        if stream := self._active.get(request_id):
            stream.fail(Moved(f"Triton at {self.target} is shutting down"))

    def _begin(self, request: GenerateRequest, request_id: str, progress: Progress) -> Stream:
        try:
            sent = replace(request, stream=True) if progress.joins else request
            message = encode(sent, request_id, self.model, progress.begin())
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if self._closing.is_set():
            raise Unavailable("the client was closed")
        metadata = tuple(self._metadata()) if self._metadata else None
        stream = Stream(self._open_subscription, request, message, progress, self._turns_for(message), metadata)
        self._active[request_id] = stream
        return stream

    def _turns_for(self, message: Any) -> Turns:
        return self._large if sum(map(len, message.raw_input_contents)) > _LARGE_BYTES else self._small

    def _open_subscription(self) -> Subscription:
        """Returns the subscription for new requests."""
        if self._subscription is None or self._subscription.over or not self._subscription.known:
            self._left = self._open_subscriptions()
            self._subscription = Subscription(self._stream_infer, self.engine, self.target, self._describe)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_server())
        return self._subscription

    def _open_subscriptions(self) -> list[Subscription]:
        return [one for one in (*self._left, self._subscription) if one and not one.over]

    async def complete(
        self, request: GenerateRequest, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> GenerateResponse:
        """Returns the complete response to a request with `stream=False`; with several responses, the first one.
        Cancelling the task cancels the request on the server."""
        return (await self.complete_all(request, request_id=request_id, timeout_s=timeout_s))[0]

    async def complete_all(
        self, request: GenerateRequest, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> list[GenerateResponse]:
        """Returns the n complete responses to a request with `stream=False`, in the order of their index; with
        `best_of`, the best one first."""
        if request.stream:
            raise ValueError("complete() takes a request with stream=False")
        async with contextlib.aclosing(self.generate(request, request_id=request_id, timeout_s=timeout_s)) as parts:
            answers = [part async for part in parts]
        return sorted(answers, key=lambda answer: answer.index)

    async def stop(self, request_id: str = "", *, session_id: str = "") -> None:
        """Ends every request with this id, or of this session. A session keeps the turn with the text so far.

        Unknown and finished requests are ignored. Raises Unavailable, ServerError.
        """
        await self._act("stop", request_id, session_id)

    async def cancel(self, request_id: str = "", *, session_id: str = "") -> None:
        """Like stop(), but a session drops the turn."""
        await self._act("cancel", request_id, session_id)

    async def until_over(self, request_id: str) -> None:
        """Returns when the server has ended a request whose iterator was closed, or the connection was lost."""
        if stream := self._ending.get(request_id):
            await asyncio.wait((stream.task,))

    async def end_session(self, session_id: str) -> None:
        """Forgets a session, if it exists. Raises Unavailable, ServerError."""
        await self._act("end_session", "", session_id)

    async def load_adapter(self, name: str, path: str) -> list[dict[str, Any]]:
        """Loads a LoRA adapter from a folder of PEFT on the server. Returns the loaded adapters, as adapters() does.
        Raises BadRequest, Unavailable, ServerError."""
        return await self._change_adapters(_LOAD_TIMEOUT_S, name=name, path=path)

    async def unload_adapter(self, name: str) -> list[dict[str, Any]]:
        """Unloads a LoRA adapter; its running requests end with it. Raises NotFound, Unavailable, ServerError."""
        return await self._change_adapters(name=name, unload=True)

    async def adapters(self, timeout_s: float = _UNARY_TIMEOUT_S) -> list[dict[str, Any]]:
        """The loaded LoRA adapters: `name`, `path`, `fingerprint`, `rank` and `bytes` of each. Raises
        Unavailable, ServerError."""
        return await self._change_adapters(timeout_s)

    async def _change_adapters(self, timeout_s: float = _UNARY_TIMEOUT_S, **change: Any) -> list[dict[str, Any]]:
        message = encode_adapters(self.engine, **change)
        try:
            # To the end: a call that is left before is cancelled, and Triton may count it as running for ever.
            answers = [answer async for answer in self._stream_infer(message, timeout=timeout_s)]
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None
        for answer in answers:
            if answer.error_message:
                raise from_triton(answer.error_message)
            return decode_adapters(answer.infer_response)
        raise ServerError(f"Triton at {self.target} sent no response")

    async def _act(
        self, action: Action, request_id: str, session_id: str, place: tuple[str, int] | None = None
    ) -> None:
        message = encode_action(action, self.engine, request_id=request_id, session_id=session_id)
        if place:
            set_subscription(message, *place)
        failure = ""
        try:
            async for answer in self._stream_infer(message, timeout=_UNARY_TIMEOUT_S):
                failure = failure or answer.error_message
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None
        if failure:
            raise from_triton(failure)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Returns the tokens of a text or of messages, or the text of ids. Raises BadRequest, Unavailable,
        ServerError."""
        try:
            message = encode_tokenize(request, self.tokenizer)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        async with self._turns_for(message).turn(request.owner or ""):
            return decode_tokenize(await self._infer(message, _TOKENIZE_TIMEOUT_S))

    async def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template. Raises Unavailable, ServerError."""
        return decode_described(await self._infer(encode_question("tokenizer_info", self.tokenizer)))

    async def quality(self, timeout_s: float = _UNARY_TIMEOUT_S) -> list[dict[str, Any]]:
        """Returns the quality records of the model's manifest, which `charonia evaluate` writes. Raises Unavailable,
        ServerError."""
        return decode_quality(await self._infer(encode_quality(_sibling(self.model, "postprocessing")), timeout_s))

    async def model_info(self, timeout_s: float = _UNARY_TIMEOUT_S) -> dict[str, Any]:
        """The model's context_length in tokens, weight_type, data_type, group_size, vocab_size and
        default_sampling_parameters.
        Unknown values are None. Its `fingerprint` changes when the tokens of a request may change. `deterministic`:
        they depend on the request alone. Deterministic servers with the same fingerprint give a request the same
        tokens. Requested once for each loaded model. Raises Unavailable, ServerError."""
        if self._closing.is_set():
            raise Unavailable("the client was closed")
        subscription = self._open_subscription()

        async def known() -> dict[str, Any]:
            await subscription.opened()
            return await subscription.model_info()

        try:
            info = await asyncio.wait_for(known(), timeout_s)
        except asyncio.TimeoutError:
            raise Unresponsive(f"Triton at {self.target} did not describe its model in {timeout_s:g} s") from None
        self._large.most = max(1, info.get("instances", 1) - 1)
        return info

    async def answer_formats(self, timeout_s: float = _UNARY_TIMEOUT_S) -> dict[str, Any]:
        """The formats of the model's `tool_calls` and `reasoning`, None if it has none, and the ids of the `special`
        tokens in their markup. Raises Unavailable, ServerError."""
        return await self._describe("answer_formats", timeout_s)

    async def _describe(self, what: str, timeout_s: float = _TOKENIZE_TIMEOUT_S) -> dict[str, Any]:
        return decode_described(await self._infer(encode_question(what, self.tokenizer), timeout_s))

    async def _infer(self, message: Any, timeout_s: float = _UNARY_TIMEOUT_S) -> Any:
        """Sends a request that has one response."""
        return await self._answer(self._stub.ModelInfer(message, timeout=timeout_s))

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """Returns the response of a call. Raises the client's errors."""
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    def _disconnect(self, request_id: str, stream: Stream) -> asyncio.Event:
        """Starts a task that cancels the request on the server. The event is set when the first try has ended."""
        stream.abandon()
        tried = asyncio.Event()
        if stream.over:
            tried.set()
            return tried
        task = asyncio.get_running_loop().create_task(self._cancel_until_over(request_id, stream, tried))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        self._ending[request_id] = stream
        stream.task.add_done_callback(lambda _: self._ending.pop(request_id, None))
        return tried

    async def _cancel_until_over(self, request_id: str, stream: Stream, tried: asyncio.Event) -> None:
        try:
            for wait_s in _CANCEL_RETRY_S:
                with contextlib.suppress(CharoniaError):
                    # It may overtake its request, which the engine then rejects when it arrives.
                    await self._act("cancel", request_id, "", stream.place)
                    tried.set()
                    await asyncio.wait((stream.task,))
                    return
                # The server may be slow, or the connection may return.
                tried.set()
                if stream.task.done() and await comes_within(self._closing, wait_s):
                    return
                await asyncio.wait((stream.task,), timeout=wait_s)
                # After a broken connection the stream has ended, but the server must still receive the cancel request.
                if stream.over:
                    return
        except asyncio.CancelledError:
            # The event loop ends and cancels all tasks once: try a last time.
            with contextlib.suppress(Exception):
                await self._act("cancel", request_id, "", stream.place)
            raise
        except Exception:
            # No task waits for this one, and a closed client can send nothing.
            return
        finally:
            tried.set()
            stream.cancel()

    async def _watch_server(self) -> None:
        """Probes the server while requests run or a subscription is open. If it does not answer, all requests and
        subscriptions end with Unresponsive. If it rejects calls, only requests and subscriptions that have received
        nothing for a while end."""
        clock = asyncio.get_running_loop().time
        refused_at: float | None = None  # the time of the first of consecutive refusals
        try:
            while self._active or self._open_subscriptions():
                await asyncio.sleep(_PROBE_INTERVAL_S)
                running = dict(self._active)
                subscriptions = self._open_subscriptions()
                try:
                    await self._stub.ServerLive(pb.ServerLiveRequest(), timeout=_PROBE_TIMEOUT_S)
                    await self._open_stream(_PROBE_TIMEOUT_S)
                    refused_at = None
                except grpc.RpcError as error:
                    latest = math.inf
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        failed = list(running.items())
                        why = f"did not answer for {_PROBE_TIMEOUT_S:g} s"
                    else:  # gRPC itself ends all calls of a broken connection
                        refused_at = clock() if refused_at is None else refused_at
                        latest = clock() - _REFUSED_TIMEOUT_S
                        failed = [item for item in running.items() if max(refused_at, item[1].news_at) <= latest]
                        why = f"takes no calls any more and has sent nothing for {_REFUSED_TIMEOUT_S:g} s"
                    for request_id, stream in failed:
                        if self._active.get(request_id) is stream:
                            stream.fail(Unresponsive(f"Triton at {self.target} {why}"))
                            stream.cancel()
                    for subscription in subscriptions:
                        if max(refused_at or 0, subscription.news_at) <= latest:
                            subscription.cancel(Unresponsive(f"Triton at {self.target} {why}"))
        finally:
            self._watch = None

    async def _open_stream(self, timeout_s: float) -> None:
        """Opens a stream and ends it without a request, which needs Triton's thread for streams."""

        async def read() -> None:
            async for _ in self._stub.ModelStreamInfer(iter(()), timeout=timeout_s):
                pass

        # If the connection breaks when gRPC ends the requests, gRPC cancels the call. Its CancelledError is not for the
        # caller's task.
        reading = asyncio.ensure_future(read())
        try:
            await asyncio.wait((reading,))
        finally:
            reading.cancel()
        if reading.cancelled():
            no_metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, no_metadata, no_metadata, "the connection broke")
        reading.result()

    async def check(self, timeout_s: float = _UNARY_TIMEOUT_S) -> None:
        """Returns when the server answers, accepts streams, and both of its models are ready. Raises Unresponsive if a
        call has no answer within `timeout_s`, NotReady if a model is not ready, and Unavailable or ServerError for
        other errors."""
        try:
            if not (await self._stub.ServerLive(pb.ServerLiveRequest(), timeout=timeout_s)).live:
                raise Unavailable(f"Triton at {self.target} is not live")
            for model in (self.model, self.engine):
                if not (await self._stub.ModelReady(pb.ModelReadyRequest(name=model), timeout=timeout_s)).ready:
                    raise NotReady(f"model {model!r} of Triton at {self.target} is not ready")
            await self._open_stream(timeout_s)
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def server_live(self) -> bool:
        """Whether a Triton server answers."""
        return await self._holds(self._stub.ServerLive(pb.ServerLiveRequest(), timeout=_UNARY_TIMEOUT_S), "live")

    async def server_ready(self) -> bool:
        """Whether the server and all its models are ready."""
        return await self._holds(self._stub.ServerReady(pb.ServerReadyRequest(), timeout=_UNARY_TIMEOUT_S), "ready")

    async def model_ready(self, model: str | None = None) -> bool:
        """Whether a model (default: the ensemble) can take requests."""
        request = pb.ModelReadyRequest(name=model or self.model)
        return await self._holds(self._stub.ModelReady(request, timeout=_UNARY_TIMEOUT_S), "ready")

    async def _holds(self, call: Awaitable[Any], field: str) -> bool:
        """Whether a call succeeds and its response says so."""
        with contextlib.suppress(grpc.RpcError):
            return bool(getattr(await call, field))
        return False

    async def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions of the server. Raises Unavailable or ServerError."""
        request = pb.ServerMetadataRequest()
        answer = await self._answer(self._stub.ServerMetadata(request, timeout=_UNARY_TIMEOUT_S))
        return ServerMetadata(answer.name, answer.version, tuple(answer.extensions))

    async def model_metadata(self, model: str | None = None) -> ModelMetadata:
        """Tensors of a model (default: the ensemble). Raises Unavailable or ServerError."""
        request = pb.ModelMetadataRequest(name=model or self.model)
        answer = await self._answer(self._stub.ModelMetadata(request, timeout=_UNARY_TIMEOUT_S))
        inputs, outputs = (
            {tensor.name: (tensor.datatype, tuple(tensor.shape)) for tensor in tensors}
            for tensors in (answer.inputs, answer.outputs)
        )
        return ModelMetadata(answer.name, tuple(answer.versions), inputs, outputs)
