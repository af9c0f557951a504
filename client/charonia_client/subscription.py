"""One stream for the answers of many requests (docs/contracts.md, "Subscriptions").

A client that subscribes has one call of the engine open, with one response for each step of the engine, in place of one
for each step and request: that takes a fraction of the CPU time, here and in the server. A request then is a call that
ends as soon as the engine has it. Its parts come by the subscription, are unpacked once for all requests, and wait in
its stream, where those of a reader that is slow become one: nobody waits for another's reader.

Answers that are read for calls of tools and for reasoning are read here, with the parser that the server would use. A
server whose parser is another one is asked for them by calls, and one of a version that has no log probabilities here
for those.

A subscription that is lost fails its streams with the error that a call of theirs would have had.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
import re
import struct
import uuid
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
from charonia_answers import fingerprint
from charonia_answers.reading import Reader

from charonia_client.aside import aside
from charonia_client.errors import (
    BadRequest,
    CharoniaError,
    ConnectionLost,
    ServerError,
    Unavailable,
    Unresponsive,
    from_rpc,
    from_triton,
)
from charonia_client.tensors import decode_logprobs, encode_subscription, subscribed
from charonia_client.types import FinishReason, GenerateResponse, Timings, ToolCallDelta

# Of a slow reader: as many parts wait as they came; then each becomes one with the last.
_READ_AHEAD = 64
# After so many deliveries or bytes the server is told that they were read. It sends four times as many
# without hearing of it.
_READ_DELIVERIES = 64
_READ_BYTES = 1 << 20
_SAY_TIMEOUT_S = 5.0
_SAY_AGAIN_S = 1.0

_NO_SUBSCRIPTION = "there is no subscription"  # how the engine's error for a name that it does not know begins
_LOADED_ANEW = "was loaded anew"  # the end of its error for a subscription of a model that was
# How Triton's error for models of a version that has no subscriptions begins. Others quote what users wrote.
_UNKNOWN_TENSOR = re.compile(r"unexpected inference (?:input|output) '(?:subscription|deliveries)")
# How the error of engines begins that have no log probabilities in subscriptions. The name is nobody else's to write.
_NO_LOGPROBS = "subscription is '{name}', and log probabilities do not go through one"

_PARSER = fingerprint()  # here and now: it reads files, for which no answer is to wait

Kind = Literal["any", "parsed", "logprobs"]  # of requests: of those that are parsed, or with log probabilities

_NUMBER = struct.Struct("<Q")
_HEAD = struct.Struct("<QIIiiiiiiiiffff")
_COUNT = struct.Struct("<I")
_REASONS: dict[int, FinishReason | None] = {0: None, 1: "stop", 2: "length", 3: "cancelled"}
_ERROR = 4
_OPTIONS = 5
_TOKENS, _LOGPROBS = 16, 32  # beside a reason
# Log probabilities that one part has after it was joined: unpacked they take about 150 bytes each, packed 8.
_MOST_JOINED = 4096
_READING = 16  # what aside() counts takes a microsecond each; reading a token for calls takes 6 to 27


# Of some tokens, as the tensors output_log_probs, top_log_prob_ids and top_log_probs have them.
PackedLogprobs = tuple[bytes, bytes, bytes]


@dataclass(slots=True)
class PackedPart(GenerateResponse):
    """One whose log probabilities are not unpacked yet: an answer may have hundreds of thousands, for which other
    answers are not to wait. None: it has none."""

    packed: list[PackedLogprobs] | None = None

    def num_packed(self) -> int:
        """With those of the most likely tokens."""
        return sum(len(logprobs) + len(ids) for logprobs, ids, _ in self.packed or ()) // 4

    def unpack(self) -> None:
        unpacked = [decode_logprobs(*packed) for packed in self.packed or ()]
        self.packed = None
        self.logprobs = tuple(one for logprobs, _ in unpacked for one in logprobs)
        self.top_logprobs = [row for _, rows in unpacked for row in rows]


@dataclass(slots=True)
class TokenPart(PackedPart):
    """One that is not read yet: with how many bytes of text each token has, and these bytes."""

    sizes: tuple[int, ...] = ()
    joined: bytes = b""

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return ((token, self.joined[begin:end]) for token, (begin, end) in zip(self.token_ids, bounds, strict=True))


@dataclass(frozen=True, slots=True)
class ParsingOptions:
    """What the answers of a request are read by, as JSON."""

    text: str


Found = GenerateResponse | ParsingOptions | str  # a part, or the text of an error


def unpack(packed: bytes) -> tuple[int, list[tuple[int, Found]]]:
    """The number of a delivery, and by their request's key what has come. ValueError or struct.error for what is no
    delivery."""
    (number,) = _NUMBER.unpack_from(packed)
    found: list[tuple[int, Found]] = []
    at, size = _NUMBER.size, len(packed)
    while at < size:
        head = _HEAD.unpack_from(packed, at)
        key, text_bytes, num_ids, index, reason, begin, end = head[:7]
        num_input, num_output, num_cached, num_session, cum_logprob, queue_ms, first_token_ms, total_ms = head[7:]
        ids_at = at + _HEAD.size
        ids = struct.unpack_from(f"<{num_ids}i", packed, ids_at)
        sizes: tuple[int, ...] = ()
        text_at = ids_at + 4 * num_ids
        if reason & _TOKENS:
            sizes = struct.unpack_from(f"<{num_ids}I", packed, text_at)
            text_at += 4 * num_ids
        logprobs: PackedLogprobs | None = None
        if reason & _LOGPROBS:
            logprobs, text_at = _logprobs_at(packed, text_at, num_ids)
        at = text_at + text_bytes
        if at > size or sum(sizes) > text_bytes:
            raise ValueError(f"a chunk ends at byte {at}, or its tokens behind it, and the delivery at {size}")
        if reason == _ERROR:
            found.append((key, packed[text_at:at].decode(errors="replace")))
            continue
        if reason == _OPTIONS:
            found.append((key, ParsingOptions(packed[text_at:at].decode(errors="replace"))))
            continue
        if reason & ~_TOKENS & ~_LOGPROBS not in _REASONS:
            raise ValueError(f"finish_reason is {reason}")
        ending = _REASONS[reason & ~_TOKENS & ~_LOGPROBS]
        more = (ids, ending, num_input, num_output, num_cached, Timings(queue_ms, first_token_ms, total_ms))
        part: GenerateResponse
        if reason & _TOKENS:
            joined_at = at - sum(sizes)  # behind the input text, where the answer begins with it
            before, joined = packed[text_at:joined_at], packed[joined_at:at]
            part = TokenPart((before + joined[begin:end]).decode(errors="replace"), *more)
            part.sizes, part.joined, part.packed = sizes, joined, logprobs and [logprobs]
        elif logprobs:
            part = PackedPart(packed[text_at:at].decode(errors="replace"), *more)
            part.packed = [logprobs]
        else:
            part = GenerateResponse(packed[text_at:at].decode(errors="replace"), *more)
        part.index = index
        part.text_span = (begin, end)
        part.cum_logprob = cum_logprob
        part.num_session_tokens = num_session
        found.append((key, part))
    return number, found


def _logprobs_at(packed: bytes, at: int, num_ids: int) -> tuple[PackedLogprobs, int]:
    """The log probabilities of a chunk that has that many ids, and where they end."""
    ids_at = at + 4 * num_ids + _COUNT.size
    (tops,) = _COUNT.unpack_from(packed, ids_at - _COUNT.size)
    tops_at = ids_at + 4 * num_ids * tops
    end = tops_at + 4 * num_ids * tops
    return (packed[at : ids_at - _COUNT.size], packed[ids_at:tops_at], packed[tops_at:end]), end


class NotOffered(CharoniaError):
    """The server takes no subscription, not one more, or no requests of that kind by one: it has not taken the request,
    which can be sent by a call."""

    def __init__(self, message: str, kind: Kind = "any") -> None:
        super().__init__(message)
        self.kind = kind


class _JoinedLogprobs:
    """Those of several chunks as of one, in what they have on the wire and little more: objects for those of each token
    would take twice that."""

    __slots__ = ("_parts", "width")

    def __init__(self, width: int) -> None:
        self.width = width  # how many most likely tokens each token has
        self._parts = (io.BytesIO(), io.BytesIO(), io.BytesIO())

    def add(self, packed: PackedLogprobs) -> None:
        for part, more in zip(self._parts, packed, strict=True):
            part.write(more)

    def packed(self) -> PackedLogprobs:
        logprobs, ids, tops = self._parts
        return (logprobs.getvalue(), ids.getvalue(), tops.getvalue())


class _Joined:
    """Parts of one answer that a slow reader gets as one. Each is copied twice, however many come."""

    __slots__ = ("_ids", "_joined", "_last", "_packed", "_sizes", "_span", "_text", "index", "num_packed")

    def __init__(self, first: GenerateResponse) -> None:
        self.index = first.index
        self._text = io.StringIO()
        self._ids = array("i")
        self._sizes = array("I")
        self._joined = io.BytesIO()
        self._packed: list[_JoinedLogprobs] = []
        self.num_packed = 0
        self._span = (0, 0)
        self.add(first)

    def add(self, part: GenerateResponse) -> None:
        """What came after the others."""
        begin, end = self._span
        if begin == end:
            begin = end + part.text_span[0]
        self._span = (begin, end + part.text_span[1])
        self._text.write(part.text)
        self._ids.extend(part.token_ids)
        if isinstance(part, PackedPart):
            for packed in part.packed or ():
                self._add_logprobs(packed)
            self.num_packed += part.num_packed()
        if isinstance(part, TokenPart):
            self._sizes.extend(part.sizes)
            self._joined.write(part.joined)
        self._last = part

    def _add_logprobs(self, packed: PackedLogprobs) -> None:
        logprobs, ids, _ = packed
        if logprobs:  # not of a chunk without tokens, whose width is 0
            width = len(ids) // len(logprobs)
            if not self._packed or self._packed[-1].width != width:
                self._packed.append(_JoinedLogprobs(width))
            self._packed[-1].add(packed)

    def whole(self) -> GenerateResponse:
        part = self._last
        part.text, part.token_ids, part.text_span = self._text.getvalue(), tuple(self._ids), self._span
        if isinstance(part, PackedPart) and part.packed is not None:
            part.packed = [joined.packed() for joined in self._packed]
        if isinstance(part, TokenPart):
            part.sizes, part.joined = tuple(self._sizes), self._joined.getvalue()
        return part


class PartReader:
    """Reads the parts of a request's answers for calls and reasoning. Raises Unavailable for options that are for
    another parser, as where the server was replaced by another one, and ServerError for what are none."""

    def __init__(self, options: ParsingOptions) -> None:
        try:
            self._options = dict(json.loads(options.text))
            parser, self._special = self._options["parser"], dict(self._options["special"])
        except Exception as error:  # of any kind: JSON that is nested too deeply has one of its own
            raise ServerError(f"the server sent no options for the reading of an answer: {error!r}") from error
        if parser != _PARSER:
            raise Unavailable("the server has another parser of answers by now: send the request again")
        self._readers: dict[int, Reader] = {}  # by answer

    def read(self, part: TokenPart) -> None:
        """Sets what it has of content, reasoning and calls."""
        begin, end = part.text_span
        ending = part.finish_reason
        try:
            reader = self._readers.get(part.index)
            if reader is None:
                reader = self._readers[part.index] = Reader(self._options, self._special)
            found = reader.read(
                list(part.pieces()), (begin, end), last=ending is not None, cut_off=ending not in (None, "stop")
            )
        except Exception as error:
            raise ServerError(f"an answer could not be read for calls and reasoning: {error!r}") from error
        part.content, part.reasoning = found.content, found.reasoning
        part.tool_calls = [ToolCallDelta(**call) for call in found.calls]
        part.num_reasoning_tokens = found.num_reasoning_tokens


def _fresh(error: CharoniaError) -> CharoniaError:
    """The same error as an exception of its own: whoever raises one adds to its traceback, and may change it."""
    return copy.copy(error)


class SubscribedStream:
    """What comes of one request; of its `answers` each has a last part. One task may read. As stream.Stream is.

    `choose` gives the subscription for it, and another one where the server does not know that, as when the model was
    loaded anew: then it is sent again, once. `parsed`: it is read for calls and reasoning. `logprobs`: it has log
    probabilities. `on_settled` is told once that it was sent and needs no call of its own, whatever becomes of it. The
    reader gets NotOffered where the server takes it by a call alone."""

    def __init__(
        self,
        choose: Callable[[], Subscription],
        message: Any,
        answers: int,
        *,
        parsed: bool = False,
        logprobs: bool = False,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._choose = choose
        self._parsed = parsed
        self._logprobs = logprobs
        self._reader: PartReader | None = None  # of what is parsed, once a part has come
        self._on_settled = on_settled
        self._sent = False
        self._settled = False  # that was told
        self._subscription = choose()
        self._running = answers
        self._parts: deque[GenerateResponse | _Joined] = deque()
        self._error: CharoniaError | None = None
        self._abandoned = False
        self._asking = False  # its call is under way
        self._lost: CharoniaError | None = None  # by which it ends if its call says that the server has the request
        self._waiter: asyncio.Future[None] | None = None  # the reader
        self.begun = False  # a part has come
        self.over = False  # the server has nothing more to do for this request
        self.news_at = loop.time()  # when the last part came, by the loop's clock
        self.task: asyncio.Future[None] = loop.create_future()  # done when nothing more comes
        self._key = self._subscription.add(self)
        self._sender = loop.create_task(self._send(message))
        self._subscription.keep(self._sender)

    async def next(self) -> GenerateResponse | None:
        """The next part, None at the end. Raises the client's errors. Cancelling it loses nothing."""
        while not self._parts:
            if self._error:
                raise self._error
            if self.task.done():
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        part = self._parts.popleft()
        whole = part.whole() if isinstance(part, _Joined) else part
        if isinstance(whole, PackedPart) and whole.packed:
            await aside(whole.num_packed(), whole.unpack)
        if isinstance(whole, TokenPart):
            assert self._reader
            await aside(_READING * len(whole.token_ids), self._reader.read, whole)
        return whole

    def abandon(self) -> None:
        """The reader is gone: parts that still come are dropped."""
        self._abandoned = True
        self._parts.clear()

    def fail(self, error: CharoniaError) -> None:
        """Gives the reader `error` after what has come before. Nothing on a stream that has all its parts."""
        if self._running:
            if self._error is None or isinstance(self._error, NotOffered):  # after which it would be sent again
                self._error = error
            self._wake()

    def cancel(self) -> None:
        """Nothing more is taken, whatever the server makes of the request."""
        if not self.over:  # else the call comes to its end by itself, and may be about to
            self._sender.cancel()
        self.end()

    def take_options(self, options: ParsingOptions) -> None:
        """Of its subscription, before the first part."""
        try:
            self._reader = PartReader(options)
        except CharoniaError as error:
            self._refuse_parsing(error)

    def _refuse_parsing(self, error: CharoniaError) -> None:
        """This request cannot be read, and no later one is sent so."""
        self._subscription.unread = str(error)
        self.fail(error)

    def push(self, part: GenerateResponse) -> None:
        """Of its subscription."""
        has_tokens = isinstance(part, TokenPart)
        has_logprobs = isinstance(part, PackedPart) and part.packed is not None
        if self._parsed and not (self._reader and has_tokens):
            # As an engine that is older than its workspace, which sends what it knows of.
            target = self._subscription.target
            self._refuse_parsing(
                Unavailable(f"Triton at {target} sent an answer without what it is read by: send the request again")
            )
        elif (has_tokens, has_logprobs) != (self._parsed, self._logprobs):
            self.fail(ServerError(f"{self._subscription.target} sent another kind of answer than was asked for"))
        self.begun = True
        self._settle()
        if part.finish_reason:
            self._running -= 1
        if not self._abandoned and not self._error:
            if len(self._parts) < _READ_AHEAD or not self._joins(part):
                self._parts.append(part)
            self._wake()
        if not self._running:
            self.over = True
            self.end()

    def _joins(self, part: GenerateResponse) -> bool:
        """It becomes one with the last that waits of its answer. False: none does, or that has as many log
        probabilities as one part may have."""
        for at in range(len(self._parts) - 1, -1, -1):
            last = self._parts[at]
            if last.index == part.index:
                if isinstance(last, GenerateResponse):
                    last = self._parts[at] = _Joined(last)
                if last.num_packed >= _MOST_JOINED:
                    return False
                last.add(part)
                return True
        return False

    def lose(self, error: CharoniaError) -> None:
        """What it comes by has ended. Of a connection that broke nobody knows whether the server works on. Nothing on a
        stream that has ended."""
        if self.task.done():
            return
        if self._asking and not self.begun and isinstance(error, Unavailable) and _LOADED_ANEW in str(error):
            self._lost = error  # the request may be on its way to the model that took the other one's place
            return
        self.over = not isinstance(error, (ConnectionLost, Unresponsive))
        self.fail(error)
        self.end()

    def end(self) -> None:
        """Nothing more comes."""
        self._subscription.remove(self._key)
        if not self.task.done():
            self.task.set_result(None)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def _send(self, message: Any) -> None:
        """Sends the request once the subscription is there. An error of its call is the request's end."""
        try:
            unknown = await self._ask(message)
            if unknown and not (self._abandoned or self._error or self.task.done()):
                self._lost = None
                self._subscription.remove(self._key)
                self._subscription = self._choose()
                self._key = self._subscription.add(self)
                self._subscription.keep(self._sender)
                unknown = await self._ask(message)
            if lost := unknown or self._lost:
                self.lose(lost)
        except grpc.RpcError as failure:
            self.lose(from_rpc(failure, self._subscription.target))
        except CharoniaError as failure:
            self.lose(failure)
        except asyncio.CancelledError:
            # By a loop that ends, or because the stream was cancelled, which then has ended.
            self._break_off(ServerError("the call was cancelled"))
            raise
        except Exception as failure:  # what came is no answer, or the channel is closed
            self._break_off(ServerError(f"the call to Triton at {self._subscription.target} failed: {failure!r}"))
        finally:
            if self._sent and not isinstance(self._error, NotOffered):  # after which a call takes its place
                self._settle()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._on_settled()

    async def _ask(self, message: Any) -> Unavailable | None:
        """Makes the request's call. The error of a server that does not know the subscription, and so has not taken the
        request."""
        subscription, unknown = self._subscription, None
        if self._parsed:
            subscription.ask_parser()
        await subscription.opened()
        if self._parsed:
            await subscription.reads()
        if self._abandoned or self._error:  # before it was sent
            self.over = True
            self.end()
            return None
        subscribed(message, subscription.name, self._key, self._parsed)
        self._sent = self._asking = True
        try:
            async for answer in subscription.call(message):
                if answer.error_message:
                    error = from_triton(answer.error_message)
                    if isinstance(error, Unavailable) and _NO_SUBSCRIPTION in str(error):
                        subscription.fit = False
                        unknown = error
                    elif type(error) is ServerError and _UNKNOWN_TENSOR.match(str(error)):
                        self.lose(NotOffered(str(error)))
                    elif isinstance(error, BadRequest) and str(error).startswith(
                        _NO_LOGPROBS.format(name=subscription.name)
                    ):
                        self.lose(NotOffered("its version has no log probabilities by subscription", "logprobs"))
                    else:
                        self.lose(error)
        finally:
            self._asking = False
        return unknown

    def _break_off(self, error: CharoniaError) -> None:
        """Ends it with the error, unless it has ended. The server may have the request."""
        if not self.task.done():
            self.fail(error)
            self.end()


