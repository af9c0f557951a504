"""Settings of all tests."""

from __future__ import annotations

import gc
import signal
import sys

gc.disable()  # until the tests are collected
# With it jsonschema checks IRIs, which no test asks for; its import takes longer than jsonschema's.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # Python's way to say that it cannot be imported

from hypothesis import HealthCheck, settings  # noqa: E402

# The same examples in every run, and no limits on time: whether a change passes depends on the change alone, not on the
# day or on what else the machine does. `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# What a shell starts in the background ignores a terminal's keys, and under nohup its end; so does what it starts in
# turn. The programs tested here must not.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What the modules of all tests hold stays to the end: the collector does not go through it again and again."""
    gc.freeze()
    gc.enable()
