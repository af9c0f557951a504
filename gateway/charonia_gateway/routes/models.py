"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.schemas.responses import ErrorBody, Model, ModelList

router = APIRouter(tags=["OpenAI"])


def _model(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.settings.model_name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "charonia",
    }


@router.get("/v1/models", summary="List the models", response_model=ModelList)
async def list_models(gateway: GatewayState) -> dict[str, Any]:
    """The model that this server serves."""
    return {"object": "list", "data": [_model(gateway)]}


@router.get(
    "/v1/models/{model:path}",
    summary="Describe a model",
    response_model=Model,
    responses={404: {"model": ErrorBody, "description": "no such model"}},
)
async def get_model(model: str, gateway: GatewayState) -> dict[str, Any]:
    """A model by its name, which may contain slashes."""
    gateway.check_model(model)
    return _model(gateway)
