"""The asynchronous gRPC client: one channel, one ModelStreamInfer call per request.

Disconnecting. Triton does not pass the cancellation of an ensemble call on to the step that runs. So the client sends
the engine a cancel request with the same id (docs/contracts.md) and reads the call to its end. It does so in a task of
its own that outlives the caller's. Closing the iterator, cancelling the task, a time limit and closing the client all
end the work on the server.

A server that fails. A killed process closes its connection, and every call ends at once. A server can also become
unresponsive (its machine or network fails, its process is stopped), or its one thread for streams can, while it answers
every other call. So two small calls probe the server every few seconds while requests run. That traffic also keeps
gRPC's keepalive pings away from a server that answers: Triton's default policy takes such pings for abuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from charonia_client.aside import aside
from charonia_client.errors import (
    BadRequest,
    CharoniaError,
    DeadlineExceeded,
    NotReady,
    ServerError,
    Unavailable,
    Unresponsive,
    from_rpc,
    from_triton,
)
from charonia_client.stream import Stream, stream_infer
from charonia_client.subscription import Kind, NotOffered, SubscribedStream, Subscription
from charonia_client.tensors import (
    Action,
    decode,
    decode_described,
    decode_lookup,
    decode_quality,
    decode_tokenize,
    encode,
    encode_action,
    encode_lookup,
    encode_question,
    encode_tokenize,
)
from charonia_client.tls import Tls
from charonia_client.types import (
    GenerateRequest,
    GenerateResponse,
    ModelMetadata,
    ServerMetadata,
    Tokenized,
    TokenizeRequest,
)
from charonia_client.vocabulary import Lookup, Vocabulary
from charonia_client.waiting import comes_within

Way = Literal["call", "subscription"]

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A server that comes back is found within two seconds, and one client's failures are not another's.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    # An inference server is not behind a proxy for web pages, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
]
_PROBE_INTERVAL_S = 5.0
_PROBE_TIMEOUT_S = 15.0
# A server that ends refuses calls while it lets those that run come to their end, which takes it drain_timeout_s and a
# little more. Some then hold their connections open and never end them.
_REFUSED_TIMEOUT_S = 40.0
_UNARY_TIMEOUT_S = 5.0
# Of a text of megabytes, behind others.
_TOKENIZE_TIMEOUT_S = 60.0
# A cancel can overtake its request, which the engine would then take in after it. So it is repeated until the answer
# ends, with that many seconds in between. It is idempotent.
_STOP_PATIENCE_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0)
_TOLD_TIMEOUT_S = 1.0
# That what a server does not take by subscription is not sent so again: it may be replaced by a newer one meanwhile.
_REFUSED_S = 60.0


def _beside(ensemble: str, part: str) -> str:
    """The model of that kind that the ensemble is made of."""
    _, dot, label = ensemble.partition(".")
    return f"{part}{dot}{label}"


class Client:
    """A connection to Triton's gRPC port. Make it inside a running event loop; use it as `async with`, or close it.

    `target` is HOST:PORT; `model` the ensemble that answers, `engine` the model that takes stop and cancel requests,
    `vocabulary` the one that knows the bytes of tokens and `tokenizer` the one that makes tokens: by default those that
    belong to the ensemble, `engine.LABEL` and so on where it is `ensemble.LABEL`. Any number of
    requests may run at once. `metadata` is asked for each request what goes with its call as gRPC metadata, such as a
    `traceparent`. `lookup_elsewhere` is look_up() of another server of the same model: it is asked where this one ends
    its answers without a vocabulary. `tls`: None for a server that has none. `subscribe`: answers come by one stream,
    which takes less CPU time where many come at once (docs/contracts.md, "Subscriptions"). Not those with log
    probabilities of the prompt or gRPC metadata, and none that the server does not take so: any or those with log
    probabilities, where it is of an older version, and `parsed` ones, where it has another version of the parser.
    `on_way` is told once of each request how its answer comes, and `on_refusal` why the server takes none by
    subscription, or none of that kind.
    """

    def __init__(
        self,
        target: str,
        *,
        model: str = "ensemble",
        engine: str | None = None,
        vocabulary: str | None = None,
        tokenizer: str | None = None,
        metadata: Callable[[], Sequence[tuple[str, str]]] | None = None,
        lookup_elsewhere: Lookup | None = None,
        tls: Tls | None = None,
        subscribe: bool = False,
        on_way: Callable[[Way], None] = lambda _: None,
        on_refusal: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.target = target
        self._subscribe = subscribe
        self._on_way = on_way
        self._on_refusal = on_refusal
        self._refused_until: dict[Kind, float] = {}  # what the server takes by calls alone, by the loop's clock
        self._subscription: Subscription | None = None
        self._left: list[Subscription] = []  # which the server does not know any more, with answers that still come
        self.model = model
        self.engine = engine or _beside(model, "engine")
        self.vocabulary = vocabulary or _beside(model, "postprocessing")
        self.tokenizer = tokenizer or _beside(model, "preprocessing")
        self._metadata = metadata
        if tls:
            options = [*_CHANNEL_OPTIONS, *tls.options]
            self._channel = grpc.aio.secure_channel(target, tls.credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream_infer = stream_infer(self._channel)
        self._active: dict[str, Stream | SubscribedStream] = {}  # by request id
        self._stops: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._tokens = Vocabulary(self.look_up, lookup_elsewhere)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, timeout_s: float = 3.0) -> None:
        """Ends what still runs, waits for the cancel requests under way (at most `timeout_s`), closes the channel."""
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
        self, request: GenerateRequest, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the parts of the answer, the last with a finish_reason; with `stream=False` the whole in one. With `n`
        answers their parts come as they are made, each with its `index`.

        Leaving the iterator (`break` with `contextlib.aclosing`, cancellation, an exception) cancels the request on the
        server: a session forgets the turn. `request_id` must be unique among the requests that run; by default a new
        UUID. `timeout_s` bounds the whole call here, `timeout_ms` of the request its work on the server. Raises
        BadRequest, Overloaded, DeadlineExceeded, Unavailable or ServerError.
        """
        request_id = request_id or str(uuid.uuid4())
        stream = self._begin(request, request_id)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_server())
        deadline = None
        if timeout_s is not None:
            late = DeadlineExceeded(
                f"Triton at {self.target} did not answer in time ({max(0, round(timeout_s, 2)):g} s)"
            )
            deadline = asyncio.get_running_loop().call_later(timeout_s, lambda: stream.fail(late))
        with_logprobs = request.logprobs is not None or request.prompt_logprobs is not None
        running = request.n or 1  # answers that have not ended
        try:
            while True:
                try:
                    answer = await stream.next()
                except NotOffered as refusal:
                    self._note_refusal(refusal)
                    stream = self._begin(request, request_id)
                    continue
                if answer is None:
                    break
                if isinstance(answer, GenerateResponse):
                    response = answer
                else:
                    # Of log probabilities, an answer that is sent whole may have hundreds of thousands.
                    response = await aside(answer.ByteSize() // 8 if with_logprobs else 0, decode, answer)
                running -= response.finish_reason is not None
                if response.logprobs or response.prompt_ids:
                    await self._tokens.name_tokens(response)
                if request.name_stop_word and response.finish_reason == "stop":
                    response.stop_word = await self._tokens.stop_word(response, request.stop_words)
                yield response
            if running:
                raise ServerError(f"Triton at {self.target} ended the answer without a finish reason")
        except Unavailable:
            self._tokens.forget()
            raise
        finally:
            if deadline:
                deadline.cancel()
            self._active.pop(request_id, None)
            if running and not stream.over:
                told = self._disconnect(request_id, stream)
                # The cancel goes its way whatever becomes of this task. But an event loop that ends does not wait for
                # tasks that came after its last round of cancelling: it does for this one, which was there before.
                # Who has lost the connection may try another server, and does not wait for this one.
                if not stream.task.done():
                    await comes_within(told, _TOLD_TIMEOUT_S)

    def _begin(self, request: GenerateRequest, request_id: str) -> Stream | SubscribedStream:
        """Sends it, by a call of its own or with its answers in the subscription."""
        try:
            message = encode(request, request_id, self.model)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if self._closing.is_set():
            raise Unavailable("the client was closed")
        metadata = tuple(self._metadata()) if self._metadata else None
        parsed, logprobs = bool(request.parsed), request.logprobs is not None
        carried = self._subscribe and request.prompt_logprobs is None and not metadata
        stream: Stream | SubscribedStream
        kinds: dict[Kind, bool] = {"any": True, "parsed": parsed, "logprobs": logprobs}
        if carried and not any(is_one and self._refuses(kind) for kind, is_one in kinds.items()):
            stream = SubscribedStream(
                self._open_subscription,
                message,
                request.n or 1,
                parsed=parsed,
                logprobs=logprobs,
                on_settled=partial(self._on_way, "subscription"),
            )
        else:
            self._on_way("call")
            stream = Stream(self._stream_infer(message, metadata=metadata), self.target)
        self._active[request_id] = stream
        return stream

    def _refuses(self, kind: Kind) -> bool:
        """Whether the server has just not taken such a request by subscription."""
        return asyncio.get_running_loop().time() < self._refused_until.get(kind, -math.inf)

    def _note_refusal(self, refusal: NotOffered) -> None:
        """Of all requests that are refused at the same time, the first says it."""
        known = self._refuses(refusal.kind)
        self._refused_until[refusal.kind] = asyncio.get_running_loop().time() + _REFUSED_S
        if not known:
            self._on_refusal(str(refusal))

    def _open_subscription(self) -> Subscription:
        """The one for new requests."""
        if self._subscription is None or self._subscription.over or not self._subscription.fit:
            self._left = self._open_subscriptions()
            self._subscription = Subscription(self._stream_infer, self.engine, self.target, self.answer_formats)
        return self._subscription

    def _open_subscriptions(self) -> list[Subscription]:
        return [one for one in (*self._left, self._subscription) if one and not one.over]

    async def complete(
        self, request: GenerateRequest, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> GenerateResponse:
        """The whole answer of a request with `stream=False`, the first of several. Cancelling the task cancels the
        request on the server."""
        return (await self.complete_all(request, request_id=request_id, timeout_s=timeout_s))[0]

    async def complete_all(
        self, request: GenerateRequest, *, request_id: str | None = None, timeout_s: float | None = None
    ) -> list[GenerateResponse]:
        """The n whole answers of a request with `stream=False`, by their index; of `best_of`, the best first."""
        if request.stream:
            raise ValueError("complete() takes a request with stream=False")
        async with contextlib.aclosing(self.generate(request, request_id=request_id, timeout_s=timeout_s)) as parts:
            answers = [part async for part in parts]
        return sorted(answers, key=lambda answer: answer.index)

    async def stop(self, request_id: str = "", *, session_id: str = "") -> None:
        """Ends every request of that id, or of that session. A session keeps the turn with what was said of it.

        Unknown and finished ones are no error. Raises Unavailable, ServerError.
        """
        await self._act("stop", request_id, session_id)

    async def cancel(self, request_id: str = "", *, session_id: str = "") -> None:
        """As stop(), but a session forgets the turn."""
        await self._act("cancel", request_id, session_id)

    async def end_session(self, session_id: str) -> None:
        """Forgets a session. One that is not known is no error. Raises Unavailable, ServerError."""
        await self._act("end_session", "", session_id)

    def abort(self, request_id: str, why: str) -> bool:
        """Ends a running request with Unavailable, if nothing of its answer has come yet: generate() raises it, and the
        request is cancelled on the server. False when there is no such request."""
        stream = self._active.get(request_id)
        if stream is None or stream.begun:
            return False
        stream.fail(Unavailable(why))
        return True

    async def _act(self, action: Action, request_id: str, session_id: str) -> None:
        message = encode_action(action, self.engine, request_id=request_id, session_id=session_id)
        said = ""
        try:
            async for answer in self._stream_infer(message, timeout=_UNARY_TIMEOUT_S):
                said = said or answer.error_message
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None
        if said:
            raise from_triton(said)

    async def look_up(self, ids: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        """The bytes of each token, and whether it is special (no part of a text). Raises Unavailable, ServerError."""
        message = encode_lookup(ids, self.vocabulary)
        try:
            return decode_lookup(await self._stub.ModelInfer(message, timeout=_UNARY_TIMEOUT_S))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """The tokens of a text or of messages, or the text of ids. Raises BadRequest, Unavailable, ServerError."""
        try:
            message = encode_tokenize(request, self.tokenizer)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        try:
            return decode_tokenize(await self._stub.ModelInfer(message, timeout=_TOKENIZE_TIMEOUT_S))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template. Raises Unavailable, ServerError."""
        message = encode_question("tokenizer_info", self.tokenizer)
        try:
            return decode_described(await self._stub.ModelInfer(message, timeout=_UNARY_TIMEOUT_S))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def quality(self, timeout_s: float = _UNARY_TIMEOUT_S) -> list[dict[str, Any]]:
        """What `charonia evaluate` has measured of the model: the records of its manifest, [] where there are none.
        Raises Unavailable, ServerError."""
        message = encode_lookup([0], self.vocabulary, ("model_quality",))
        try:
            return decode_quality(await self._stub.ModelInfer(message, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def model_info(self, timeout_s: float = _UNARY_TIMEOUT_S) -> dict[str, Any]:
        """The model's context_length in tokens, weight_type, data_type, group_size and default_sampling_parameters.
        Unknown values are None. Its `fingerprint` changes when answers may change. Raises Unavailable, ServerError."""
        message = encode_question("model_info", self.tokenizer)
        try:
            return decode_described(await self._stub.ModelInfer(message, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    async def answer_formats(self, timeout_s: float = _UNARY_TIMEOUT_S) -> dict[str, str | None]:
        """The formats of the model's `tool_calls` and `reasoning`, None where it has none. Raises Unavailable,
        ServerError."""
        try:
            message = encode_question("answer_formats", self.tokenizer)
            return decode_described(await self._stub.ModelInfer(message, timeout=timeout_s))
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None

    def _disconnect(self, request_id: str, stream: Stream | SubscribedStream) -> asyncio.Event:
        """Cancels the request on the server, in a task of its own. The event is set once it was sent or failed."""
        stream.abandon()
        told = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._cancel_until_over(request_id, stream, told))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)
        return told

    async def _cancel_until_over(self, request_id: str, stream: Stream | SubscribedStream, told: asyncio.Event) -> None:
        try:
            for patience_s in _STOP_PATIENCE_S:
                # One that fails is said again: the server may only be late, or its connection may come back.
                heard = False
                with contextlib.suppress(CharoniaError):
                    await self.cancel(request_id)
                    heard = True
                told.set()
                if stream.task.done() and not heard and await comes_within(self._closing, patience_s):
                    return
                await asyncio.wait((stream.task,), timeout=patience_s)
                # Nothing more comes of a call whose connection broke, whatever the server does: it must have heard.
                if stream.task.done() and (heard or stream.over):
                    return
        except asyncio.CancelledError:
            # The loop is being torn down and cancels all tasks, once: say it a last time, then obey.
            with contextlib.suppress(Exception):
                await self.cancel(request_id)
            raise
        except Exception:
            # Nobody waits for this task; a client that is closed can say nothing more.
            return
        finally:
            told.set()
            stream.cancel()

    async def _watch_server(self) -> None:
        """Probes the server while requests run or a subscription is open. Where it does not answer, all requests end
        with Unresponsive; where it refuses calls, those that have received nothing for a while. So do the
        subscriptions."""
        clock = asyncio.get_running_loop().time
        refused_at: float | None = None  # since when it refuses
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
                    else:  # the connection's end is told to each call by gRPC itself, if it ends
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
        """Opens a stream and ends it without a request. Triton's thread for streams has to take it and to end it."""
        async for _ in self._stub.ModelStreamInfer(iter(()), timeout=timeout_s):
            pass

    async def check(self, timeout_s: float = _UNARY_TIMEOUT_S) -> None:
        """Returns when the server answers, both of its models can take requests, and it takes streams. Raises
        Unresponsive when one of the questions has no answer within `timeout_s`, NotReady when it answers that a model
        takes none, and Unavailable or ServerError with what else is wrong."""
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
        try:
            return bool((await self._stub.ServerLive(pb.ServerLiveRequest(), timeout=_UNARY_TIMEOUT_S)).live)
        except grpc.RpcError:
            return False

    async def server_ready(self) -> bool:
        """Whether the server and all its models are ready."""
        try:
            return bool((await self._stub.ServerReady(pb.ServerReadyRequest(), timeout=_UNARY_TIMEOUT_S)).ready)
        except grpc.RpcError:
            return False

    async def model_ready(self, model: str | None = None) -> bool:
        """Whether a model (default: the ensemble) can take requests."""
        request = pb.ModelReadyRequest(name=model or self.model)
        try:
            return bool((await self._stub.ModelReady(request, timeout=_UNARY_TIMEOUT_S)).ready)
        except grpc.RpcError:
            return False

    async def server_metadata(self) -> ServerMetadata:
        """Name, version and extensions of the server. Raises Unavailable or ServerError."""
        try:
            answer = await self._stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=_UNARY_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None
        return ServerMetadata(answer.name, answer.version, tuple(answer.extensions))

    async def model_metadata(self, model: str | None = None) -> ModelMetadata:
        """Tensors of a model (default: the ensemble). Raises Unavailable or ServerError."""
        request = pb.ModelMetadataRequest(name=model or self.model)
        try:
            answer = await self._stub.ModelMetadata(request, timeout=_UNARY_TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc(error, self.target) from None
        return ModelMetadata(
            answer.name,
            tuple(answer.versions),
            {tensor.name: (tensor.datatype, tuple(tensor.shape)) for tensor in answer.inputs},
            {tensor.name: (tensor.datatype, tuple(tensor.shape)) for tensor in answer.outputs},
        )
