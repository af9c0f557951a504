"""What is taken for a Triton that hangs, and what is not."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from collections.abc import Callable, Iterable, Iterator

import pytest
from triton_double import Double

from charonia.serve import hang
from charonia.serve.hang import Progress, Server, Suspicion, Watch

HANG_S = 120
LIMIT_S = 60.0


def metrics(*, waiting: int = 0, done: int = 0, of: str = "postprocessing", running: int | None = 0) -> bytes:
    """As Triton writes them. `running`: requests of the engine; None: it says nothing."""
    lines = [
        f'nv_inference_pending_request_count{{model="{of}",version="1"}} {waiting}',
        f'nv_inference_pending_request_count{{model="engine",version="1"}} {running or 0}',
        f'nv_inference_request_success{{model="{of}",version="1"}} {done}',
        f'nv_inference_request_failure{{model="{of}",reason="OTHER",version="1"}} 0',
        f'nv_inference_exec_count{{model="{of}",version="1"}} {done}',
        'nv_inference_request_success{model="engine",version="1"} 7',
    ]
    if running is not None:
        lines += [f'charonia_num_requests_running{{model="engine"}} {running}']
        lines += ['charonia_num_requests_waiting{model="engine"} 0']
    return "\n".join([*lines, ""]).encode()


STUCK = "requests wait for {}, none ends, and the engine has nothing to do"


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "parsing"])
def test_requests_that_wait_while_none_ends_and_the_engine_is_idle_are_stuck(model: str) -> None:
    progress = Progress()
    assert progress.stuck(metrics(waiting=3, of=model)) == [], "there is nothing yet to compare with"
    assert progress.stuck(metrics(waiting=3, of=model)) == [STUCK.format(model)]
    assert progress.stuck(metrics(waiting=5, of=model)) == [STUCK.format(model)]


@pytest.mark.parametrize(
    "later",
    [
        metrics(waiting=3, done=11),  # one has ended: load
        metrics(waiting=3, done=10, running=1),  # a long prompt, or whatever else the engine does
        metrics(waiting=0, done=10),  # nobody asks
        metrics(waiting=3, done=10, running=None),  # the engine has not been loaded
        metrics(waiting=3, done=10, of="another"),
        b"",
    ],
)
def test_what_waits_for_work_that_is_done_is_not_stuck(later: bytes) -> None:
    progress = Progress()
    progress.stuck(metrics(waiting=3, done=10))
    assert progress.stuck(later) == []


def test_of_several_models_each_has_its_own_engine_and_those_that_are_not_loaded_do_not_count() -> None:
    other = metrics(running=5)  # the first model works
    other += metrics(waiting=3, of="parsing.b").replace(b'"engine"', b'"engine.b"')
    progress = Progress()
    assert progress.stuck(other, ["", "b"]) == []
    assert progress.stuck(other, ["", "b"]) == [STUCK.format("parsing.b")]
    assert progress.stuck(other, [""]) == []


def test_a_suspicion_lasts_for_the_whole_limit_and_for_several_looks() -> None:
    suspicion = Suspicion(LIMIT_S)
    assert [suspicion.look(["a"], now) for now in (0.0, 15.0, 30.0, 59.0, 60.0)] == ["", "", "", "", "a"]


def test_one_good_look_forgets_what_was_wrong() -> None:
    suspicion = Suspicion(LIMIT_S)
    for now in range(0, 58, 2):
        assert suspicion.look(["a", "b"], now) == ""
    assert suspicion.look(["b"], 58) == ""
    assert suspicion.look(["a", "b"], 60) == "b"


def test_a_machine_that_was_stopped_is_looked_at_several_times() -> None:
    suspicion = Suspicion(LIMIT_S)
    suspicion.look(["a"], 0)
    assert [suspicion.look(["a"], 10_000 + number) for number in range(4)] == ["", "", "", "a"]


class Port(http.server.BaseHTTPRequestHandler):
    """Triton's HTTP and metrics ports in one."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(metrics() if self.path == "/metrics" else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def watching() -> Iterator[Callable[..., Watch]]:
    watches: list[Watch] = []

    def watch(port: str, target: str, limit_s: float = 1.0) -> Watch:
        watches.append(Watch(Server(os.getpid(), port, target, port), limit_s))
        return watches[-1]

    yield watch
    for one in watches:
        one.stop()


async def until(holds: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not holds():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), HANG_S)


async def test_a_server_whose_streams_hang_is_found_whatever_else_it_answers(
    port: str, watching: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[str]] = []

    class Noted(Suspicion):
        def look(self, wrong: Iterable[str], now: float) -> str:
            looks.append(list(wrong))
            return super().look(looks[-1], now)

    monkeypatch.setattr(hang, "Suspicion", Noted)
    monkeypatch.setattr(hang, "_MAX_ANSWER_S", float(HANG_S))
    monkeypatch.setattr(hang, "_MAX_PAUSE_S", 0.05)
    async with Double() as double:
        patient = watching(port, double.target, 4.0 * HANG_S)
        await until(lambda: len(looks) >= 3)
        patient.stop()
        assert looks[:3] == [[], [], []]
        double.streams_hang = True
        # All else answers within its quarter of a second, on a machine of any speed.
        monkeypatch.setattr(hang, "fetch", lambda *_: metrics())
        hasty = watching(port, double.target)
        await until(lambda: bool(hasty.found))
        assert hasty.found == "its gRPC port takes no streams"


async def test_calls_that_are_stuck_are_found(watching: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch) -> None:
    # On a slow machine all of these find something, too.
    monkeypatch.setattr(hang, "fetch", lambda *_: metrics(waiting=2))
    monkeypatch.setattr(hang, "_stream_probe", lambda *_: lambda _: True)
    watch = watching("", "")
    await until(lambda: bool(watch.found))
    assert watch.found == STUCK.format("postprocessing")
