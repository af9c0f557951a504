"""Embeddings and scores through the gateway and through Triton's ensemble, compared with the Python API."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from stack import CHARONIA, HANG_S, Stack, running
from tiny_models import TEXTS, write_model

from charonia import Engine

PAIR_TEMPLATE = (
    "{% for one in messages %}{% if one.role == 'query' %}Q{% elif one.role == 'document' %}D{% else %}I{% endif %}"
    "{{ one.content }}{% endfor %}"
)
IDS = [[5, 6, 7], [300, 8, 5, 6, 7, 9]]


def write_modules(folder: Path, module: str, settings: dict[str, Any]) -> None:
    kinds = {"": "Transformer", f"1_{module}": module, **({"2_Normalize": "Normalize"} if module == "Pooling" else {})}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / f"1_{module}").mkdir()
    (folder / f"1_{module}" / "config.json").write_text(json.dumps(settings))


@dataclass
class Served:
    stack: Stack
    folder: Path

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.stack.gateway}{path}", json=body, timeout=HANG_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pooling")
    write_model(folder / "embedder", "byte_level", "babbler")
    write_modules(folder / "embedder", "Pooling", {"pooling_mode_lasttoken": True})
    write_model(folder / "ranker", "byte_level", "babbler", chat_template=PAIR_TEMPLATE)
    write_modules(folder / "ranker", "LogitScore", {"true_token_id": 5, "false_token_id": 9})
    command = (CHARONIA, "serve", f"embedder={folder / 'embedder'}", f"ranker={folder / 'ranker'}")
    env = {
        "CHARONIA_GATEWAY_MAX_CHOICES": "3",
        "CHARONIA_HTTP_INFERENCE": "true",
    }
    with running(Stack("nothing", folder / "run", env, command=command)) as stack:
        yield Served(stack, folder)


def test_embeddings_with_openai_client_equal_python_api(served: Served) -> None:
    with (
        openai.OpenAI(base_url=f"{served.stack.gateway}/v1", api_key="any") as api,
        Engine.from_pretrained(served.folder / "embedder", threads=2) as engine,
    ):
        texts = api.embeddings.create(model="embedder", input=TEXTS)  # base64, which this client asks for
        assert [one.index for one in texts.data] == list(range(len(TEXTS)))
        assert (np.array([one.embedding for one in texts.data], np.float32) == engine.embed(TEXTS)).all()
        count = sum(len(engine.encode(text)) for text in TEXTS)
        assert (texts.usage.prompt_tokens, texts.usage.total_tokens) == (count, count)
        for given in (IDS, IDS[0], TEXTS[0]):
            found = api.embeddings.create(
                model="embedder", input=given, encoding_format="float", dimensions=16, user="x"
            )
            numbers = np.array([one.embedding for one in found.data], np.float32)
            assert (numbers == engine.embed(given, dimensions=16)).all() and numbers.shape[1] == 16
    raw = served.post("/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "base64"}).json()
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * 256


def test_rerank_and_score_equal_python_api(served: Served) -> None:
    query, documents = "What is it?", TEXTS[:5]
    with Engine.from_pretrained(served.folder / "ranker", threads=2) as engine:
        expected, told = engine.score(query, documents), engine.score(query, documents, instruction="Be brief")
    assert len(set(expected)) == len(documents) and expected != told
    ranked = served.post("/v1/rerank", {"model": "ranker", "query": query, "documents": documents, "top_n": 3}).json()
    best = sorted(range(len(documents)), key=lambda index: -expected[index])[:3]
    assert [one["index"] for one in ranked["results"]] == best
    assert [one["relevance_score"] for one in ranked["results"]] == [expected[index] for index in best]
    assert [one["document"]["text"] for one in ranked["results"]] == [documents[index] for index in best]
    assert ranked["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] > sum(map(len, documents)) // 10
    objects = [{"text": document} for document in documents]
    body = {
        "model": "ranker",
        "query": query,
        "documents": objects,
        "instruction": "Be brief",
        "return_documents": False,
    }
    results = served.post("/v1/rerank", body).json()["results"]
    assert {one["index"]: one["relevance_score"] for one in results} == dict(enumerate(told))
    assert all("document" not in one for one in results)
    for first in (query, [query] * 5):
        scored = served.post("/v1/score", {"model": "ranker", "text_1": first, "text_2": documents}).json()
        assert [one["score"] for one in scored["data"]] == expected


def test_ensemble_returns_pooled_output(served: Served) -> None:
    """Over Triton's HTTP, as any of its clients may ask."""
    body = {"text_input": "a", "pooling": "embed"}
    answer = httpx.post(f"{served.stack.http}/v2/models/ensemble/generate", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    with Engine.from_pretrained(served.folder / "embedder", threads=2) as engine:
        assert (np.array(answer.json()["pooled"], np.float32) == engine.embed("a")[0]).all()


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/embeddings", {"model": "ranker", "input": "a"}, "gives scores and no embeddings"),
        ("/v1/completions", {"model": "embedder", "prompt": "a"}, "gives embeddings and no text: load it with the"),
        (
            "/v1/chat/completions",
            {"model": "embedder", "messages": [{"role": "user", "content": "a"}]},
            "gives embeddings and no text",
        ),
        ("/v1/score", {"model": "embedder", "text_1": "a", "text_2": "b"}, "gives embeddings and no scores"),
        ("/v1/embeddings", {"model": "embedder", "input": "a", "dimensions": 257}, "dimensions: 257 is out of range"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a", ""]}, "input[1]: empty"),
        ("/v1/embeddings", {"model": "embedder", "input": [5] * 2049}, "the input does not fit: it has 2049 tokens"),
        ("/v1/embeddings", {"model": "embedder", "input": ["a"] * 2049}, "input: 2049 inputs are too many"),
        (
            "/v1/embeddings",
            {"model": "embedder", "input": [1 << 30]},
            "input holds 1073741824, which is not a token id",
        ),
        ("/v1/embeddings", {"model": "embedder", "input": "a", "encoding_format": "int8"}, "send 'float' or 'base64'"),
        ("/v1/rerank", {"model": "ranker", "query": "a", "documents": []}, "it has 0 entries: send at least 1"),
        (
            "/v1/score",
            {"model": "ranker", "text_1": ["a", "b"], "text_2": ["c"]},
            "text_1: it has 2 texts and text_2 1",
        ),
    ],
)
def test_wrong_requests_name_the_field(served: Served, path: str, body: dict[str, Any], says: str) -> None:
    answer = served.post(path, body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text
