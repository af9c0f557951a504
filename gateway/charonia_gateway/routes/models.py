"""GET /v1/models and /v1/models/{model}, and the orders to load and unload a model, as llama.cpp has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from charonia_gateway import control
from charonia_gateway.body import parse, read_body
from charonia_gateway.context import Gateway, GatewayState
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.errors import ApiError
from charonia_gateway.record import current_key
from charonia_gateway.schemas.responses import Model, ModelList, Ordered

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


class Order(BaseModel):
    """POST /models/load and /models/unload"""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(
        min_length=1,
        max_length=4096,
        description="the model's name; to add a model NAME=MODEL: a model folder on the server, or a hub id",
    )


_ERRORS = {
    409: "another model is being loaded or unloaded; Retry-After says when to retry",
    503: "Triton or `charonia serve` does not respond, the model is not ready in time, or `charonia serve` did not "
    "start this gateway",
}


@router.post(
    "/models/load",
    summary="Load a model, or add one",
    tags=["service"],
    **describe(Order, Ordered, {"a new model": {"model": "small=Qwen/Qwen2.5-0.5B-Instruct"}}, None, _ERRORS),
)
async def load_model(request: Request, gateway: GatewayState) -> dict[str, Any]:
    """Load a model that was unloaded, or add one, and return when it is ready. Needs a key with `--access admin`."""
    return await _ask(gateway, do="load", name=await _ordered(request, gateway), from_key="1")


@router.post(
    "/models/unload",
    summary="Unload a model",
    tags=["service"],
    **describe(Order, Ordered, {"a model": {"model": "small"}}, None, _ERRORS),
)
async def unload_model(request: Request, gateway: GatewayState) -> dict[str, Any]:
    """Unload a model, which frees its memory. Its running requests end first. Needs a key with `--access admin`."""
    return await _ask(gateway, do="unload", name=await _ordered(request, gateway))


async def _ordered(request: Request, gateway: Gateway) -> str:
    """The name in the request. Raises ApiError."""
    if gateway.settings.keys_file is None:
        raise ApiError(
            403,
            "models are loaded and unloaded only with a key: charonia keys create NAME --access admin --file FILE, and "
            "CHARONIA_GATEWAY_KEYS_FILE=FILE; or use charonia models on the server",
            type="permission_error",
            code="access_denied",
        )
    name = parse(Order, await read_body(request, gateway.settings.max_body_bytes)).model
    key = current_key()
    if key and not gateway.allows(name if name in gateway.names else name.partition("=")[0].strip()):
        raise ApiError(
            403,
            f"the key {key.name!r} may not use the model {name!r}",
            type="permission_error",
            param="model",
            code="access_denied",
        )
    return name


async def _ask(gateway: Gateway, **question: str) -> dict[str, Any]:
    folder = gateway.settings.control_dir
    if folder is None:
        raise ApiError(503, "charonia serve did not start this gateway: use charonia models there", code="not_ready")
    return {"success": True, "message": await control.ask(folder, **question)}


@router.get("/v1/models", summary="List the models", response_model=ModelList)
async def list_models(gateway: GatewayState) -> dict[str, Any]:
    """The models of this server that the key may use. The first one is the default."""
    await gateway.refresh()
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
    await gateway.find(model)
    return await _model(gateway, model)
