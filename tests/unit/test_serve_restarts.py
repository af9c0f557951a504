"""When a Triton that died is started again."""

from __future__ import annotations

from charonia.serve.restarts import WINDOW_S, Restarts


def test_delays_double_up_to_a_bound_and_the_limit_holds() -> None:
    restarts = Restarts(8, lambda: 0.0)
    assert [restarts.begin() for _ in range(9)] == [1, 2, 4, 8, 16, 30, 30, 30, None]
    assert restarts.count == 8


def test_restarts_are_forgotten_after_a_while() -> None:
    now = 0.0
    restarts = Restarts(2, lambda: now)
    assert [restarts.begin(), restarts.begin(), restarts.begin()] == [1, 2, None]
    restarts.ready()
    now = WINDOW_S + 1
    assert restarts.count == 0
    assert restarts.begin() == 1


def test_restarts_that_never_become_ready_are_bounded_however_long_they_take() -> None:
    now = 0.0
    restarts = Restarts(2, lambda: now)
    restarts.begin()
    restarts.ready()
    allowed = []
    for _ in range(3):
        now += WINDOW_S + 1
        allowed.append(restarts.begin())
    assert allowed == [1, 2, None]
    assert restarts.unready == restarts.count == 2
    restarts.ready()
    now += WINDOW_S + 1
    assert restarts.begin() == 1


def test_none_is_allowed_by_a_limit_of_zero() -> None:
    assert Restarts(0).begin() is None
