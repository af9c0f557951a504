"""Stacks that are shared by the tests of this folder. `stack` serves the demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tritonclient.grpc.aio as triton
from browser_fixtures import browser, new_context
from caller import MODEL, TEMPLATE, TEXTS
from stack import DEMO_MODEL, HANG_S, SLOW, Stack, running
from tiny_models import TokenizerKind, write_model

if TYPE_CHECKING:
    import openai

__all__ = ["browser", "new_context"]


@pytest.fixture(scope="session", autouse=True)
def shared_workspaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test process creates the workspace of a model once, for all stacks that serve it."""
    Stack.workspaces = tmp_path_factory.mktemp("workspaces")


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model, served by the default number of processes."""
    with running(Stack(DEMO_MODEL, tmp_path_factory.mktemp("demo"), {"CHARONIA_TEXT_INSTANCES": "2"})) as served:
        yield served


@pytest.fixture
async def api(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client for the gateway of `stack`."""
    import openai  # the import takes a second, and most files do not need it

    async with openai.AsyncOpenAI(base_url=f"{stack.gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def model(stack: Stack) -> str:
    """The name of the model that `stack` serves."""
    name: str = httpx.get(f"{stack.gateway}/v1/models", timeout=HANG_S).json()["data"][0]["id"]
    return name


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def kind(request: pytest.FixtureRequest) -> TokenizerKind:
    kind: TokenizerKind = request.param
    return kind


@pytest.fixture(scope="session")
def parrot(kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A parrot of tiny_models.py with each kind of tokenizer. Each token is a separate response if possible. Its HTTP
    port allows inference."""
    folder = tmp_path_factory.mktemp(f"parrot_{kind}")
    write_model(folder / "parrot", kind, "parrot")
    env = {"CHARONIA_STREAM_INTERVAL_MS": "0", "CHARONIA_HTTP_INFERENCE": "1"}
    with running(Stack(folder / "parrot", folder / "run", env)) as served:
        yield served


@pytest.fixture(scope="session")
def babbler(kind: TokenizerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A babbler of tiny_models.py with each kind of tokenizer."""
    folder = tmp_path_factory.mktemp(f"babbler_{kind}")
    write_model(folder / "babbler", kind, "babbler")
    with running(Stack(folder / "babbler", folder / "run", {"CHARONIA_STREAM_INTERVAL_MS": "0"})) as served:
        yield served


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("caller")
    # Most characters are separate tokens, and a coding agent sends long prompts.
    options: dict[str, Any] = {"texts": TEXTS, "chat_template": TEMPLATE, "positions": 1 << 15}
    write_model(folder / MODEL, "byte_level", "parrot", **options)
    with running(Stack(folder / MODEL, folder / "run", {"CHARONIA_STREAM_INTERVAL_MS": "0"})) as served:
        yield served


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A babbler that never ends by itself, with a context of ENDLESS tokens."""
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
