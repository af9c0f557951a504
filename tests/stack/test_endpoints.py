"""Three real servers behind one gateway, under load: one is killed, hangs, ends or is removed, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_metrics
import httpx
import openai
import pytest
from charonia_gateway.endpoints.affinity import rendezvous
from gateway_process import GatewayProcess, gateway
from prometheus_client.parser import text_string_to_metric_families
from stack import HANG_S, SLOW, Stack, answers, free_ports
from tiny_models import write_model

pytestmark = pytest.mark.slow

USER: list[Any] = [{"role": "user", "content": "Hello"}]
WORKERS = 6  # half of them read streams
TOKENS = 24
LONG_TOKENS = 300  # of an answer that is still under way when something happens to its server
ENDLESS = 4000


@dataclass
class Servers:
    """Three servers of the same model and the file that names them to the gateway."""

    stacks: list[Stack]
    file: Path

    def name(self, *stacks: Stack) -> None:
        """Writes the file in one go, as the gateway may read it at any time."""
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{stack.grpc}\n" for stack in stacks or self.stacks))
        new.replace(self.file)

    def session_of(self, assigned: Stack, name: str) -> str:
        """A session id that is new to the gateway and begins on that server."""
        targets = [stack.grpc for stack in self.stacks]
        return next(id for at in range(10_000) if rendezvous(id := f"{name}-{at}", targets) == assigned.grpc)

    def start_again(self) -> None:
        """Starts those that a failed test has left killed, stopped or ending."""
        away = [stack for stack in self.stacks if not answers(f"{stack.gateway}/health/ready")]
        for stack in away:
            stack.stop()
            stack.launch()
        for stack in away:
            stack.until_ready()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("three")
    model = folder / "model"
    # It never ends by itself, and its tokens take long enough for things to happen between them.
    write_model(model, "byte_level", "babbler", positions=4096, ends=False)
    # A server that is asked to shut down does not wait long for the stream that does not.
    env = {**SLOW, "CHARONIA_DRAIN_TIMEOUT_S": "5"}
    stacks = [Stack(model, folder / name, env) for name in ("one", "two", "three")]
    with ExitStack() as stack:
        for server in stacks:
            stack.callback(server.stop)
            server.launch()
        for server in stacks:
            server.until_ready()
        yield Servers(stacks, folder / "servers")
        for server in stacks:  # all at once, and then one after the other waited for
            server.signal(signal.SIGTERM)


@pytest.fixture
def behind(request: pytest.FixtureRequest, three: Servers, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that knows all three, with what else a test sets. A server that is only slow is not taken for one that
    hangs."""
    more = getattr(request, "param", {})
    with before(three, tmp_path, CHARONIA_ENDPOINT_CHECK_TIMEOUT_S=str(HANG_S), **more) as own:
        yield own


@contextmanager
def before(three: Servers, folder: Path, **env: str) -> Iterator[GatewayProcess]:
    """A gateway before all three, which run."""
    three.start_again()
    three.name()
    listed = f"file://{three.file}"
    with gateway("127.0.0.1:1", folder / "gateway.log", CHARONIA_TRITON_ENDPOINTS=listed, **env) as own:
        yield own


