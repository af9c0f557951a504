"""Requests that agents and client libraries sent to a stub (tests/data/agent_requests.json), and their gateway types.
Long texts are cut. The stub's responses had reasoning, calls with arguments that are cut off, and calls of
unknown tools. The tools returned errors and images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from charonia_client import GenerateRequest
from charonia_gateway.body import parse
from charonia_gateway.schemas.messages import MessagesRequest
from charonia_gateway.schemas.openai_responses import ResponsesRequest
from charonia_gateway.schemas.requests import ChatRequest
from charonia_gateway.schemas.response_input import conversation

RECORDED: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "agent_requests.json").read_text())
AgentRequest = ChatRequest | MessagesRequest | ResponsesRequest
TYPES: dict[str, type[AgentRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
}


def recorded() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a name, the path and the body of each request."""
    for client, found in RECORDED.items():
        for number, body in enumerate(found["bodies"]):
            yield f"{client}, request {number}", found["path"], body


def earlier_turns(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the body as the client sent it at each turn: its history up to each response of the model, and the body."""
    field = "messages" if "messages" in body else "input"
    for at, (one, next) in enumerate(zip(body[field], [*body[field][1:], {"role": "assistant"}], strict=True)):
        if is_of_model(next) and not is_of_model(one):
            yield {**body, field: body[field][: at + 1]}


def is_of_model(message: dict[str, Any]) -> bool:
    return message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")


def read(path: str, body: dict[str, Any]) -> AgentRequest:
    return parse(TYPES[path], json.dumps(body).encode())


def engine_request(request: AgentRequest) -> GenerateRequest:
    if isinstance(request, ResponsesRequest):
        return request.engine_request(conversation((), request.input), None, reasons=True)
    return request.engine_request(reasons=True)
