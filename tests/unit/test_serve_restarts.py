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
    now = WINDOW_S + 1
    assert restarts.count == 0
    assert restarts.begin() == 1


def test_none_is_allowed_by_a_limit_of_zero() -> None:
    assert Restarts(0).begin() is None