@dataclass
class Outcome:
    streamed: bool
    begun: bool = False  # the client had some of its text
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Load:
    """Clients that ask one thing after another, streams and whole answers, until they are stopped."""

    gateway: GatewayProcess
    outcomes: list[Outcome] = field(default_factory=list)
    _stopped: bool = False

    def __post_init__(self) -> None:
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.gateway.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(timeout=HANG_S, trust_env=False),
        )

    async def ask(self, outcome: Outcome, tokens: int = TOKENS, **more: Any) -> Outcome:
        asked: dict[str, Any] = {
            "model": "model",
            "messages": USER,
            "max_tokens": tokens,
            "extra_body": {"ignore_eos": True, **more},
        }
        try:
            if outcome.streamed:
                async for chunk in await self.client.chat.completions.create(stream=True, **asked):
                    outcome.begun = True
                    outcome.finish_reason = chunk.choices[0].finish_reason
            else:
                answer = await self.client.chat.completions.create(**asked)
                outcome.finish_reason = answer.choices[0].finish_reason
        except openai.APIError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        self.outcomes.append(outcome)
        return outcome

    def begin(self, outcome: Outcome, tokens: int, session_id: str) -> asyncio.Task[Outcome]:
        return asyncio.create_task(self.ask(outcome, tokens, session_id=session_id))

    async def work(self, streamed: bool) -> None:
        while not self._stopped:
            await asyncio.wait_for(self.ask(Outcome(streamed)), HANG_S)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        async with self.client:
            workers = [asyncio.create_task(self.work(bool(at % 2))) for at in range(WORKERS)]
            try:
                yield self
                self._stopped = True
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def at(
        self, servers: Servers, assigned: Stack, name: str
    ) -> tuple[asyncio.Task[Outcome], asyncio.Task[Outcome]]:
        """A whole answer and a stream that are at that server: the one is waited for there, the other has begun."""
        chosen = await session_choices(self.gateway)
        waits, reads = Outcome(False), Outcome(True)
        tasks = (
            self.begin(waits, LONG_TOKENS, servers.session_of(assigned, f"{name} waits")),
            self.begin(reads, ENDLESS, servers.session_of(assigned, f"{name} reads")),
        )
        await until(lambda: reads.begun, "a stream has begun")
        while await session_choices(self.gateway) < chosen + 2:
            await asyncio.sleep(0.02)
        return tasks

    async def at_stopped(
        self, servers: Servers, assigned: Stack, name: str
    ) -> tuple[asyncio.Task[Outcome], asyncio.Task[Outcome]]:
        """Stops that server's process, and returns a whole answer and a stream that are at it. The stream had begun.
        The whole answer is asked for when the server does nothing any more, so that it must move to be answered."""
        reads = Outcome(True)
        streams = self.begin(reads, ENDLESS, servers.session_of(assigned, f"{name} reads"))
        await until(lambda: reads.begun, "a stream has begun")
        chosen = await session_choices(self.gateway)
        os.kill(assigned.pid_of("tritonserver"), signal.SIGSTOP)
        waits = self.begin(Outcome(False), LONG_TOKENS, servers.session_of(assigned, f"{name} waits"))
        while (now := await metrics(self.gateway))["endpoint_choices_total", "session"] == chosen:
            await asyncio.sleep(0.02)
        # A session begins on its assigned server unless that is down, and what is stopped does not come up again.
        assert now["endpoint_up", assigned.grpc] == 1, "the gateway had marked the server as down before"
        return waits, streams

    async def answered(self, count: int) -> None:
        """Returns when so many more requests have ended."""
        goal = len(self.outcomes) + count
        await until(lambda: len(self.outcomes) >= goal, f"{count} more answers")

    def check(self, *, streams_may_break: bool) -> None:
        """Nothing failed but, where a server was lost, streams that had begun on it."""
        assert any(outcome.streamed for outcome in self.outcomes) and not all(o.streamed for o in self.outcomes)
        for outcome in self.outcomes:
            if outcome.error is None:
                assert outcome.finish_reason == "length"
            else:
                assert streams_may_break and outcome.streamed and outcome.begun, outcome


async def until(holds: Any, what: str, limit_s: float = HANG_S) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.02)

    try:
        await asyncio.wait_for(wait(), limit_s)
    except asyncio.TimeoutError:
        raise AssertionError(f"after {limit_s:g} s still not: {what}") from None