class Subscription:
    """A call of `engine`, which is open until it is ended or lost. `call` makes ModelStreamInfer of one request;
    `formats` is Client.answer_formats()."""

    def __init__(
        self, call: Callable[..., Any], engine: str, target: str, formats: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.name = str(uuid.uuid4())
        self.call = call
        self.target = target
        self.over = False
        self.fit = True  # for new requests: the server knows it, as far as is known here
        self._clock = loop.time
        self.news_at = self._clock()  # when the last delivery came
        self._engine = engine
        self._error: CharoniaError | None = None
        self._streams: dict[int, SubscribedStream] = {}  # by key
        self._last_key = 0
        self._opened: asyncio.Future[None] = loop.create_future()
        self._number = 0  # of the last delivery
        self._unread = (0, 0)  # deliveries and bytes of which the server has not heard that they were read
        self._teller: asyncio.Task[None] | None = None
        self._senders: set[asyncio.Task[None]] = set()
        self._formats = formats
        self._parser: asyncio.Task[str] | None = None  # why answers cannot be read here; empty: they can
        self.unread = ""  # the same, of an answer that could not, as where preprocessing alone was replaced
        self._call = call(encode_subscription(self.name, engine))
        self.task = loop.create_task(self._read())

    def add(self, stream: SubscribedStream) -> int:
        """Its key."""
        self._last_key += 1
        self._streams[self._last_key] = stream
        return self._last_key

    def remove(self, key: int) -> None:
        self._streams.pop(key, None)

    def keep(self, sender: asyncio.Task[None]) -> None:
        """A call of the ensemble, which is not to be cancelled."""
        self._senders.add(sender)
        sender.add_done_callback(self._senders.discard)

    async def opened(self) -> None:
        """Returns when requests may name it. Raises the client's errors where it cannot be opened, or has ended:
        NotOffered where the server is there and does not open it."""
        if self._error is None and not self._opened.done():
            await asyncio.wait((self._opened,))
        if self._error:
            raise _fresh(self._error)

    def ask_parser(self) -> None:
        """Asks the server how it reads answers, until it has said it: as long as the subscription lives, it is the same
        server."""
        if self._parser is None:
            self._parser = asyncio.get_running_loop().create_task(self._ask_parser())

    async def _ask_parser(self) -> str:
        try:
            found = (await self._formats()).get("parser")
        except Exception as error:  # the client's, or what it said is no answer
            self._parser = None  # whoever comes later asks again
            return f"it cannot say how it reads answers: {error}"
        return "" if found == _PARSER else "its parser of answers is of another version"

    async def reads(self) -> None:
        """Returns when answers may be read here. Raises NotOffered where they may not."""
        self.ask_parser()
        assert self._parser
        parser = self._parser
        await asyncio.wait((parser,))
        if why := self.unread or ("it was ended" if parser.cancelled() else parser.result()):
            raise NotOffered(why, "parsed")

    async def end(self, timeout_s: float) -> None:
        """Has the server end it, with all its requests, and returns when it has, or cannot be told within that time."""
        deadline = self._clock() + timeout_s
        if not self._opened.done():  # an end that overtakes the opening ends nothing
            await asyncio.wait((self._opened,), timeout=timeout_s)
        if not self.over:
            message = encode_subscription(self.name, self._engine, end=True)
            await self._say(message, max(0.0, deadline - self._clock()))
            await asyncio.wait((self.task, *self._senders), timeout=max(0.0, deadline - self._clock()))
        self.cancel(Unavailable("the client was closed"))
        await asyncio.wait((self.task,))

    def cancel(self, error: CharoniaError) -> None:
        """Ends the call, whatever the server makes of it; its streams end with the error."""
        self._lose(error)
        self._call.cancel()
        for task in (self._teller, self._parser):
            if task:
                task.cancel()

    def _lose(self, error: CharoniaError) -> None:
        self.over = True
        if not self._opened.done():
            if not isinstance(error, Unavailable):  # by which calls would fail, too
                error = NotOffered(str(error))
            self._opened.set_result(None)
        self._error = self._error or error
        for stream in list(self._streams.values()):
            stream.lose(_fresh(self._error))

    async def _read(self) -> None:
        lost: CharoniaError = Unavailable(f"Triton at {self.target} ended the subscription")
        try:
            async for answer in self._call:
                if answer.error_message:
                    lost = from_triton(answer.error_message)
                    self._lose(lost)
                else:
                    self._take(answer.infer_response.raw_output_contents[0])
        except grpc.RpcError as error:
            lost = from_rpc(error, self.target)
        except asyncio.CancelledError:
            # By a loop that ends, or because the call was cancelled here; whoever did the latter has set an error.
            lost = ServerError("the call was cancelled")
            raise
        except Exception as error:  # what came is no delivery
            lost = ServerError(f"Triton at {self.target} sent what is no delivery of a subscription: {error}")
            self._call.cancel()
        finally:
            self._lose(lost)

    def _take(self, raw: bytes) -> None:
        """A delivery, as BYTES has it: its length in 4 bytes before it."""
        self._number, found = unpack(raw[4:])
        self.news_at = now = self._clock()
        if not self._opened.done():
            self._opened.set_result(None)
        streams = self._streams
        for key, part in found:
            stream = streams.get(key)
            if stream is None:  # which has ended here
                continue
            stream.news_at = now
            if isinstance(part, str):
                stream.lose(from_triton(part))
            elif isinstance(part, ParsingOptions):
                stream.take_options(part)
            else:
                stream.push(part)
        deliveries, size = self._unread
        self._unread = (deliveries + 1, size + len(raw))
        if self._teller is None and self._behind():
            self._teller = asyncio.get_running_loop().create_task(self._tell())

    def _behind(self) -> bool:
        deliveries, size = self._unread
        return deliveries >= _READ_DELIVERIES or size >= _READ_BYTES

    async def _tell(self) -> None:
        """Says what was read until the server has heard it."""
        try:
            while not self.over and self._behind():
                number, (deliveries, size) = self._number, self._unread
                if await self._say(encode_subscription(self.name, self._engine, read=number), _SAY_TIMEOUT_S):
                    self._unread = (self._unread[0] - deliveries, self._unread[1] - size)
                else:
                    await asyncio.sleep(_SAY_AGAIN_S)
        finally:
            self._teller = None

    async def _say(self, message: Any, timeout_s: float) -> bool:
        """Whether the server heard it: one that ends does not, and need not."""
        try:
            async for answer in self.call(message, timeout=timeout_s):
                if answer.error_message:
                    return False
        except Exception:  # gRPC's, or an answer that cannot be read
            return False
        return True
