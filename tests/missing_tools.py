"""What a test does where a tool cannot be had that it needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing_tool(reason: str) -> NoReturn:
    """Skips the test; in continuous integration (CI=true), where nothing may go untested unseen, fails it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
