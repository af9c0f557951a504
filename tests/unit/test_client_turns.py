"""Turns in preprocessing."""

from __future__ import annotations

import asyncio

import pytest
from charonia_client import Overloaded, turns
from charonia_client.turns import Turns


class Queue:
    """One turn at a time. `order` has the names of the owners that had a turn."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._turns = Turns(1)

    async def take(self, owner: str) -> None:
        async with self._turns.turn(owner):
            self.order.append(owner)
            await asyncio.sleep(0)


async def test_owners_take_turns() -> None:
    queue = Queue()
    await asyncio.gather(*(queue.take(owner) for owner in "aaaabbc"))
    assert queue.order == list("aabcaba")


async def test_more_turns_run_when_there_may_be_more() -> None:
    some, inside, leave = Turns(1), 0, asyncio.Event()

    async def take() -> None:
        nonlocal inside
        async with some.turn("a"):
            inside += 1
            await leave.wait()

    tasks = [asyncio.create_task(take()) for _ in range(4)]
    await asyncio.sleep(0)
    assert inside == 1
    some.most = 2
    tasks.append(asyncio.create_task(take()))
    await asyncio.sleep(0)
    assert inside == 2
    leave.set()
    await asyncio.gather(*tasks)
    assert inside == 5


async def test_a_cancelled_task_leaves_the_queue_and_passes_its_turn_on() -> None:
    queue = Queue()
    tasks = [asyncio.create_task(queue.take(owner)) for owner in "abcd"]
    await asyncio.sleep(0)
    tasks[2].cancel()  # it waits
    await asyncio.sleep(0)  # the turn of "b" begins
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.order == ["a", "d"]
    await queue.take("e")


async def test_an_owner_with_too_many_waiting_requests_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_MAX_WAITING", 1)
    queue = Queue()
    done = await asyncio.gather(*(queue.take(owner) for owner in "aaab"), return_exceptions=True)
    assert [type(one) for one in done] == [type(None), type(None), Overloaded, type(None)]