async def metrics(own: GatewayProcess) -> dict[tuple[str, str], float]:
    """The gateway's metrics of endpoints and of requests to them, by name and label."""
    async with httpx.AsyncClient(verify=False, trust_env=False, timeout=HANG_S) as http:
        text = (await http.get(f"{own.url}/metrics")).raise_for_status().text
    return {
        (sample.name.removeprefix("charonia_gateway_"), "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if any(word in sample.name for word in ("endpoint", "retries", "triton_requests"))
    }


async def session_choices(own: GatewayProcess) -> float:
    """How often a session decided which server is chosen."""
    return (await metrics(own))["endpoint_choices_total", "session"]


async def until_up(own: GatewayProcess, *stacks: Stack) -> None:
    """Returns when the gateway thinks that exactly these can take requests."""

    async def wait() -> None:
        while True:
            found = {label for (name, label), value in (await metrics(own)).items() if name == "endpoint_up" and value}
            if found == {stack.grpc for stack in stacks}:
                return
            await asyncio.sleep(0.05)

    await asyncio.wait_for(wait(), HANG_S)


async def until_gone(own: GatewayProcess, stack: Stack) -> None:
    """Returns when the gateway has nothing more at that server and has closed its connection."""

    async def wait() -> None:
        while ("endpoint_up", stack.grpc) in await metrics(own):
            await asyncio.sleep(0.05)

    await asyncio.wait_for(wait(), HANG_S)


async def until_served(stack: Stack) -> None:
    """Returns when that server has made tokens since the call."""
    before = (await engine_metrics.read(stack.metrics)).generated_tokens
    await engine_metrics.until(stack.metrics, lambda now: now.generated_tokens > before, "it serves again")


async def interactive(own: GatewayProcess, session_id: str, text: str, *, status: int = 200) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=own.url, verify=False, trust_env=False, timeout=HANG_S) as http:
        body = {"prompt": text, "session_id": session_id, "interactive_mode": True, "request_output_len": 8}
        answer = await http.post("/v1/chat/interactive", json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_load_is_spread_and_sessions_and_prefixes_stay(three: Servers, behind: GatewayProcess) -> None:
    await until_up(behind, *three.stacks)
    before = [(await engine_metrics.read(stack.metrics)).generated_tokens for stack in three.stacks]
    async with Load(behind).running() as load:
        await load.answered(4 * WORKERS)
    load.check(streams_may_break=False)
    for stack, tokens in zip(three.stacks, before, strict=True):
        assert (await engine_metrics.read(stack.metrics)).generated_tokens - tokens >= 2 * TOKENS
    for stack in three.stacks:
        session_id = three.session_of(stack, "stays")
        alone = (await engine_metrics.idle(stack.metrics)).generated_tokens
        first = await interactive(behind, session_id, "Hello")
        second = await interactive(behind, session_id, "Hello again")
        assert (first["history_tokens"], second["history_tokens"] > 0) == (0, True)
        assert (await engine_metrics.idle(stack.metrics)).generated_tokens - alone == 16
    # The second question about a long text has its blocks.
    text = "The conch is a large sea snail. " * 60
    async with httpx.AsyncClient(base_url=behind.url, verify=False, trust_env=False, timeout=HANG_S) as http:
        cached = []
        for question in ("What is it?", "How large is it?", "Where does it live?"):
            body = {"model": "model", "messages": [{"role": "user", "content": text + question}], "max_tokens": 1}
            usage = (await http.post("/v1/chat/completions", json=body)).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert cached[0] < 0.5 and min(cached[1:]) > 0.5
    counted = await metrics(behind)
    assert counted["endpoint_choices_total", "prefix"] >= 2
    assert counted["endpoint_choices_total", "session"] == 6
    assert counted["endpoint_choices_total", "load"] >= 4 * WORKERS
    assert counted["retries_total", ""] == 0
    assert {value for (name, _), value in counted.items() if name == "endpoint_outstanding_tokens"} == {0}


@pytest.mark.parametrize(
    ("behind", "way"),
    [({"CHARONIA_GATEWAY_SUBSCRIBE": "false"}, "call"), ({}, "subscription")],
    ids=["calls", "subscribed"],
    indirect=["behind"],
)
async def test_a_killed_server_takes_with_it_only_streams_that_had_begun(
    three: Servers, behind: GatewayProcess, way: str
) -> None:
    one, *others = three.stacks
    await until_up(behind, *three.stacks)
    session_id = three.session_of(one, f"killed {way}")
    assert (await interactive(behind, session_id, "Hello"))["history_tokens"] == 0
    assert (await interactive(behind, session_id, "Hello"))["history_tokens"] > 0
    async with Load(behind).running() as load:
        await load.answered(WORKERS)
        waits, reads = await load.at_stopped(three, one, f"killed {way}")
        os.kill(one.pid_of("tritonserver"), signal.SIGKILL)
        assert (await asyncio.wait_for(waits, HANG_S)).error is None
        assert (await asyncio.wait_for(reads, HANG_S)).error is not None
        await until_up(behind, *others)
        await load.answered(2 * WORKERS)
        # The history went with the server: this is said, and the conversation begins anew.
        lost = await interactive(behind, session_id, "Hello", status=410)
        assert lost["error"]["code"] == "session_lost"
        assert (await interactive(behind, session_id, "Hello"))["history_tokens"] == 0
        assert (await interactive(behind, session_id, "Hello"))["history_tokens"] > 0
        await asyncio.to_thread(one.stop)
        await asyncio.to_thread(one.start)
        await until_up(behind, *three.stacks)
        await until_served(one)
        assert (await interactive(behind, session_id, "Hello"))["history_tokens"] > 0
    load.check(streams_may_break=True)
    counted = await metrics(behind)
    assert counted["retries_total", ""] >= 1
    assert {label for (name, label), count in counted.items() if name == "triton_requests_total" and count} == {way}


async def test_a_server_that_hangs_is_left_and_taken_back(three: Servers, tmp_path: Path) -> None:
    one, *others = three.stacks
    # After three checks without an answer the gateway knows that a server hangs.
    with before(three, tmp_path, CHARONIA_ENDPOINT_CHECK_TIMEOUT_S="3") as own:
        await until_up(own, *three.stacks)
        async with Load(own).running() as load:
            await load.answered(WORKERS)
            try:
                waits, reads = await load.at_stopped(three, one, "hung")
                await until_up(own, *others)
                await load.answered(WORKERS)
                # A stream that had begun there ends with an error, and what waited has been moved.
                assert "did not answer for" in str((await asyncio.wait_for(reads, HANG_S)).error)
                assert (await asyncio.wait_for(waits, HANG_S)).error is None
            finally:
                os.kill(one.pid_of("tritonserver"), signal.SIGCONT)
            await until_up(own, *three.stacks)
            await until_served(one)
        load.check(streams_may_break=True)
        assert (await metrics(own))["retries_total", ""] >= 1
        # It has been told to stop what was taken from it.
        await engine_metrics.idle(one.metrics)


async def test_a_server_is_removed_and_returned_without_any_failure(three: Servers, behind: GatewayProcess) -> None:
    one, *others = three.stacks
    await until_up(behind, *three.stacks)
    async with Load(behind).running() as load:
        await load.answered(WORKERS)
        read = Outcome(True)
        reads = asyncio.create_task(load.ask(read, LONG_TOKENS, session_id=three.session_of(one, "removed")))
        await until(lambda: read.begun, "a stream has begun")
        three.name(*others)
        await until_gone(behind, one)
        assert (await reads).finish_reason == "length"
        await engine_metrics.idle(one.metrics)
        one.signal(signal.SIGTERM)
        assert await asyncio.to_thread(one.wait) == 0
        await load.answered(WORKERS)
        await asyncio.to_thread(one.start)
        three.name()
        await until_up(behind, *three.stacks)
        await until_served(one)
    load.check(streams_may_break=False)
    assert (await metrics(behind))["retries_total", ""] == 0


# The last of these tests: it leaves a server that has ended, which one after it would have to start again.
async def test_a_server_that_ends_takes_no_whole_answer_with_it(three: Servers, behind: GatewayProcess) -> None:
    one, *others = three.stacks
    await until_up(behind, *three.stacks)
    async with Load(behind).running() as load:
        await load.answered(WORKERS)
        waits, reads = await load.at(three, one, "ended")
        os.kill(one.pid_of("tritonserver"), signal.SIGTERM)
        await until_up(behind, *others)
        assert (await asyncio.wait_for(waits, HANG_S)).error is None
        await load.answered(WORKERS)
        # Triton may hold the stream open. After 40 s the client library ends it, for which it has a test of its own.
        for pid in one.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(reads, HANG_S)
    load.check(streams_may_break=True)


async def test_without_a_server_the_gateway_says_when_to_come_again(tmp_path: Path) -> None:
    nowhere = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    with gateway("127.0.0.1:1", tmp_path / "gateway.log", CHARONIA_TRITON_ENDPOINTS=nowhere) as own:
        async with httpx.AsyncClient(base_url=own.url, verify=False, trust_env=False, timeout=HANG_S) as http:
            ready = await http.get("/health/ready")
            assert ready.status_code == 503 and all(target in ready.text for target in nowhere.split(","))
            for path in ("/v1/chat/completions", "/v1/chat/interactive"):
                answer = await http.post(path, json={"model": "model", "messages": USER, "prompt": "Hello"})
                assert answer.status_code == 503 and int(answer.headers["Retry-After"]) >= 1, answer.text
                assert "no server can take requests" in answer.json()["error"]["message"]
