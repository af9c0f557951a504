"""Handles a missing tool in a test."""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

import pytest


def missing_tool(reason: str) -> NoReturn:
    """Skip the test. In continuous integration (CI=true) fail it, so that a missing tool is noticed."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def needed_module(name: str) -> Any:
    """Import a module for tests that cannot be collected without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"{name} cannot be imported: {error}", allow_module_level=True)
