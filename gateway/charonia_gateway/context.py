"""What the routes share: settings, engine, and each request's head."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from charonia_client import GenerateRequest, GenerateResponse
from fastapi import Depends, Request

from charonia_gateway import __version__
from charonia_gateway.body import IGNORED_HEADER, ignored_fields, parse, read_body
from charonia_gateway.drain import Drain
from charonia_gateway.engine import Engine
from charonia_gateway.errors import ApiError
from charonia_gateway.metrics import Metrics
from charonia_gateway.schemas.interactive import InteractiveRequest
from charonia_gateway.schemas.requests import Sampling
from charonia_gateway.settings import Settings

Body = TypeVar("Body", bound=Sampling | InteractiveRequest)


@dataclass
class Gateway:
    """The state of the application."""

    settings: Settings
    engine: Engine
    metrics: Metrics
    drain: Drain
    started: int  # seconds since the epoch

    @property
    def system_fingerprint(self) -> str:
        """Changes when answers may: with the model's name and the version."""
        text = f"{self.settings.model_name} {__version__}"
        return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def check_model(self, name: str) -> None:
        """ApiError 404 for a model that is not served."""
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist; this server has {self.settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The checked body of a request for text. ApiError 400, 404, 413 or 415."""
        body = parse(model, await read_body(request, self.settings.max_body_bytes))
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_choices(self, requests: Sequence[GenerateRequest]) -> None:
        choices = sum(max(request.n or 1, request.best_of or 1) for request in requests)
        if choices > self.settings.max_choices:
            raise ApiError(
                400,
                f"prompts times n (or best_of) are {choices} answers: ask for at most {self.settings.max_choices} at "
                "once",
                param="n",
                code="invalid_value",
            )


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


GatewayState = Annotated[Gateway, Depends(gateway_of)]


class Head:
    """The fields that all parts of one answer share."""

    def __init__(self, gateway: Gateway, body: Sampling | InteractiveRequest, prefix: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.fields = {
            "id": self.id,
            "object": "",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": gateway.system_fingerprint,
        }
        self.headers = {"x-request-id": self.id}
        if ignored := ignored_fields(body):
            self.headers[IGNORED_HEADER] = ", ".join(ignored)

    def of(self, kind: str, **more: Any) -> dict[str, Any]:
        return {**self.fields, "object": kind, **more}


class Usage:
    """Token counts over all choices; a prompt counts once however many choices it has."""

    def __init__(self, choices_per_prompt: int, choices: int, *, prompt_only: bool = False) -> None:
        self._per_prompt = choices_per_prompt
        self._last: list[GenerateResponse | None] = [None] * choices
        self._prompt_only = prompt_only  # what was generated counts for nothing

    def see(self, index: int, response: GenerateResponse) -> None:
        self._last[index] = response

    def to_json(self) -> dict[str, Any]:
        prompts = [last for last in self._last[:: self._per_prompt] if last]
        prompt_tokens = sum(last.num_input_tokens for last in prompts)
        completion_tokens = sum(last.num_output_tokens for last in self._last if last and not self._prompt_only)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(last.num_cached_tokens for last in prompts)},
        }
