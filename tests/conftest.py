"""Settings of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples in every run, and no limits on time: whether a change passes depends on the change alone, not on the
# day or on what else the machine does. `pytest --hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
