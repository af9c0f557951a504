"""POST /v1/embeddings, which only returns an error."""

from __future__ import annotations

from fastapi import APIRouter

from charonia_gateway.documentation import describe_errors
from charonia_gateway.errors import ApiError

router = APIRouter(tags=["OpenAI"])


@router.post(
    "/v1/embeddings",
    summary="Not supported: the model is a decoder",
    status_code=404,
    responses=describe_errors({404: "always"}),
)
async def embeddings() -> None:
    raise ApiError(
        404,
        "this server has no embeddings: its models generate text; use a server with an embedding model",
        code="embeddings_not_supported",
    )
