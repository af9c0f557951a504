"""The generated API documentation of routes that read their own body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from charonia_gateway.schemas.interactive import InteractiveRequest
from charonia_gateway.schemas.messages import CountTokensRequest, MessagesRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.requests import ChatRequest, CompletionRequest
from charonia_gateway.schemas.responses import ErrorBody
from charonia_gateway.schemas.tokenizer import DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    InteractiveRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeBody,
    DetokenizeBody,
)
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
    content = {
        "application/json": {
            "schema": {"$ref": _REF.format(model=request.__name__)},
            "examples": {name: {"summary": name, "value": value} for name, value in examples.items()},
        }
    }
    ok: dict[str, Any] = {"model": answer, "description": "the answer"}
    if stream is not None:
        ok |= {"description": f"the answer; {stream}", "content": {"text/event-stream": {}}}
    described = {status: {"model": error, "description": text} for status, text in {**_ERRORS, **errors}.items()}
    return {
        "responses": {200: ok, **described},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


_KEY_SCHEME = "key"  # page/docs.js gives swagger-ui the key under this name


def complete_schema(app: FastAPI, model_name: str, is_open: Callable[[str, str], bool] | None = None) -> None:
    """Adds the request models, which no route declares as parameters, and the served model's name. is_open(method,
    path): what needs no key; None where nothing needs one."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = generate()
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        for model in _REQUESTS:
            definition = model.model_json_schema(ref_template=_REF)
            components.update(definition.pop("$defs", {}))
            components[model.__name__] = definition
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
