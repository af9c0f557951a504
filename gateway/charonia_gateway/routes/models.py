"""GET /v1/models and /v1/models/{model}, and the orders to load and unload a model, as llama.cpp has them."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from charonia_client import CharoniaError
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from charonia_gateway import control
from charonia_gateway.body import parse, read_body
from charonia_gateway.context import Adapter, Gateway, GatewayState
from charonia_gateway.documentation import describe, describe_errors
from charonia_gateway.engine import Engine
from charonia_gateway.errors import ApiError, from_engine
from charonia_gateway.record import current_key
from charonia_gateway.schemas.responses import Model, ModelList, Ordered

router = APIRouter(tags=["OpenAI"])


async def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    pool = gateway.engines[gateway.names[name]].pool
    records, info, formats = await asyncio.gather(pool.quality(), pool.model_info(), pool.answer_formats())
    generates = info.get("task") in (None, "generate")
    return {
        "id": name,
        "object": "model",
        "created": gateway.started,
        "owned_by": "charonia",
        "status": gateway.engines[gateway.names[name]].status,
        "task": info.get("task"),
        "max_model_len": info.get("context_length"),
        "weight_type": info.get("weight_type"),
        "data_type": info.get("data_type"),
        "group_size": info.get("group_size"),
        "default_sampling_parameters": info.get("default_sampling_parameters"),
        "accepts_tools": generates and bool(formats["tool_calls"]) if "tool_calls" in formats else None,
        # Without the command: it contains file names of the machine that ran the evaluation.
        "quality": [
            {key: value for key, value in record.items() if key != "command"}
            for record in records
            if record.get("quantization", "none") == info.get("quantization", "none")  # of the weights as they are now
        ],
    }


async def _adapter(gateway: Gateway, adapter: Adapter) -> dict[str, Any]:
    return {**await _model(gateway, adapter.model), "id": adapter.name, "parent": adapter.model, "root": adapter.path}


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
    name = await _ordered(request, gateway)
    await gateway.find_adapters()
    if (new := name.partition("=")[0].strip()) in gateway.adapters:
        raise ApiError(400, f"a LoRA adapter is called {new!r}: choose another name", param="model")
    return await _ask(gateway, do="load", name=name, from_key="1")


@router.post(
    "/models/unload",
    summary="Unload a model",
    tags=["service"],
    **describe(Order, Ordered, {"a model": {"model": "small"}}, None, _ERRORS),
)
async def unload_model(request: Request, gateway: GatewayState) -> dict[str, Any]:
    """Unload a model, which frees its memory. Its running requests end first. Needs a key with `--access admin`."""
    return await _ask(gateway, do="unload", name=await _ordered(request, gateway))


class AdapterOrder(BaseModel):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter. The names of the routes and fields are vLLM's."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str = Field(min_length=1, max_length=256, description="the name of the adapter, for `model` of requests")
    base_model_name: str | None = Field(None, max_length=4096, description="its model; default: the first model")


class AdapterToLoad(AdapterOrder):
    lora_path: str = Field(min_length=1, max_length=4096, description="a folder of PEFT on the server")


_EXAMPLE = {"lora_name": "sql", "lora_path": "/adapters/sql"}
_FIELDS = {"lora_name": "lora_name"}  # in other requests it is `model`
_ADAPTER_ERRORS = {400: "the adapter is not valid for this model", 404: "no such model or adapter"}


@router.post(
    "/v1/load_lora_adapter",
    summary="Load a LoRA adapter",
    tags=["service"],
    **describe(AdapterToLoad, Ordered, {"an adapter": _EXAMPLE}, None, _ADAPTER_ERRORS),
)
async def load_adapter(request: Request, gateway: GatewayState) -> dict[str, Any]:
    """Load a LoRA adapter while requests run (docs/adapters.md). Needs a key with `--access admin`."""
    order = await _adapter_order(request, gateway, AdapterToLoad)
    own, engine = _base(gateway, order.base_model_name)
    other = gateway.adapters.get(order.lora_name)
    if order.lora_name in gateway.names or (other and other.model != own):
        what = f"an adapter of {other.model!r}" if other else "a model"
        raise ApiError(400, f"{what} is called {order.lora_name!r}: choose another name", param="lora_name")
    await engine.load()
    try:
        await engine.pool.load_adapter(order.lora_name, order.lora_path)
    except CharoniaError as error:
        raise from_engine(error, _FIELDS) from error
    await gateway.find_adapters()
    return {"success": True, "message": f"{order.lora_name} is loaded"}


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload a LoRA adapter",
    tags=["service"],
    **describe(AdapterOrder, Ordered, {"an adapter": {"lora_name": "sql"}}, None, _ADAPTER_ERRORS),
)
async def unload_adapter(request: Request, gateway: GatewayState) -> dict[str, Any]:
    """Unload a LoRA adapter. Its running requests end with it. Needs a key with `--access admin`."""
    order = await _adapter_order(request, gateway, AdapterOrder)
    known = gateway.adapters.get(order.lora_name)
    _, engine = _base(gateway, order.base_model_name or (known.model if known else None))
    try:
        await engine.pool.unload_adapter(order.lora_name)
    except CharoniaError as error:
        raise from_engine(error, _FIELDS) from error
    finally:
        await gateway.find_adapters()
    return {"success": True, "message": f"{order.lora_name} is unloaded"}


Wanted = TypeVar("Wanted", bound=AdapterOrder)


async def _adapter_order(request: Request, gateway: Gateway, kind: type[Wanted]) -> Wanted:
    _need_keys(gateway)
    order = parse(kind, await read_body(request, gateway.settings.max_body_bytes))
    await gateway.refresh()
    await gateway.find_adapters()
    return order


def _base(gateway: Gateway, name: str | None) -> tuple[str, Engine]:
    """The own name and the engine of an adapter's model. None: the first model. Raises ApiError if there is no model of
    this name, or if the key may not use it."""
    if name is not None and name not in gateway.names:
        raise ApiError(404, f"there is no model {name!r}", param="base_model_name", code="model_not_found")
    return gateway.names[name or next(iter(gateway.names))], gateway.engine_of(name)


def _need_keys(gateway: Gateway) -> None:
    """Raises ApiError if the gateway has no keys."""
    if gateway.settings.keys_file is None:
        raise ApiError(
            403,
            "models are loaded and unloaded only with a key: charonia keys create NAME --access admin --file FILE, and "
            "CHARONIA_GATEWAY_KEYS_FILE=FILE; or use charonia models on the server",
            type="permission_error",
            code="access_denied",
        )


async def _ordered(request: Request, gateway: Gateway) -> str:
    """The name in the request. Raises ApiError."""
    _need_keys(gateway)
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
    await gateway.find_adapters()
    shown = [await _adapter(gateway, one) for one in gateway.adapters.values() if gateway.allows(one.name)]
    return {"object": "list", "data": found + shown}


@router.get(
    "/v1/models/{model:path}",
    summary="Describe a model",
    response_model=Model,
    responses=describe_errors({404: "no such model"}),
)
async def get_model(model: str, gateway: GatewayState) -> dict[str, Any]:
    """A model by its name, which may contain slashes."""
    await gateway.find(model)
    if model in gateway.names:
        return await _model(gateway, model)
    return await _adapter(gateway, gateway.adapters[model])
