"""POST /v1/embeddings, which says why there are none."""

from __future__ import annotations

from fastapi import APIRouter

from charonia_gateway.documentation import describe_errors
from charonia_gateway.errors import ApiError

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/embeddings",
    summary="None: the model is a decoder",
    status_code=404,
    responses=describe_errors({404: "always"}),
)
async def embeddings() -> None:
    raise ApiError(
        404,
        "a decoder has no embeddings: this server generates text; send texts to a server of an embedding model",
        code="embeddings_not_supported",
    )
