"""What a test does where a tool cannot be had that it needs."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def missing_tool(reason: str) -> NoReturn:
    """Skips the test; in continuous integration (CI=true), where nothing may go untested unseen, fails it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def needed_module(name: str) -> Any:
    """The module, for tests that cannot even be read without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{name} cannot be imported: {error}", allow_module_level=True)
