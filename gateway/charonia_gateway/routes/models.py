"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter

from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.documentation import describe_errors
from charonia_gateway.schemas.responses import Model, ModelList

router = APIRouter(tags=["OpenAI"])


async def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    pool = gateway.engines[gateway.names[name]].pool
    records, info, formats = await asyncio.gather(pool.quality(), pool.model_info(), pool.answer_formats())
    return {
        "id": name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "charonia",
        "status": "ready" if pool.usable else "not ready",
        "max_model_len": info.get("context_length"),
        "weight_type": info.get("weight_type"),
        "data_type": info.get("data_type"),
        "group_size": info.get("group_size"),
        "default_sampling_parameters": info.get("default_sampling_parameters"),
        "accepts_tools": bool(formats["tool_calls"]) if "tool_calls" in formats else None,
        # Without the command: it contains file names of the machine that ran the evaluation.
        "quality": [{key: value for key, value in record.items() if key != "command"} for record in records],
    }


@router.get("/v1/models", summary="List the models", response_model=ModelList)
async def list_models(gateway: GatewayState) -> dict[str, Any]:
    """The models of this server that the key may use. The first one is the default."""
    found = await asyncio.gather(*(_model(gateway, name) for name in gateway.allowed_models()))
    return {"object": "list", "data": found}


@router.get(
    "/v1/models/{model:path}",
    summary="Describe a model",
    response_model=Model,
    responses=describe_errors({404: "no such model"}),
)
async def get_model(model: str, gateway: GatewayState) -> dict[str, Any]:
    """A model by its name, which may contain slashes."""
    gateway.engine_of(model)
    return await _model(gateway, model)
