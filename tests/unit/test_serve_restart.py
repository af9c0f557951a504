"""What a Triton that is started again finds of the one before it: nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from charonia.serve.errors import ServeError
from charonia.serve.launcher import _Signals, _Stack
from charonia.serve.process import Child
from charonia.settings import ServeSettings

HANG_S = 60
UNLOADED = "I1121 07:33:19.808406 27217 model_lifecycle.cc:642] \"successfully unloaded 'ensemble' version 1\""


class Hurried(_Signals):
    """Waits for no delay."""

    def wait(self, seconds: float) -> bool:
        return False


def left_in_shared_memory(stack: _Stack) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{stack._shared_memory}*"))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Stack]:
    """Its Triton says that the ensemble is unloaded and leaves shared memory; what comes after it is silent. The ones
    that are started again are ready at once."""
    one = _Stack(ServeSettings(max_restarts=2, gateway=False), {}, Console(quiet=True), Hurried())
    monkeypatch.setattr(one, "_until_server_ready", lambda: True)

    def start(code: str) -> Child:
        return Child("Triton", [sys.executable, "-c", code], os.environ, None, one._models.see)

    file = f"/dev/shm/{one._shared_memory}stub"
    one._children = [start(f"print({UNLOADED!r}); open({file!r}, 'w')")]
    one._start_server = lambda: start("import time; time.sleep(600)")
    assert one._children[0].wait(HANG_S)
    yield one
    one._stop()
    one._models.close()
    assert left_in_shared_memory(one) == []


def waits(stack: _Stack) -> bool:
    """Whether an orderly end waits for the ensemble."""
    asked: list[bool] = []

    def hurry() -> bool:
        asked.append(True)
        return True

    stack._models.drain("http://127.0.0.1:9", HANG_S, hurry)
    return bool(asked)


def test_a_server_that_took_anothers_place_is_drained_whatever_that_one_had_unloaded(stack: _Stack) -> None:
    stack._children[0].tail()
    assert not waits(stack)
    assert stack._restart()
    assert waits(stack)


def test_shared_memory_of_a_server_that_died_is_removed(stack: _Stack) -> None:
    assert left_in_shared_memory(stack) != []
    assert stack._restart()
    assert left_in_shared_memory(stack) == []
    Path(f"/dev/shm/{stack._shared_memory}later").touch()  # the fixture's end looks for it


def test_servers_that_hang_are_not_started_again_for_ever(stack: _Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Child] = []
    start: Callable[[], Child] = stack._start_server

    def start_and_count() -> Child:
        started.append(start())
        return started[-1]

    def hang() -> bool:
        raise ServeError("Triton is not ready after 600 s")

    now = 0.0
    stack._restarts._clock = lambda: now
    monkeypatch.setattr(stack, "_start_server", start_and_count)
    assert stack._restart()  # this one is ready, and dies later
    stack._children[0].kill_group()
    monkeypatch.setattr(stack, "_until_server_ready", hang)
    for _ in range(10):
        now += 10_000
        if not stack._restart():
            break
    assert len(started) == 1 + stack._restarts.limit
    assert [child.exit_status() for child in started] == ["was killed by SIGKILL"] * 3
