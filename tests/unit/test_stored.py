"""The store of answers, of one process and of several workers: bounded in number, bytes and age."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from charonia_gateway import shared
from charonia_gateway.app import responses_of
from charonia_gateway.settings import Settings
from charonia_gateway.shared import Shared
from charonia_gateway.stored import ResponseStore, SharedResponseStore, Stored

Make = Callable[..., ResponseStore]


@pytest.fixture(params=["process", "workers"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a store of the kind."""
    if request.param == "process":
        return ResponseStore
    shared.create(tmp_path)

    def of_workers(*limits: Any, **options: Any) -> ResponseStore:
        return Alternating(*(SharedResponseStore(*limits, **options, shared=Shared(tmp_path, at)) for at in (1, 2)))

    return of_workers


class Alternating(ResponseStore):
    """Stores of several workers, each called in turn: they have to behave as one."""

    def __init__(self, *stores: ResponseStore) -> None:
        self._stores: Iterator[ResponseStore] = itertools.cycle(stores)

    def __len__(self) -> int:
        return len(next(self._stores))

    @property
    def bytes(self) -> int:
        return next(self._stores).bytes

    def add(self, entry: Stored) -> bool:
        return next(self._stores).add(entry)

    def get(self, id: str, owner: str | None = None) -> Stored | None:
        return next(self._stores).get(id, owner)

    def remove(self, id: str) -> Stored | None:
        return next(self._stores).remove(id)

    def has_session(self, session_id: str) -> bool:
        return next(self._stores).has_session(session_id)

    def go_on(self, entry: Stored) -> bool:
        return next(self._stores).go_on(entry)

    def went_on(self, entry: Stored, *, stored: bool) -> None:
        next(self._stores).went_on(entry, stored=stored)


def entry(id: str, text: str = "x", session: str = "s") -> Stored:
    return Stored({"id": id}, [{"role": "user", "content": text}], session)


def test_the_oldest_are_forgotten_beyond_the_number(make: Make) -> None:
    store = make(2, 1 << 20, 60)
    assert all(store.add(entry(id)) for id in "abc")
    assert [store.get(id) is not None for id in "abc"] == [False, True, True] and len(store) == 2


def test_the_oldest_are_forgotten_beyond_the_bytes_and_one_that_is_larger_is_not_kept(make: Make) -> None:
    store = make(100, 500, 60)
    assert all(store.add(entry(id, "x" * 150)) for id in "abc")
    assert [store.get(id) is not None for id in "abc"] == [False, True, True]
    assert not store.add(entry("d", "x" * 500)) and store.get("d") is None and len(store) == 2
    sizes = [one.bytes for one in (store.remove("b"), store.remove("c")) if one]
    assert len(sizes) == 2 and sum(sizes) <= 500 and store.bytes == 0


def test_what_cannot_be_written_as_json_is_not_kept(make: Make) -> None:
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"a": deep}
    store = make(2, 1 << 20, 60)
    for message in (deep, {"content": "\ud800"}):
        assert not store.add(Stored({"id": "a"}, [message], "s"))
    assert store.get("a") is None and store.bytes == 0


def test_what_is_old_is_forgotten(make: Make) -> None:
    now = 100.0
    store = make(10, 1 << 20, 60, clock=lambda: now)
    store.add(entry("a"))
    now = 150
    store.add(entry("b"))
    now = 161
    assert store.get("a") is None and store.get("b") is not None
    now = 211
    assert len(store) == 0 and store.bytes == 0


def test_limits_are_those_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHARONIA_GATEWAY_MAX_RESPONSES", "2")
    monkeypatch.setenv("CHARONIA_GATEWAY_RESPONSE_TTL_S", "20")
    now = [100.0]
    shared.create(tmp_path)
    for workers in (None, Shared(tmp_path, 1)):
        store = responses_of(Settings(_env_file=None), workers)
        monkeypatch.setattr(store, "_clock", lambda: now[0])
        assert all(store.add(entry(id)) for id in "abc")
        assert [store.get(id) is not None for id in "abc"] == [False, True, True]
        now[0] += 19
        assert store.get("c") is not None
        now[0] += 2
        assert store.get("c") is None


def test_a_chain_of_answers_is_known_by_its_session(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    store.add(entry("a"))
    store.add(entry("b"))
    assert store.remove("a") and store.has_session("s")
    assert store.remove("b") and not store.has_session("s")
    assert store.remove("b") is None


def test_what_is_kept_is_what_was_given_and_its_owners_alone(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    message = {"role": "user", "content": 'a \u2028 "text" \0', "parts": [1, 2.5, None, True, {}]}
    given = Stored({"id": "a", "output": [message]}, [message], "s", owner="me")
    assert store.add(given)
    found = store.get("a", "me")
    assert found and (found.response, found.conversation, found.session_id) == (given.response, [message], "s")
    assert store.get("a") is None and store.get("a", "you") is None


def test_one_answer_at_a_time_goes_on_with_a_session_and_none_after_one_that_was_stored(make: Make) -> None:
    store = make(10, 1 << 20, 60)
    store.add(entry("a"))
    first, second = store.get("a"), store.get("a")
    assert first and second
    assert store.go_on(first) and not store.go_on(second)
    store.went_on(first, stored=False)
    assert store.go_on(second)
    store.went_on(second, stored=True)
    third = store.get("a")
    assert third and third.continued and not store.go_on(third)


def test_a_worker_that_is_killed_goes_on_with_no_answer(tmp_path: Path) -> None:
    shared.create(tmp_path)
    one, two = (SharedResponseStore(10, 1 << 20, 60, shared=Shared(tmp_path, at)) for at in (1, 2))
    one.add(entry("a"))
    first, second = one.get("a"), two.get("a")
    assert first and second and one.go_on(first) and not two.go_on(second)
    Shared(tmp_path).forget(1)
    assert two.go_on(second)


def test_a_store_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    shared.create(tmp_path)
    state = Shared(tmp_path, 1)
    store = SharedResponseStore(10, 1 << 20, 60, shared=state)
    state.run("PRAGMA max_page_count = 30")  # the disk is full
    assert not store.add(entry("a", "x" * 500_000))
    assert store.get("a") is None and store.add(entry("b"))


def test_an_answer_that_is_too_old_has_no_session(tmp_path: Path) -> None:
    shared.create(tmp_path)
    now = [0.0]
    state = Shared(tmp_path, 1)
    store = SharedResponseStore(10, 1 << 20, 60, lambda: now[0], shared=state)
    store.add(entry("a"))
    before = store.get("a")
    assert before and store.has_session(before.session_id)
    now[0] = 61
    assert not store.has_session(before.session_id) and store.remove("a") is None
    assert state.run("SELECT COUNT(*) FROM responses").fetchone() == (0,), "nor does it stay in the file"


def test_large_answers_take_twice_the_limit_at_most(tmp_path: Path) -> None:
    shared.create(tmp_path)
    store = SharedResponseStore(10, 8 << 20, 60, shared=Shared(tmp_path, 1))
    for id in "abcd":
        assert store.add(entry(id, "x" * (7 << 20)))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < (2 * 8 + 1) << 20
    assert store.get("d") and store.get("c") is None
