"""Stacks that live as long as the tests of this folder need them. `stack` serves the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import tritonclient.grpc.aio as triton
from browser_fixtures import browser, new_context
from stack import DEMO_MODEL, HANG_S, SLOW, Stack, running
from tiny_models import TokenizerKind, write_model

if TYPE_CHECKING:
    import openai

__all__ = ["browser", "new_context"]


@pytest.fixture(scope="session", autouse=True)
def shared_workspaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A process of the tests makes the workspace of a model once, however many stacks serve it one after another."""
    Stack.workspaces = tmp_path_factory.mktemp("workspaces")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model, served by as many processes as users have."""
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("demo"), {"CHARONIA_TEXT_INSTANCES": "2"})) as served:
        yield served


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the gateway before `stack`."""
    import openai  # takes a second, and most files do without

    async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def model(stack: Stack) -> str:
    """The name of the model that the gateway before `stack` serves."""
    name: str = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    return name


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def kind(request: pytest.FixtureRequest) -> TokenizerKind:
    kind: TokenizerKind = request.param
    return kind


@pytest.fixture(scope="session")
def parrot(kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A parrot of tiny_models.py with either kind of tokenizer; a token is a response of its own where it can be. Its
    HTTP port answers inference."""
    folder = tmp_path_factory.mktemp(f"parrot_{kind}")
    write_model(folder / "parrot", kind, "parrot")
    env = {"CHARONIA_STREAM_INTERVAL_MS": "0", "CHARONIA_HTTP_INFERENCE": "1"}
    with running(Stack(folder / "parrot", folder / "run", env)) as served:
        yield served


@pytest.fixture(scope="session")
def babbler(kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A babbler of tiny_models.py with either kind of tokenizer."""
    folder = tmp_path_factory.mktemp(f"babbler_{kind}")
    write_model(folder / "babbler", kind, "babbler")
    with running(Stack(folder / "babbler", folder / "run", {"CHARONIA_STREAM_INTERVAL_MS": "0"})) as served:
        yield served


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A babbler that never ends by itself, with a context that holds ENDLESS tokens."""
    folder = tmp_path_factory.mktemp("slow_model") / "slow"
    write_model(folder, "byte_level", "babbler", hidden=768, layers=6, positions=1 << 14, ends=False)
    return folder


@pytest.fixture(scope="session")
def slow(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The slow model, with a queue that a test can fill."""
    env = {**SLOW, "CHARONIA_MAX_BATCH_SIZE": "64", "CHARONIA_MAX_QUEUE_SIZE": "220"}
    with running(Stack(slow_model, tmp_path_factory.mktemp("slow"), env)) as served:
        yield served


@pytest.fixture
async def parrot_client(parrot: Stack) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(parrot.grpc) as client:
        yield client


@pytest.fixture
async def babbler_client(babbler: Stack) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(babbler.grpc) as client:
        yield client
