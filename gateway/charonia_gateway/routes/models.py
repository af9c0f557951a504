"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.record import current_key
from charonia_gateway.schemas.responses import ErrorBody, Model, ModelList

router = APIRouter(tags=["OpenAI"])


async def _model(gateway: Gateway) -> dict[str, Any]:
    records = await gateway.engine.pool.quality()
    return {
        "id": gateway.settings.model_name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "charonia",
        # Without the command: it names files of the machine that measured.
        "quality": [{key: value for key, value in record.items() if key != "command"} for record in records],
    }


@router.get("/v1/models", summary="List the models", response_model=ModelList)
async def list_models(gateway: GatewayState) -> dict[str, Any]:
    """The model that this server serves, where the key may use it."""
    key = current_key()
    allowed = key is None or key.allows_model(gateway.settings.model_name)
    return {"object": "list", "data": [await _model(gateway)] if allowed else []}


@router.get(
    "/v1/models/{model:path}",
    summary="Describe a model",
    response_model=Model,
    responses={404: {"model": ErrorBody, "description": "no such model"}},
)
async def get_model(model: str, gateway: GatewayState) -> dict[str, Any]:
    """A model by its name, which may contain slashes."""
    gateway.check_model(model)
    return await _model(gateway)
