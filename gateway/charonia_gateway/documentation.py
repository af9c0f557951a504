"""The generated API documentation of routes that read their own body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from charonia_gateway.schemas.responses import ErrorBody

_REF = "#/components/schemas/{model}"
# What the descriptions of routes refer to, by name. FastAPI would make validators of each answer and error of each
# route, which nothing validates, whenever the gateway starts.
_requests: dict[str, type[BaseModel]] = {}
_answers: dict[str, type[BaseModel]] = {}
_ERRORS = {
    400: "the request is wrong: the text names the field and what would be right",
    401: "the server asks for a key, and the request has none that holds",
    403: "the key may not use the model, or CHARONIA_GATEWAY_ALLOWED_ORIGINS does not name the web page that asks",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "a limit of the key is used up, or there is too much to do; Retry-After says when to come again",
    503: "Triton or the engine is away, or going away; Retry-After says when to come again",
    504: "the request's own `timeout` ran out",
}


def describe(
    request: type[BaseModel],
    answer: type[BaseModel],
    examples: dict[str, dict[str, Any]],
    stream: str | None = "with stream = true server-sent events, the last of them `data: [DONE]`",
    errors: Mapping[int, str] = MappingProxyType({}),
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Arguments of a route's decorator. `stream` says what a stream is, None where there is none; `errors` are those
    that the other routes have not, `error` the form of all of them. The model's name is put into the examples when they
    are served."""
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
    """The argument `responses` of a route's decorator."""
    return {status: _described(error, text) for status, text in errors.items()}


def _described(answer: type[BaseModel], text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _refer(_answers, answer)}}}


def _refer(models: dict[str, type[BaseModel]], model: type[BaseModel]) -> dict[str, str]:
    models[model.__name__] = model
    return {"$ref": _REF.format(model=model.__name__)}


_KEY_SCHEME = "key"  # page/docs.js gives swagger-ui the key under this name


def complete_schema(app: FastAPI, model_name: str, is_open: Callable[[str, str], bool] | None = None) -> None:
    """Adds what descriptions refer to, and the served model's name. is_open(method, path): what needs no key; None
    where nothing needs one."""
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
                example["value"] = {"model": model_name, **example["value"]}
        if is_open:
            text = "an API key of the gateway's; x-api-key takes it as well"
            scheme = {"type": "http", "scheme": "bearer", "description": text}
            schema["components"]["securitySchemes"] = {_KEY_SCHEME: scheme}
            schema["security"] = [{_KEY_SCHEME: []}]
            for path, operations in schema["paths"].items():
                for method, operation in operations.items():
                    if is_open(method.upper(), path):
                        operation["security"] = []
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend its schema
