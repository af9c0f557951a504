"""Fixtures of tests of thinking budgets, for the model in the fixture `folder`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prepare import Preparation
from prompt_ids import load_tokenizer

from charonia import Engine


@pytest.fixture(scope="module", params=["off", "ngram"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Needs the fixture all_proposals, so that each test has proposals."""
    with Engine.from_pretrained(folder, threads=1, token_budget=16, speculative_method=request.param) as engine:
        yield engine
        assert (engine.stats().proposed_tokens > 0) == (request.param == "ngram")


@pytest.fixture(scope="module")
def preparation(folder: Path) -> Preparation:
    return Preparation(load_tokenizer(folder), {}, None, 1 << 20)
