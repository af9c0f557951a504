"""An engine in this process, with the methods that the gateway uses on a Triton server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from charonia_client import (
    BadRequest,
    DeadlineExceeded,
    GenerateRequest,
    GenerateResponse,
    NotFound,
    NotReady,
    Progress,
    ServerError,
    Timings,
    Tokenized,
    TokenizeRequest,
    Unavailable,
)
from charonia_client import CharoniaError as ClientError
from charonia_client.contract import SCALARS
from charonia_client.errors import from_triton
from charonia_client.parsing import ResponseParser
from charonia_client.tensors import encode, encode_tokenize, with_arithmetic
from charonia_client.types import TopToken

from charonia import _engine, errors, guide_library
from charonia.api.prompts import native_sampling
from charonia.api.results import SamplingParams
from charonia.api.sampling_fields import VALUES
from charonia.web.text_models import TextModels
from charonia.weights import workspace
from charonia.weights.cache_warnings import cache_warnings
from charonia.weights.fingerprint import VERSION

Made = TypeVar("Made")

# The status codes of the Triton backend (docs/contracts.md).
_CODES: dict[type[errors.CharoniaError], int] = {
    errors.InvalidRequestError: 400,
    errors.NotFoundError: 404,
    errors.OverloadedError: 429,
    errors.EngineClosedError: 503,
    errors.DeadlineExceededError: 504,
}


def _to_client(error: errors.CharoniaError) -> ClientError:
    code = _CODES.get(type(error))
    return from_triton(f"[{code}] {error}") if code else ServerError(str(error))


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except errors.CharoniaError as error:
        raise _to_client(error) from error
    except ValueError as error:  # PromptError, and numbers that do not fit into a tensor
        raise BadRequest(str(error)) from error


@dataclass
class _Running:
    session_id: str | None
    results: asyncio.Queue[_engine.Result | ClientError] = field(default_factory=asyncio.Queue)
    handle: int | None = None  # None: not submitted yet


class EngineServer:
    """Implements charonia_gateway.endpoints.Server. Loads the workspace at `location`. `name` is used in messages,
    `settings` are keys of config.ini, `environment` is passed to TextModels. All methods are for one event loop. Raises
    the errors of charonia.Engine.
    """

    def __init__(
        self, name: str, location: workspace.Location, settings: Mapping[str, str], environment: Mapping[str, str]
    ) -> None:
        assert location.weights
        self.target = f"the engine of {name}"
        self._weights = location.weights
        os.environ.update(guide_library.environment(os.environ))
        self._native = _engine.Engine(location.weights, dict(settings))
        self.info = self._native.info()
        self.info.warnings = [*cache_warnings(location.weights, settings), *self.info.warnings]
        try:
            chosen = {f"CHARONIA_{key.upper()}": value for key, value in settings.items()}
            self._text = TextModels(location, self.info.session_len, {**environment, **chosen})
        except BaseException:
            self._native.shutdown(0)
            raise
        # A tokenizer is for one thread at a time, and long texts must not delay the streams.
        self._thread = ThreadPoolExecutor(1, "text")
        self._active: dict[str, _Running] = {}
        self._over = ""  # why the engine accepts no requests any more

    def shutdown(self) -> None:
        """Cancel all requests and free the model. Can be called again."""
        self._native.shutdown(0)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def close(self) -> None:
        """Like shutdown(), but waiting callers receive an error."""
        self._over = "the engine is shutting down"
        for running in self._active.values():
            running.results.put_nowait(Unavailable(self._over))
        await asyncio.to_thread(self.shutdown)

    async def until_over(self, request_id: str) -> None:
        """Returns immediately: a closed iterator has cancelled its request."""

    def move(self, request_id: str) -> None:
        """Does nothing: there is no other server."""

    async def generate(
        self,
        request: GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        request_id = request_id or str(uuid.uuid4())
        await self.check()
        if progress:
            progress.identify(await self.model_info())
        running = self._active[request_id] = _Running(request.session_id)
        deadline = None
        if timeout_s is not None:
            late = DeadlineExceeded(f"the engine did not answer in time ({max(0, round(timeout_s, 2)):g} s)")
            deadline = asyncio.get_running_loop().call_later(timeout_s, running.results.put_nowait, late)
        left = request.n or 1  # responses that have not ended
        parser = ResponseParser(request, self._text.answer_formats) if request.parsed else None
        echoed: set[int] = set()  # responses whose first part was sent
        try:
            made = await self._in_thread(lambda: self._prepare(request, request_id))
            with _translated():
                self._submit(request, made, request_id, running)
            while left:
                result = await running.results.get()
                if isinstance(result, ClientError):
                    raise result
                if result.finish_reason == "error":
                    error = getattr(errors, result.error_class)(result.error)
                    if isinstance(error, errors.EngineClosedError):
                        self._over = str(error)
                    raise _to_client(error)
                left -= bool(result.finish_reason)
                only_progress = result.num_computed_tokens > 0
                first = result.index not in echoed and not only_progress
                response = self._response(request, made, result, first=first)
                if parser:
                    parser.parse(response, in_reasoning=made.in_reasoning)
                yield response
                if not only_progress:
                    echoed.add(result.index)
        finally:
            if deadline:
                deadline.cancel()
            self._active.pop(request_id, None)
            if left and running.handle is not None and not self._over:
                self._native.cancel(running.handle)

    def _prepare(self, request: GenerateRequest, request_id: str) -> Any:
        with _translated():
            encode(request, request_id, "ensemble")  # rejects values that do not fit into Triton's tensors
            return self._text.prepare(request)

    def _submit(self, request: GenerateRequest, made: Any, request_id: str, running: _Running) -> None:
        given = {name: getattr(request, name) for name in SCALARS if name in VALUES}
        sampling = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            stop=list(made.stop_words),
            end_ids=request.end_id,
            thinking_begin_ids=made.thinking[0],
            thinking_end_ids=made.thinking[1],
            thinking_call_ids=made.thinking_calls,
            thinking_begun=made.in_reasoning,
            bad_words=made.bad_words,
            logit_bias=dict(zip(made.bias_ids, made.bias_values, strict=True)),
            logprobs=request.logprobs,
        )
        loop = asyncio.get_running_loop()

        def deliver(result: _engine.Result) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(running.results.put_nowait, result)

        running.handle = self._native.submit(
            id=request_id,
            input_ids=made.chat.token_ids,
            sampling=native_sampling(lambda: None, sampling, self.info.default_sampling),
            priority=request.priority or 0,
            stream=request.stream,
            strip_leading_space=made.chat.strip_leading_space,
            session_id=request.session_id or "",
            continuation_ids=made.chat.continuation_ids,
            end_session=request.end_session,
            timeout_ms=request.timeout_ms,
            guide=(made.guide.type, made.guide.text) if made.guide.type else None,
            cache_salt=request.cache_salt or "",
            owner=request.owner or "",
            stop_until=made.stop_until,
            fit_max_tokens=bool(request.fit_max_tokens),
            prompt_progress=bool(request.prompt_progress),
            lora_name=request.lora_name or "",
            pooling=request.pooling or "",
            dimensions=request.dimensions or 0,
            callback=deliver,
        )

    def _response(
        self, request: GenerateRequest, made: Any, result: _engine.Result, *, first: bool
    ) -> GenerateResponse:
        """first: whether this is the first part of a response."""
        response = GenerateResponse(
            (made.echo if first else "") + result.text,
            tuple(result.token_ids),
            result.finish_reason or None,  # type: ignore[arg-type]  # the engine's names
            result.num_input_tokens,
            result.num_output_tokens,
            result.num_cached_tokens,
            Timings(*result.timings),
            token_bytes=self._text.token_bytes(result.token_ids),
            text_span=(result.text_begin, result.text_end),
            index=result.index,
            cum_logprob=result.cumulative_logprob,
            num_session_tokens=result.num_session_tokens,
            num_computed_tokens=result.num_computed_tokens,
            num_proposed_tokens=result.num_proposed_tokens,
            num_accepted_tokens=result.num_accepted_tokens,
            pooled=result.pooled,
        )
        if request.logprobs is not None:
            response.logprobs = tuple(result.logprobs)
            response.top_logprobs = self._tops(result.top_logprobs, len(result.logprobs))
        if request.prompt_logprobs is not None and first and result.index == 0:
            response.prompt_ids = tuple(made.chat.token_ids)
            response.prompt_logprobs = tuple(result.prompt_logprobs)
            response.prompt_tokens, response.prompt_special = self._text.look_up(made.chat.token_ids)
            response.prompt_top_logprobs = self._tops(result.prompt_top_logprobs, len(result.prompt_logprobs))
        if request.name_stop_word and response.finish_reason == "stop":
            response.stop_word = response.find_stop_word(request.stop_words)
        return response

    def _tops(self, rows: Sequence[Sequence[tuple[int, float]]], count: int) -> list[list[TopToken]]:
        """Return a row for each of `count` tokens. The engine returns no rows if none were requested."""
        names = iter(self._text.look_up([id for row in rows for id, _ in row])[0])
        return [[TopToken(*entry, next(names)) for entry in row] for row in rows] or [[] for _ in range(count)]

    async def stop(self, request_id: str = "", *, session_id: str = "") -> None:
        for handle in self._handles(request_id, session_id):
            self._native.stop(handle)

    async def cancel(self, request_id: str = "", *, session_id: str = "") -> None:
        for handle in self._handles(request_id, session_id):
            self._native.cancel(handle)

    def _handles(self, request_id: str, session_id: str) -> list[int]:
        return [
            running.handle
            for id, running in self._active.items()
            if running.handle is not None and (id == request_id or (session_id and running.session_id == session_id))
        ]

    async def end_session(self, session_id: str) -> None:
        await self.check()
        with _translated():
            self._native.end_session(session_id)

    async def load_adapter(self, name: str, path: str) -> list[dict[str, Any]]:
        def run() -> None:
            with _translated():
                try:
                    self._native.load_adapter(name, Path(path))
                except errors.UnsupportedError as error:  # the client can use another adapter
                    raise errors.InvalidRequestError(str(error)) from error

        await self.check()
        await asyncio.to_thread(run)
        return await self.adapters()

    async def unload_adapter(self, name: str) -> list[dict[str, Any]]:
        await self.check()
        if not self._native.unload_adapter(name):
            raise NotFound(self._native.no_adapter(name))
        return await self.adapters()

    async def adapters(self, timeout_s: float = 0) -> list[dict[str, Any]]:
        return [
            {
                "name": one.name,
                "path": one.folder,
                "fingerprint": one.fingerprint,
                "rank": one.max_rank,
                "bytes": one.bytes,
            }
            for one in self._native.adapters()
        ]

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        def run() -> Tokenized:
            with _translated():
                encode_tokenize(request, "preprocessing")
                return self._text.tokenize(request)

        await self.check()
        return await self._in_thread(run)

    async def tokenizer_info(self) -> dict[str, Any]:
        return self._text.tokenizer_info()

    async def quality(self, timeout_s: float = 0) -> list[dict[str, Any]]:
        """timeout_s: only used by remote servers."""
        manifest = await asyncio.to_thread(workspace.read_manifest, self._weights)
        records = manifest.quality if isinstance(manifest.quality, list) else []
        # A server of another version may have stored its own fingerprint in the manifest.
        own = (None, "", manifest.weights)
        return [
            one
            for one in records
            if isinstance(one, dict) and (one.get("weights") in own or str(one["weights"]).startswith(VERSION))
        ]

    async def model_info(self, timeout_s: float = 0) -> dict[str, Any]:
        return with_arithmetic(self._text.model_info, self.info.arithmetic.encode(), self.info.deterministic)

    async def answer_formats(self, timeout_s: float = 0) -> dict[str, Any]:
        return self._text.answer_formats

    async def check(self, timeout_s: float = 0) -> None:
        if self._over:
            raise NotReady(self._over)

    async def _in_thread(self, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)
