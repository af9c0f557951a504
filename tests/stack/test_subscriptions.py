"""Subscriptions of the model `engine` in the real server: one stream for the responses of many requests.

The tests read them with Triton's messages and delivery.proto, without the rest of the client library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc.aio as triton
import waiting
from charonia_client import Client, GenerateRequest
from charonia_client.delivery import Delivery
from engine_metrics import idle, until
from stack import ENDLESS, HANG_S, SLOW, Stack, running
from triton_stream import collect, make_inputs
from tritonclient.grpc import service_pb2 as pb

EXAMPLE = Path(__file__).resolve().parents[2] / "client" / "examples" / "subscription.py"
CITIES = ("Paris", "Rome", "Madrid", "Tokyo")  # the requested number
LOG_PROBABILITIES = ("output_ids", "output_log_probs", "top_log_prob_ids", "top_log_probs", "prompt_ids")
LOG_PROBABILITIES += ("prompt_log_probs", "prompt_top_log_prob_ids")
REASONS = ("", "stop", "length", "cancelled", "error")


@dataclass
class Answer:
    """The received chunks of one sequence of one request."""

    chunks: list[Any] = field(default_factory=list)

    def values(self, name: str) -> list[Any]:
        """The values of a repeated field over all chunks."""
        return [value for chunk in self.chunks for value in getattr(chunk, name)]

    @property
    def text(self) -> bytes:
        return b"".join(self.values("text_output"))

    @property
    def ids(self) -> list[int]:
        return self.values("output_ids")

    @property
    def reason(self) -> str:
        return REASONS[self.chunks[-1].finish_reason] if self.chunks else ""


class Reader:
    """A subscription. `answers` has the received chunks by key and sequence; `error` is the error that ended the
    subscription."""

    def __init__(self, channel: grpc.aio.Channel, *, acknowledges: bool = True) -> None:
        self.name = str(uuid.uuid4())
        self.answers: dict[tuple[int, int], Answer] = {}
        self.errors: dict[int, str] = {}  # by key
        self.number = 0  # number of the last delivery
        self.error = ""
        self.over = False
        self._acknowledges = acknowledges
        self._news = asyncio.Condition()
        self._infer = channel.unary_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._infer(self.message("engine", outputs=["deliveries"])):
            if message.error_message:
                self.error = message.error_message
                continue
            (packed,) = message.infer_response.raw_output_contents
            self._take(packed[4:])
            async with self._news:
                self._news.notify_all()
            if self._acknowledges and self.number % 16 == 0:
                await self.ask("engine", subscription_read=self.number)  # rejected by a server that shuts down
        self.over = True
        async with self._news:
            self._news.notify_all()

    def _take(self, packed: bytes) -> None:
        delivery = Delivery.FromString(packed)
        assert delivery.number == self.number + 1
        self.number = delivery.number
        for chunk in delivery.chunks:
            key, text = chunk.subscription_key, b"".join(chunk.text_output)
            if REASONS[chunk.finish_reason] == "error":
                self.errors[key] = text.decode()
                continue
            answer = self.answers.setdefault((key, chunk.sequence_index), Answer())
            assert not answer.reason, "a chunk came after the last one"
            assert 0 <= chunk.text_begin <= chunk.text_end
            assert len(chunk.token_bytes) == len(chunk.output_ids)
            answer.chunks.append(chunk)

    def message(self, model: str, *, id: str = "", outputs: list[str] | None = None, **fields: Any) -> Any:
        message = pb.ModelInferRequest(model_name=model, id=id)
        for tensor in make_inputs({"subscription": self.name, **fields}):
            message.inputs.append(tensor._get_tensor())
            message.raw_input_contents.append(tensor._get_content())
        for name in outputs or ():
            message.outputs.add(name=name)
        return message

    async def ask(self, model: str = "ensemble", **fields: Any) -> str:
        """Send a request that names the subscription. Returns the error of the call, or ""."""
        error = ""
        async for message in self._infer(self.message(model, **fields)):
            assert message.error_message, "an answer came on the call"
            error = message.error_message
        return error

    async def acknowledge(self) -> None:
        assert not await self.ask("engine", subscription_read=self.number)

    async def end(self) -> None:
        assert not await self.ask("engine", subscription_end=True)
        await self.until(lambda: self.over)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(holds), HANG_S)

    async def until_open(self) -> None:
        await self.until(lambda: self.number > 0)

    async def until_ended(self, key: int, sequences: int = 1) -> list[Answer]:
        def ended() -> bool:
            found = [self.answers.get((key, index)) for index in range(sequences)]
            return key in self.errors or all(answer is not None and answer.reason for answer in found)

        await self.until(ended)
        return [self.answers[key, index] for index in range(sequences)] if key not in self.errors else []


@pytest.fixture
async def reader(stack: Stack) -> AsyncIterator[Reader]:
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        made = Reader(channel)
        await made.until_open()
        yield made
        await made.end()
        assert not made.error


@contextlib.asynccontextmanager
async def slow_reader(stack: Stack, **options: Any) -> AsyncIterator[Reader]:
    """A subscription of a server that may shut down meanwhile."""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        made = Reader(channel, **options)
        await made.until_open()
        yield made


async def test_subscription_equals_calls(stack: Stack, reader: Reader) -> None:
    chat = json.dumps([{"role": "user", "content": "Name five colours, and greet me in Russian and Japanese: 色 🎨"}])
    asked: list[dict[str, Any]] = [
        {"messages": chat, "temperature": 1.0, "seed": seed, "max_tokens": 60, "stream": seed % 3 != 2}
        for seed in range(12)
    ]
    more = {"temperature": 0.0, "stream": True}
    asked.append({"text_input": "One two", "exclude_input_in_output": False, "max_tokens": 8, **more})
    asked.append({"messages": chat, "max_tokens": 40, "stop_words": ["e", " a"], **more})
    assert not any(await asyncio.gather(*(reader.ask(**one, subscription_key=key) for key, one in enumerate(asked))))
    async with triton.InferenceServerClient(stack.grpc) as client:
        for key, one in enumerate(asked):
            whole = await collect(client, one)
            (answer,) = await reader.until_ended(key)
            assert answer.text == b"".join(part.text for part in whole)
            assert answer.ids == [id for part in whole for id in part.ids]
            assert answer.reason == whole[-1].finish_reason
            assert answer.chunks[-1].num_output_tokens == whole[-1].tensors["num_output_tokens"][0]
            assert one["stream"] or len(answer.chunks) == 1


@pytest.mark.parametrize("tops", [0, 1, 20])
async def test_subscription_log_probabilities_equal_calls(stack: Stack, reader: Reader, tops: int) -> None:
    chat = json.dumps([{"role": "user", "content": "Name five colours, and greet me in Russian and Japanese: 色 🎨"}])
    more = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "return_log_probs": True, "top_logprobs": tops}
    asked: list[dict[str, Any]] = [
        {"messages": chat, **more, "stream": True, "num_return_sequences": 2},
        {"messages": chat, **more, "stop_words": ["e", " a"], "stream": True},
        {"text_input": "One two", **more, "num_return_sequences": 2, "best_of": 3},
    ]
    asked.append({"text_input": "One two three", **more, "prompt_logprobs": tops})
    assert not any(await asyncio.gather(*(reader.ask(**one, subscription_key=key) for key, one in enumerate(asked))))
    async with triton.InferenceServerClient(stack.grpc) as client:
        for key, one in enumerate(asked):
            whole = await collect(client, one)
            answers = await reader.until_ended(key, one.get("num_return_sequences", 1))
            for index, answer in enumerate(answers):
                parts = [part.tensors for part in whole if part.tensors["sequence_index"][0] == index]

                for name in LOG_PROBABILITIES:
                    assert answer.values(name) == [value for part in parts for value in part[name].tolist()], name
                assert len(answer.values("output_log_probs")) == len(answer.ids)
                assert len(answer.values("top_log_probs")) == tops * len(answer.ids)
    assert len(answer.values("prompt_ids")) == len(answer.values("prompt_log_probs")) + 1 > 1


def test_client_library_example_runs(stack: Stack) -> None:
    done = subprocess.run([sys.executable, EXAMPLE, stack.grpc], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(city in line for city, line in zip(CITIES, lines, strict=True)), lines


async def test_chunks_have_token_bytes(stack: Stack, reader: Reader) -> None:
    chat = json.dumps([{"role": "user", "content": "Name five colours, and greet me in Russian and Japanese: 色 🎨"}])
    more = {"stream": True, "num_return_sequences": 2, "seed": 1, "temperature": 1.0, "max_tokens": 60}
    assert not await reader.ask(messages=chat, **more, subscription_key=1)
    for answer in await reader.until_ended(1, sequences=2):
        # The text of a chat has no leading space, and there is no stop word: only the last bytes may be outside of the
        # text.
        spelled = b"".join(answer.values("token_bytes")).decode(errors="replace").encode()
        assert spelled.startswith(answer.text) and not any(chunk.in_reasoning for chunk in answer.chunks)


async def test_request_errors_are_in_call_or_subscription(reader: Reader) -> None:
    text = {"text_input": "a", "stream": True}
    assert "[400]" in await reader.ask(text_input="a", temperature=-1.0)
    assert "[400]" in await reader.ask(messages="[[")
    assert "subscription_read is 99" in await reader.ask("engine", subscription_read=99)
    assert not await reader.ask(
        **text, guided_decoding_guide_type="regex", guided_decoding_guide="(", subscription_key=8
    ), "the guide is compiled later"
    await reader.until_ended(8)
    assert reader.errors[8].startswith("[400] ")
    assert not await reader.ask(**text, max_tokens=3, subscription_key=9)
    await reader.until_ended(9)
    assert reader.answers[9, 0].reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"subscription": "x" * 257}, "subscription has 257 bytes and must have at most 256"),
        ({"subscription": "a\nb"}, "[400] subscription has bytes that are no UTF-8, or control characters"),
        ({"subscription": "", "input_ids": [5], "session_id": "a\0b"}, "[400] session_id has bytes that are no UTF-8"),
        ({"subscription": "nobody's", "input_ids": [5]}, "[503] there is no subscription 'nobody's'"),
        ({"subscription": "", "subscription_key": 1, "input_ids": [5]}, "subscription_key is sent without"),
        ({"subscription": "", "subscription_end": True}, "subscription_end is sent without subscription"),
        ({"subscription": "a", "subscription_end": True, "input_ids": [5]}, "requests of their own"),
    ],
)
async def test_wrong_subscription_field_is_named(reader: Reader, fields: dict[str, Any], named: str) -> None:
    assert named in await reader.ask("engine", **fields)


async def test_subscription_names_are_unique(reader: Reader) -> None:
    assert "is open already" in await reader.ask("engine")


async def test_subscription_keys_are_unique(slow: Stack) -> None:
    async with slow_reader(slow) as reader, slow_reader(slow) as other:
        assert not await reader.ask(text_input="a", max_tokens=ENDLESS, stream=True, subscription_key=7)
        said = await reader.ask(text_input="a", max_tokens=3, stream=True, subscription_key=7)
        assert "[400] subscription_key is 7, and a request of subscription" in said
        assert not await other.ask(text_input="a", max_tokens=3, stream=True, subscription_key=7)
        for _ in range(2):
            assert not await reader.ask(text_input="a", max_tokens=3, stream=True, subscription_key=8)
            await reader.until_ended(8)
            del reader.answers[8, 0]
        await reader.end()
        await other.end()


async def test_request_that_was_cancelled_before_it_arrived_is_rejected(slow: Stack) -> None:
    before = await idle(slow.metrics)
    async with slow_reader(slow) as reader:
        await reader.until_open()
        cancel = reader.message("engine", id="early", cancel=True, subscription_key=1)
        assert [one.error_message async for one in reader._infer(cancel)] == [""]
        asked = {"id": "early", "text_input": "x", "max_tokens": ENDLESS, "ignore_eos": True, "subscription_key": 1}
        assert "[400] the request was cancelled before it arrived" in await reader.ask(**asked)
        assert not await reader.ask(**{**asked, "max_tokens": 1})  # the key is free again
        await reader.until_ended(1)
    after = await idle(slow.metrics)
    assert after.generated_tokens - before.generated_tokens == 1


async def test_ending_subscription_cancels_only_its_requests(slow: Stack) -> None:
    async with slow_reader(slow) as reader, slow_reader(slow) as other:
        for key in range(8):
            assert not await reader.ask(text_input="a", max_tokens=ENDLESS, stream=True, subscription_key=key)
        assert not await other.ask(text_input="a", max_tokens=200, stream=True)
        await reader.until(lambda: len(reader.answers) == 8)
        await reader.end()
        assert not any(answer.reason for answer in reader.answers.values())
        (answer,) = await other.until_ended(0)
        assert (answer.reason, len(answer.ids)) == ("length", 200)
        await idle(slow.metrics)
        assert "[503] there is no subscription" in await reader.ask(text_input="a")
        await other.end()


async def test_unacknowledged_deliveries_are_bounded_and_joined(slow: Stack) -> None:
    async with slow_reader(slow, acknowledges=False) as reader, slow_reader(slow) as other:
        asked: dict[str, Any] = {"text_input": "a", "max_tokens": 1, "seed": 1, "stream": True}
        key = 0
        while reader.number < 256:  # each response takes one delivery or more
            assert not await reader.ask(**asked, subscription_key=key)
            await reader.until(lambda key=key: (key, 0) in reader.answers or reader.number == 256)
            key += 1
        late = range(key, key + 3)
        for key in late:
            assert not await reader.ask(**asked, subscription_key=key)
        assert not await other.ask(**asked)
        await other.until_ended(0)
        await idle(slow.metrics)
        assert not any((key, 0) in reader.answers for key in late)
        await reader.acknowledge()
        for key in late:
            (answer,) = await reader.until_ended(key)
            assert (answer.reason, answer.ids) == ("length", other.answers[0, 0].ids)
        assert reader.number == 257
        await reader.end()
        await other.end()


async def test_draining_server_ends_subscriptions_after_requests(slow_model: Path, tmp_path: Path) -> None:
    with running(Stack(slow_model, tmp_path, {**SLOW, "CHARONIA_DRAIN_TIMEOUT_S": str(HANG_S)})) as served:
        async with slow_reader(served) as idle, slow_reader(served) as busy:
            assert not await busy.ask(text_input="a", max_tokens=100, stream=True)
            await busy.until(lambda: len(busy.answers) == 1)
            served.signal(signal.SIGTERM)
            await idle.until(lambda: idle.over)
            await busy.until(lambda: busy.over)
        assert idle.error == busy.error == "[503] the server is shutting down"
        assert busy.answers[0, 0].reason == "length"
        assert served.wait() == 0


class Orders:
    """Loads and unloads the models of a stack's Triton, through the pipe of `charonia serve`. The orders of `charonia
    models` never unload the last model and never reload a model."""

    def __init__(self, stack: Stack) -> None:
        self._log = next(stack.run_dir.glob("port-*/triton.log"))
        (self._engine,) = stack.run_dir.glob("port-*/**/engine/config.pbtxt")
        triton = Path(f"/proc/{stack.pid_of('tritonserver')}")
        entries = (triton / "environ").read_bytes().decode().split("\0")
        (descriptor,) = (entry.partition("=")[2] for entry in entries if entry.startswith("CHARONIA_CONTROL_FD="))
        self._pipe = triton / "fd" / descriptor

    def order(self, text: str) -> None:
        self._pipe.write_text(text)

    def load_anew(self) -> None:
        """Reload the engine. Triton serves the old engine until the new one is loaded."""
        (self._engine.parent / "1" / "new").write_text(str(time.monotonic_ns()))
        self.order("+engine\n")

    def count(self, what: str, model: str = "engine") -> int:
        """The number of times that a model was 'loaded' or 'unloaded'."""
        return self._log.read_text().count(f"successfully {what} '{model}'")

    async def until(self, what: str, count: int, model: str = "engine") -> None:
        await waiting.until(lambda: self.count(what, model) >= count, lambda: self._log.read_text()[-4000:])


@pytest.fixture(scope="module")
def reloading(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose engine is reloaded, separate from the stacks of other tests."""
    folder = tmp_path_factory.mktemp("reloading")
    with running(Stack(slow_model, folder, SLOW)) as served:
        yield served


async def test_too_many_subscriptions_are_rejected(reloading: Stack) -> None:
    async with grpc.aio.insecure_channel(reloading.grpc) as channel:
        readers = [Reader(channel) for _ in range(1023)]  # The gateway has one too.
        for reader in readers:
            await reader.until_open()
        more = Reader(channel)
        await more.until(lambda: more.over)
        assert more.error.startswith("[429] there are 1024 subscriptions")
        await readers[0].end()
        await until(reloading.metrics, lambda now: now.subscriptions == 1023, "1023 subscriptions")
        again = Reader(channel)
        await again.until_open()
        for reader in (again, *readers[1:]):
            await reader.end()
    await until(reloading.metrics, lambda now: now.subscriptions == 1, "only the gateway's subscription")


async def test_client_loses_no_request_when_model_is_reloaded(reloading: Stack) -> None:
    orders = Orders(reloading)
    unloaded = orders.count("unloaded")
    done = 0

    async def ask(client: Client) -> None:
        nonlocal done
        while orders.count("unloaded") == unloaded:
            await client.complete(GenerateRequest(text="a", max_tokens=30, stream=False))
            done += 1

    async with Client(reloading.grpc) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(4)]
        while done < 8:
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.02)
        orders.load_anew()
        await asyncio.gather(*asking)
    assert done >= 8 + 4


async def test_running_response_ends_normally_when_model_is_reloaded(reloading: Stack) -> None:
    """Also for a reader that can no longer acknowledge: the new model does not know its subscription."""
    orders = Orders(reloading)
    loaded, unloaded = orders.count("loaded"), orders.count("unloaded")
    async with slow_reader(reloading, acknowledges=False) as reader:
        assert not await reader.ask(text_input="a", max_tokens=500, seed=1, stream=True)
        await reader.until(lambda: (0, 0) in reader.answers)
        orders.load_anew()
        await orders.until("loaded", loaded + 1)
        assert "[503] there is no subscription" in await reader.ask(text_input="a", subscription_key=1)
        await reader.until(lambda: reader.over)
        assert reader.error == "[503] model 'engine' was loaded again"
        answer = reader.answers[0, 0]
        assert (answer.reason, len(answer.ids)) == ("length", 500)
        await orders.until("unloaded", unloaded + 1)
