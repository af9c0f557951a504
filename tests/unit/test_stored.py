"""The store of answers: bounded in number, bytes and age."""

from __future__ import annotations

from charonia_gateway.stored import ResponseStore, Stored


def entry(id: str, text: str = "x", session: str = "s") -> Stored:
    return Stored({"id": id}, [{"role": "user", "content": text}], session)


def test_the_oldest_are_forgotten_beyond_the_number() -> None:
    store = ResponseStore(2, 1 << 20, 60)
    assert all(store.add(entry(id)) for id in "abc")
    assert [store.get(id) is not None for id in "abc"] == [False, True, True] and len(store) == 2


def test_the_oldest_are_forgotten_beyond_the_bytes_and_one_that_is_larger_is_not_kept() -> None:
    store = ResponseStore(100, 500, 60)
    assert all(store.add(entry(id, "x" * 150)) for id in "abc")
    assert [store.get(id) is not None for id in "abc"] == [False, True, True]
    assert not store.add(entry("d", "x" * 500)) and store.get("d") is None and len(store) == 2
    sizes = [one.bytes for one in (store.remove("b"), store.remove("c")) if one]
    assert len(sizes) == 2 and sum(sizes) <= 500 and store.bytes == 0


def test_what_cannot_be_written_as_json_is_not_kept() -> None:
    deep: dict[str, object] = {}
    for _ in range(300):
        deep = {"a": deep}
    store = ResponseStore(2, 1 << 20, 60)
    for message in (deep, {"content": "\ud800"}):
        assert not store.add(Stored({"id": "a"}, [message], "s"))
    assert store.get("a") is None and store.bytes == 0


def test_what_is_old_is_forgotten() -> None:
    now = 100.0
    store = ResponseStore(10, 1 << 20, 60, clock=lambda: now)
    store.add(entry("a"))
    now = 150
    store.add(entry("b"))
    now = 161
    assert store.get("a") is None and store.get("b") is not None
    now = 211
    assert len(store) == 0 and store.bytes == 0


def test_a_chain_of_answers_is_known_by_its_session() -> None:
    store = ResponseStore(10, 1 << 20, 60)
    store.add(entry("a"))
    store.add(entry("b"))
    assert store.remove("a") and store.has_session("s")
    assert store.remove("b") and not store.has_session("s")
    assert store.remove("b") is None
