"""The generated API documentation of routes that read their own body."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from charonia_gateway.schemas.responses import ErrorBody

_REF = "#/components/schemas/{model}"
# Schemas that the descriptions of routes refer to, by name. FastAPI would build a validator for each response and error
# of each route at every start, and none of them is used.
_requests: dict[str, type[BaseModel]] = {}
_answers: dict[str, type[BaseModel]] = {}
_ERRORS = {
    400: "the request is wrong: the message names the field and the remedy",
    401: "the server needs an API key, and the request has no valid key",
    403: "the key may not use the model, or the web page's origin is not in CHARONIA_GATEWAY_ALLOWED_ORIGINS",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "a limit of the key is reached, or the server is overloaded; Retry-After says when to retry",
    503: "Triton or the engine is not available or is shutting down; Retry-After says when to retry",
    504: "the request's own `timeout` ran out",
}


def describe(
    request: type[BaseModel],
    answer: type[BaseModel],
    examples: dict[str, dict[str, Any]],
    stream: str | None = "with stream = true server-sent events, of which the last is `data: [DONE]`",
    errors: Mapping[int, str] = MappingProxyType({}),
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Arguments of a route's decorator. `stream` describes the stream, None if there is no stream. `errors` are
    additional errors of this route. `error` is the form of all errors. The examples get the model's name when they are
    served."""
    shown = {name: {"summary": name, "value": value} for name, value in examples.items()}
    body = {"application/json": {"schema": _refer(_requests, request), "examples": shown}}
    ok = _described(answer, "the answer")
    if stream is not None:
        ok["description"] += f"; {stream}"
        ok["content"]["text/event-stream"] = {}
    return {
        "responses": {200: ok, **describe_errors({**_ERRORS, **errors}, error)},
        "openapi_extra": {"requestBody": {"required": True, "content": body}},
    }


def describe_errors(errors: Mapping[int, str], error: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The value for the argument `responses` of a route's decorator."""
    return {status: _described(error, text) for status, text in errors.items()}


def _described(answer: type[BaseModel], text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _refer(_answers, answer)}}}


def _refer(models: dict[str, type[BaseModel]], model: type[BaseModel]) -> dict[str, str]:
    models[model.__name__] = model
    return {"$ref": _REF.format(model=model.__name__)}


_KEY_SCHEME = "key"  # page/docs.js passes the key to swagger-ui under this name


def complete_schema(app: FastAPI, model_name: str, is_open: Callable[[str, str], bool] | None = None) -> None:
    """Add the schemas that the descriptions refer to, and the served model's name. is_open(method, path): whether a
    path needs no key; None if no path needs a key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = generate()
        models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
            *((model, "validation") for model in _requests.values()),
            *((model, "serialization") for model in _answers.values()),
        ]
        _, definitions = models_json_schema(models, ref_template=_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for path in schema["paths"].values():
            body = path.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
            for example in body.get("examples", {}).values():
                value = example["value"]
                if "body" in value:  # a logged request, as text
                    example["value"] = {**value, "body": value["body"].replace('"MODEL"', json.dumps(model_name))}
                else:
                    example["value"] = {"model": model_name, **value}
        if is_open:
            text = "an API key of the gateway; the header x-api-key works, too"
            scheme = {"type": "http", "scheme": "bearer", "description": text}
            schema["components"]["securitySchemes"] = {_KEY_SCHEME: scheme}
            schema["security"] = [{_KEY_SCHEME: []}]
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    if is_open(method.upper(), path):
                        operation["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend its schema
