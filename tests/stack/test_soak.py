"""A short soak: `charonia benchmark soak` runs the same for longer, and looks at memory too."""

from __future__ import annotations

import asyncio

import engine_metrics
import pytest
from rich.console import Console
from stack import Stack

from charonia.bench.soak import run_soak

SECONDS = 15


@pytest.mark.slow
def test_mixed_load_with_clients_that_leave_loses_nothing_and_holds_nothing(stack: Stack) -> None:
    assert stack.process is not None
    asyncio.run(engine_metrics.idle(stack.metrics))  # what other tests have left is not counted
    report = run_soak(
        stack.grpc, stack.metrics, stack.process.pid, seconds=SECONDS, clients=8, seed=1, console=Console()
    )
    assert report.faults() == []
    assert set(report.sent) == {"read", "left", "left at once", "session"}
    assert report.counted["cancelled"] > 0
    assert report.counted["length"] > 0
    assert len(report.memory_bytes) >= SECONDS // 2
