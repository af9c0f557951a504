"""POST /v1/embeddings, /v1/rerank and /v1/score: what a model gives for a text or for two texts, instead of text."""

from __future__ import annotations

import asyncio
import base64
import re
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from charonia_client import BadRequest, Overloaded, ServerError
from charonia_client.offload import offload
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_json

from charonia_gateway.context import Gateway, GatewayState, Head
from charonia_gateway.documentation import describe
from charonia_gateway.record import current_key
from charonia_gateway.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from charonia_gateway.schemas.responses import Embeddings, Ranking, Scores
from charonia_gateway.sse import while_connected
from charonia_gateway.usage import Usage

router = APIRouter()


@router.post(
    "/v1/embeddings",
    summary="Embeddings of texts",
    tags=["OpenAI"],
    **describe(
        EmbeddingRequest,
        Embeddings,
        {"a text": {"input": "Hello"}, "short ones": {"input": ["Hello", "Bye"], "dimensions": 256}},
        stream=None,
    ),
)
async def embeddings(request: Request, gateway: GatewayState) -> Response:
    """One embedding for each input. The server needs an embedding model, or a model with the setting `task` = embed."""
    body = await gateway.read(request, EmbeddingRequest)
    head = Head(gateway, request, body, "embd-")
    vectors, usage = await while_connected(request, _pooled(gateway, head, body))
    size = sum(map(len, vectors))

    def make() -> bytes:
        encoded = (_base64(vector) if body.encoding_format == "base64" else to_json(list(vector)) for vector in vectors)
        data = (b'{"object":"embedding","index":%d,"embedding":%b}' % (index, one) for index, one in enumerate(encoded))
        fields = {**head.fields, "object": "list", "usage": _usage(usage)}
        return to_json(fields)[:-1] + b',"data":[' + b",".join(data) + b"]}"

    return Response(await offload(size, make), headers=head.headers, media_type="application/json")


@router.post(
    "/v1/rerank",
    summary="Rank documents for a query",
    tags=["vLLM"],
    **describe(
        RerankRequest,
        Ranking,
        {"two documents": {"query": "What is the capital of France?", "documents": ["Paris.", "Oranges."]}},
        stream=None,
    ),
)
async def rerank(request: Request, gateway: GatewayState) -> Response:
    """The documents with their scores, best first, as Cohere and Jina return them. The server needs a reranker."""
    body = await gateway.read(request, RerankRequest)
    head = Head(gateway, request, body, "rerank-")
    scores, usage = await while_connected(request, _pooled(gateway, head, body))

    def make() -> bytes:
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": score[0]} for index, score in enumerate(scores)
        ]
        results.sort(key=lambda result: -result["relevance_score"])  # equal ones in the order of the documents
        results = results[: body.top_n or None]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": body.documents[result["index"]]}
        return to_json({"id": head.id, "model": body.model, "usage": _usage(usage), "results": results})

    size = sum(map(len, body.documents))
    return Response(await offload(size, make), headers=head.headers, media_type="application/json")


@router.post(
    "/v1/score",
    summary="Scores of pairs of texts",
    tags=["vLLM"],
    **describe(
        ScoreRequest,
        Scores,
        {"two documents": {"text_1": "What is the capital of France?", "text_2": ["Paris.", "Oranges."]}},
        stream=None,
    ),
)
async def score(request: Request, gateway: GatewayState) -> Response:
    """One score for each of text_2, in their order. The server needs a reranker."""
    body = await gateway.read(request, ScoreRequest)
    head = Head(gateway, request, body, "score-")
    scores, usage = await while_connected(request, _pooled(gateway, head, body))
    data = [{"index": index, "object": "score", "score": score[0]} for index, score in enumerate(scores)]
    return JSONResponse({**head.fields, "object": "list", "data": data, "usage": _usage(usage)}, headers=head.headers)


async def _pooled(
    gateway: Gateway, head: Head, body: EmbeddingRequest | RerankRequest | ScoreRequest
) -> tuple[list[Sequence[float]], Usage]:
    """The embedding or the score of each input. The inputs that are in the engine at the same time count for the limits
    of the key. They are at most max_choices, and no more than the key allows."""
    requests, key = body.engine_requests(), current_key()
    most = min(gateway.settings.max_choices, (key.max_concurrent if key else None) or len(requests))
    await gateway.check_choices(min(len(requests), most))
    usage = head.usage(1, len(requests))
    found: dict[int, Sequence[float]] = {}

    async def compute(index: int) -> None:
        answer = head.engine.answer(requests[index], f"{head.engine_id}#{index}", first=index)
        try:
            async with aclosing(answer) as parts:
                async for part in parts:
                    usage.see(index, part)  # also counts if another input fails, or the client leaves
                    found[index] = part.pooled
        except BadRequest as error:
            if len(requests) == 1:
                raise
            names = rf"(?:{'|'.join(body.engine_names)}|the (?:input|prompt)(?= does not fit))\b"
            raise BadRequest(re.sub(rf"\A{names}", f"{body.input_field}[{index}]", str(error))) from error
        if not found.get(index):
            raise ServerError("the server returned text and no embedding or score: it has another version")

    await _run_all(compute, len(requests), most)
    return [found[index] for index in range(len(requests))], usage


async def _run_all(compute: Callable[[int], Coroutine[Any, Any, None]], count: int, most: int) -> None:
    """Run compute(index) for each index below `count`, at most `most` at the same time. An error cancels the others.

    If the server is overloaded while others of them run, or one has ended since, the index waits and runs again. After
    that fewer run at the same time, and one more when as many as run have ended. So a long request fills a short queue
    and is not rejected for its own length."""
    waiting, running, ended, limit = deque(range(count)), dict[asyncio.Task[None], tuple[int, int]](), 0, float(most)
    try:
        while waiting or running:
            while waiting and len(running) < int(limit):
                index = waiting.popleft()
                running[asyncio.create_task(compute(index))] = index, ended
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda one: isinstance(one.exception(), Overloaded)):
                index, ended_before = running.pop(task)
                error = task.exception()
                if error is None:
                    ended += 1
                    limit = min(limit + 1 / limit, most)
                elif isinstance(error, Overloaded) and (running or ended > ended_before):
                    waiting.appendleft(index)
                    limit = float(max(len(running), 1))
                else:
                    raise error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _base64(vector: Sequence[float]) -> bytes:
    return b'"' + base64.b64encode(array("f", vector).tobytes()) + b'"'


def _usage(usage: Usage) -> dict[str, int]:
    counted = usage.to_json()
    return {name: counted[name] for name in ("prompt_tokens", "total_tokens")}
