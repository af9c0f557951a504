"""A plugin of pytest: every test's outcome goes to $GPU_CHECK_LINES at once, a line of JSON each, so that what a killed
run has found is kept."""

from __future__ import annotations

import json
import os

import pytest

_worker = False


def pytest_configure(config: pytest.Config) -> None:
    global _worker
    _worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """With pytest-xdist the workers hand their reports to the process that started them, which writes them."""
    if _worker or (report.when != "call" and report.passed):
        return
    if report.when == "teardown" and report.skipped:
        return
    line = {"test": report.nodeid, "outcome": report.outcome, "text": report.longreprtext if report.failed else ""}
    with open(os.environ["GPU_CHECK_LINES"], "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(json.dumps(line) + "\n")
