from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # progress bars of transformers

import pytest
from released_models import released

sys.path.append(str(Path(__file__).resolve().parents[1] / "stack"))


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def folder(request: pytest.FixtureRequest) -> Path:
    return released(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return released("smollm2")
