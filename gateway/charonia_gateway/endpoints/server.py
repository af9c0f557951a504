"""The interface of an endpoint's server: charonia_client's Client for a Triton server, or an engine without Triton."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from charonia_client import GenerateRequest, GenerateResponse, Progress, Tokenized, TokenizeRequest


class Server(Protocol):
    """The methods of charonia_client.Client, with the same errors. Each method raises CharoniaError."""

    target: str

    def generate(
        self,
        request: GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[GenerateResponse, None]: ...

    def move(self, request_id: str) -> None: ...

    async def stop(self, request_id: str = "", *, session_id: str = "") -> None: ...

    async def cancel(self, request_id: str = "", *, session_id: str = "") -> None: ...

    async def until_over(self, request_id: str) -> None: ...

    async def end_session(self, session_id: str) -> None: ...

    async def tokenize(self, request: TokenizeRequest) -> Tokenized: ...

    async def tokenizer_info(self) -> dict[str, Any]: ...

    async def quality(self, timeout_s: float = ...) -> list[dict[str, Any]]: ...

    async def model_info(self, timeout_s: float = ...) -> dict[str, Any]: ...

    async def answer_formats(self, timeout_s: float = ...) -> dict[str, Any]: ...

    async def check(self, timeout_s: float = ...) -> None: ...

    async def close(self) -> None: ...
