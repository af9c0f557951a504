"""tests/missing_tools.py: a missing tool is an error in continuous integration."""

from __future__ import annotations

import sys

import pytest
from missing_tools import needed_module


@pytest.mark.slow
@pytest.mark.parametrize(("ci", "outcome"), [("true", ModuleNotFoundError), ("", pytest.skip.Exception)])
def test_a_missing_module_skips_and_fails_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    with pytest.raises(outcome, match=r"playwright\.sync_api"):
        needed_module("playwright.sync_api")


@pytest.mark.slow
def test_a_module_that_is_there_is_returned() -> None:
    assert needed_module("sys") is sys
