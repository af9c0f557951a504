"""Signals to `charonia serve`: the first starts an orderly end, the second ends it immediately."""

from __future__ import annotations

import signal

from charonia.serve.launcher import _TOGETHER_S, _Signals


def test_signals_that_come_together_are_one_and_a_later_one_is_the_second() -> None:
    """make or a shell forward a signal that the whole process group has received."""
    now = 100.0
    signals = _Signals(lambda: now)
    assert not signals.wait(0)
    counts = []
    for seconds in (0, 0, 0.9 * _TOGETHER_S, 0.2 * _TOGETHER_S, 0.5 * _TOGETHER_S, 10):
        now += seconds
        signals.handle(signal.SIGINT, None)
        counts.append(signals.count)
    assert counts == [1, 1, 1, 2, 2, 3]
    assert signals.wait(0)


def test_the_first_signal_counts_however_soon_after_the_machines_start_it_comes() -> None:
    signals = _Signals(lambda: 0.0)
    signals.handle(signal.SIGTERM, None)
    assert signals.count == 1
