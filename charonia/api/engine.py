"""The Python API of an engine that runs a model in this process."""

from __future__ import annotations

import functools
import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from charonia import _engine, guide_library
from charonia.api.guides import Guide
from charonia.api.prompts import Prompt, encode, native_sampling, refused, split
from charonia.api.results import Chunk, Messages, Output, SamplingParams
from charonia.api.streams import AsyncStream, Gathering, Stream, Submit, chunk_of
from charonia.engine_settings import Setting, spell_settings
from charonia.errors import (
    EngineClosedError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    OverloadedError,
    named_as_given,
)
from charonia.progress import Progress
from charonia.text.prompt_ids import Encoded, encode_pair, encode_text
from charonia.text.tokenizer import load_tokenizer, prepare_tokenizer
from charonia.weights import workspace
from charonia.weights.adapters import locate_adapter
from charonia.weights.cache_warnings import cache_warnings
from charonia.weights.convert import Source, read_source, write_weights
from charonia.weights.draft_model import draft_of, draft_settings, reads_head
from charonia.weights.mtp import mtp_of
from charonia.weights.task import setting_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

__all__ = ["AsyncStream", "Engine", "Stream"]


class Engine:
    """A loaded model. Every method may be called from any thread, and from any number of event loops.

        with Engine.from_pretrained("models/demo", threads=2) as engine:
            print(engine.generate("Hello")[0].text)

    Errors: InvalidRequestError (the request is wrong; the text says what would be right), OverloadedError (the queue is
    full, or the request waited too long in it), DeadlineExceededError (after its timeout), EngineClosedError (after
    close, or after a step has failed: then start a new process).
    """

    def __init__(
        self,
        weights: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> None:
        """Load a `weights` folder (docs/contracts.md). Most callers use from_pretrained instead.

        tokenizer: a folder with the tokenizer, needed for texts and chats. settings: keys of config.ini. They override
        CHARONIA_<KEY> of the environment, which overrides config.ini.
        """
        overrides = {**_engine.settings_from_environment(), **spell_settings(settings or {})}
        self._tokenizer_folder = None if tokenizer is None else Path(tokenizer)
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._tokenizer_lock = threading.Lock()
        os.environ.update(guide_library.environment(os.environ))
        native = _engine.Engine(Path(weights), overrides)
        self._native: _engine.Engine | None = native
        self.info: _engine.EngineInfo = native.info()
        self.info.warnings = [*cache_warnings(Path(weights), overrides), *self.info.warnings]
        # Also runs at interpreter exit, so that no callback runs during finalization.
        self._finalizer = weakref.finalize(self, native.shutdown, 0)

    @classmethod
    def from_pretrained(
        cls, model: str | os.PathLike[str], *, dtype: str = "auto", show_progress: bool = False, **config: Setting
    ) -> Engine:
        """Load a workspace, a Hugging Face folder, a GGUF file or a hub id.

        dtype: auto | bf16 | fp16 | fp32, for a Hugging Face folder; a workspace has a fixed type. In a quantised model
        it is the type of activations and of weights that are not quantised. config: keys of config.ini;
        speculative_model may be anything that `model` may be. Raises ModelError, UnsupportedError or
        InvalidRequestError with advice for the user.
        """
        given = {**_engine.settings_from_environment(), **spell_settings(config)}
        progress = Progress(show_progress)
        # The engine maps the weight files directly and reads the other files while loading, so the folders are
        # temporary.
        with ExitStack() as loaded:
            location = loaded.enter_context(workspace.located(model))
            if draft := draft_of(given):
                folder = _draft_weights(draft, reads_head(given), progress, loaded)
                loaded.enter_context(named_as_given(folder, draft))
                config |= draft_settings(given, folder)
            if location.weights is not None:
                if dtype != "auto":
                    raise InvalidRequestError(
                        f"dtype {dtype!r}: a workspace has its own weight type; convert the model with --dtype {dtype}"
                    )
                return cls(location.weights, location.tokenizer, config)
            source = read_source(location.path, dtype, setting_of(given), mtp=mtp_of(given))
            # write_weights needs only the number of ranks; the engine reads all other settings.
            ranks = {key: value for key, value in given.items() if key == "tensor_para_size"}
            weights = _write_temporary(source, ranks, progress, loaded)
            tokenizer = None
            if source.spec.config.model_task != "generate":
                tokenizer = load_tokenizer(location.path)
                prepare_tokenizer(location.path, tokenizer, source.spec)
            engine = cls(weights, location.tokenizer, config)
            engine._tokenizer = tokenizer
            return engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the model's Hugging Face tokenizer; loaded on first use."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if self._tokenizer_folder is None:
                    raise ModelError("this engine has no tokenizer: pass token ids, or load it with a tokenizer folder")
                self._tokenizer = load_tokenizer(self._tokenizer_folder)
            return self._tokenizer

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text (with the tokenizer's beginning token) or of a chat (with its template)."""
        return encode(lambda: self.tokenizer, prompt).token_ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        session_id: str = "",
        new_session: bool = False,
        end_session: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        guide: Guide | None = None,
        cache_salt: str = "",
        lora: str | Sequence[str] = "",
    ) -> list[Output]:
        """Run all prompts together and wait for them. Outputs are in the order of the prompts. With n > 1 each prompt
        has n adjacent outputs, numbered by `index`, like OpenAI's `choices`.

        prompts: a text, token ids, chat messages, or a list of these. sampling: one for all prompts, or one for each.
        If there are more prompts than the queue holds, the rest is submitted when the queue has room. An error cancels
        all other prompts.

        session_id: the prompt continues this session, whose history the engine keeps. A session that is new or was
        evicted starts with the prompt. new_session: restart the session; the prompt is the whole conversation.
        end_session: delete the session afterwards. timeout: seconds until DeadlineExceededError. priority: higher
        values run first. guide: the required format of all outputs. cache_salt: at most 256 bytes of UTF-8; prefix
        cache hits occur only between requests with the same salt. lora: the name of a loaded adapter
        (`load_adapter`), one for all prompts, or one for each; empty: none.
        """
        given_prompts = split(prompts)
        if session_id and len(given_prompts) != 1:
            raise InvalidRequestError(
                f"{len(given_prompts)} prompts for one session_id; a session takes one prompt at a time"
            )
        options = _Options(Session(session_id, new_session, end_session), timeout, priority, guide, cache_salt, "")
        encoded = [self._encode(prompt, options.session) for prompt in given_prompts]
        given = sampling or SamplingParams()
        each = [given] * len(encoded) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(encoded):
            raise InvalidRequestError(
                f"{len(each)} sampling parameters for {len(encoded)} prompts; expected one for each"
            )
        loras = [lora] * len(encoded) if isinstance(lora, str) else list(lora)
        if len(loras) != len(encoded):
            raise InvalidRequestError(f"{len(loras)} adapters for {len(encoded)} prompts; expected one for each")
        submits = (
            (self._submitter(prompt, params, replace(options, lora=adapter), stream=False), params.n)
            for prompt, params, adapter in zip(encoded, each, loras, strict=True)
        )
        chunks = self._gather(submits)
        return [_output(prompt, chunk) for prompt, own in zip(encoded, chunks, strict=True) for chunk in own]

    def embed(
        self, inputs: str | Sequence[int] | Sequence[str | Sequence[int]], *, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """Return the embeddings of all inputs, [inputs, dimensions]. inputs: a text, token ids, or a list of these.
        dimensions: only the first numbers, of length 1 again. Raises InvalidRequestError if the model gives no
        embeddings (the setting `task`)."""
        encoded = [self._encode_pooled(one) for one in split(inputs)]
        return np.array(self._pool("embed", encoded, dimensions or 0), np.float32)

    def score(self, query: str, documents: Sequence[str], *, instruction: str | None = None) -> list[float]:
        """Return the score of each document for a query, by a reranker. instruction: replaces the template's own.
        Raises InvalidRequestError if the model gives no scores (the setting `task`)."""
        system = [] if instruction is None else [{"role": "system", "content": instruction}]
        limit = self.info.session_len
        with refused():
            encoded = [
                encode_pair(
                    self.tokenizer,
                    [*system, {"role": "query", "content": query}, {"role": "document", "content": document}],
                    limit,
                )
                for document in documents
            ]
        return [score for (score,) in self._pool("score", encoded, 0)]

    def _encode_pooled(self, given: Prompt) -> Encoded:
        if not isinstance(given, str):
            return encode(lambda: self.tokenizer, given)
        with refused():
            return encode_text(self.tokenizer, "input", given, limit=self.info.session_len)

    def _pool(self, task: str, inputs: Sequence[Encoded], dimensions: int) -> list[list[float]]:
        """Return the embeddings or scores of inputs."""
        native, sampling = self._open(), self._native_sampling(SamplingParams())

        def submitter(prompt: Encoded) -> Submit:
            submit: Any = functools.partial(
                native.submit,
                id="",
                input_ids=prompt.token_ids,
                sampling=sampling,
                priority=0,
                stream=False,
                strip_leading_space=False,
                pooling=task,
                dimensions=dimensions,
            )
            return lambda callback: int(submit(callback=callback))

        chunks = [chunk for (chunk,) in self._gather((submitter(prompt), 1) for prompt in inputs)]
        if any(chunk.finish_reason == "cancelled" for chunk in chunks):
            raise EngineClosedError("the engine was closed while it computed embeddings or scores")
        return [chunk.pooled for chunk in chunks]

    def _gather(self, submits: Iterable[tuple[Submit, int]]) -> list[list[Chunk]]:
        """Submit requests, each with its number of sequences, and wait for all of them. If the queue is full, the rest
        is submitted when it has room. An error cancels all others."""
        chunks: dict[int, list[Chunk]] = {}
        gathering = Gathering(self._open())
        try:
            for index, (submit, sequences) in enumerate(submits):
                while index not in chunks:
                    try:
                        gathering.submit(index, submit, sequences)
                        break
                    except OverloadedError:
                        if not len(gathering):
                            raise
                        finished, answers = gathering.wait()
                        chunks[finished] = answers
            while len(gathering):
                finished, answers = gathering.wait()
                chunks[finished] = answers
        finally:
            gathering.cancel()
        return [chunks[index] for index in sorted(chunks)]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        session_id: str = "",
        new_session: bool = False,
        end_session: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        guide: Guide | None = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> Stream:
        """Submit the request immediately and return an iterator over its chunks. Leaving the loop early (break, close,
        an exception) cancels the request.

        A cancelled turn of a session is removed from its history; `Stream.stop` ends it early and keeps it. For the
        other arguments see `generate`.
        """
        session = Session(session_id, new_session, end_session)
        options = _Options(session, timeout, priority, guide, cache_salt, lora, request_id)
        return Stream(*self._streaming(prompt, sampling or SamplingParams(), options))

    def astream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str = "",
        session_id: str = "",
        new_session: bool = False,
        end_session: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        guide: Guide | None = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> AsyncStream:
        """Same as `stream`, on the running event loop: `async for chunk in engine.astream(...)`."""
        session = Session(session_id, new_session, end_session)
        options = _Options(session, timeout, priority, guide, cache_salt, lora, request_id)
        return AsyncStream(*self._streaming(prompt, sampling or SamplingParams(), options))

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        session_id: str = "",
        guide: Guide | None = None,
        cache_salt: str = "",
        lora: str = "",
    ) -> Output:
        """Return the response to a conversation. With a session_id, pass only the new messages: the engine keeps the
        earlier ones. An unknown session starts with these messages."""
        options: dict[str, Any] = {"session_id": session_id, "guide": guide, "cache_salt": cache_salt, "lora": lora}
        return self.generate(messages, sampling, **options)[0]

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield the logits of a prompt, in pieces as they are computed: (position, rows [n, vocab_size]).

        Row i is at position + i of the prompt and predicts the next token. Every position except the last has one row,
        in order. A piece has at most max_batch_size rows. Unread rows are kept in memory, at most 4 GiB; beyond this
        the request ends with OverloadedError. Closing the iterator early cancels the request.
        """
        native = self._open()
        results: queue.SimpleQueue[_engine.Result] = queue.SimpleQueue()
        handle = native.submit(
            id="",
            input_ids=self._encode(token_ids, Session("", False, False)).token_ids,
            sampling=self._native_sampling(SamplingParams(max_tokens=1, prompt_logprobs=0)),
            priority=0,
            stream=True,
            strip_leading_space=False,
            prompt_logits=True,
            callback=results.put,
        )
        try:
            while True:
                result = results.get()
                if chunk_of(result).finish_reason == "cancelled":
                    raise EngineClosedError("the engine was closed while it computed the logits of a prompt")
                rows = result.prompt_logits
                if len(rows):
                    yield result.first_logits, rows
                if result.finish_reason:
                    return
        finally:
            native.cancel(handle)

    def end_session(self, session_id: str) -> bool:
        """Delete a session; returns False if it does not exist. A running request of it continues without a session."""
        return self._open().end_session(session_id)

    def sessions(self) -> list[_engine.SessionInfo]:
        """Return the stored sessions, by name."""
        return self._open().sessions()

    def load_adapter(self, name: str, adapter: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter under a name for requests: a folder of PEFT or a hub id. Requests run meanwhile.

        Raises ModelError, UnsupportedError or InvalidRequestError with advice for the user.
        """
        _check_text("name", name)
        self._open().load_adapter(name, locate_adapter(adapter))

    def unload_adapter(self, name: str) -> bool:
        """Unload an adapter; returns False for an unknown name. Its running requests end with it."""
        return self._open().unload_adapter(name)

    def adapters(self) -> list[_engine.AdapterInfo]:
        """Return the loaded adapters, by name."""
        return self._open().adapters()

    def stop(self, request_id: str) -> bool:
        """End every request with this id. In a session, the generated part of the turn stays in the history."""
        return self._open().stop_id(request_id)

    def cancel(self, request_id: str) -> bool:
        """Cancel every request with this id; returns False if there is none."""
        return self._open().cancel_id(request_id)

    def stats(self) -> _engine.EngineStats:
        """Return the current counters and gauges."""
        return self._open().stats()

    def kernel_report(self) -> list[str]:
        """Return the kernels that the device's operations use, one per line, with the GEMMs that cuBLASLt has rejected
        since the start. info.kernel_report is the report of the start. Empty on the CPU, which has no choice."""
        return self._open().kernel_report()

    def check_integrity(self) -> None:
        """Check the engine's internal state; raises InternalError with the problem."""
        self._open().check_integrity()

    def close(self, timeout: float = 0) -> None:
        """Accept no new requests, wait at most `timeout` seconds for running ones, cancel the rest, and free the
        model."""
        milliseconds = _milliseconds(timeout) if timeout else 0
        native, self._native = self._native, None
        if native is not None:
            native.shutdown(milliseconds)
            self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> _engine.Engine:
        native = self._native
        if native is None:
            raise EngineClosedError("the engine is closed")
        return native

    def _native_sampling(self, sampling: SamplingParams) -> _engine.SamplingParams:
        return native_sampling(lambda: self.tokenizer, sampling, self.info.default_sampling)

    def _encode(self, prompt: Prompt, session: Session) -> Encoded:
        limit = self.info.session_len
        return encode(lambda: self.tokenizer, prompt, interactive=session.goes_on, limit=limit)

    def _streaming(self, prompt: Prompt, params: SamplingParams, options: _Options) -> tuple[Any, Submit, Engine, int]:
        """Return the arguments of a stream."""
        submit = self._submitter(self._encode(prompt, options.session), params, options, stream=True)
        return self._open(), submit, self, params.n

    def _submitter(self, prompt: Encoded, params: SamplingParams, options: _Options, *, stream: bool) -> Submit:
        guide, timeout = options.guide, options.timeout
        submit: Any = functools.partial(
            self._open().submit,
            id=options.request_id,
            input_ids=prompt.token_ids,
            sampling=self._native_sampling(params),
            priority=options.priority,
            stream=stream,
            strip_leading_space=prompt.strip_leading_space,
            session_id=options.session.id,
            continuation_ids=prompt.continuation_ids,
            end_session=options.session.ends,
            timeout_ms=None if timeout is None else _milliseconds(timeout),
            guide=None if guide is None else (guide.type, guide.text),
            cache_salt=options.cache_salt,
            lora_name=options.lora,
        )

        def named(callback: Callable[[_engine.Result], None]) -> int:
            try:
                return int(submit(callback=callback))
            except NotFoundError as error:  # names the input of the Triton model
                raise NotFoundError(str(error).replace("lora_name", "lora", 1)) from None

        return named


@dataclass(frozen=True)
class Session:
    """The session fields of a request. An empty id means no session."""

    id: str
    begins: bool
    ends: bool

    def __post_init__(self) -> None:
        _check_text("session_id", self.id)
        if not self.id and (self.begins or self.ends):
            raise InvalidRequestError("new_session and end_session need a session_id")

    @property
    def goes_on(self) -> bool:
        return bool(self.id) and not self.begins


def _write_temporary(source: Source, settings: Mapping[str, str], progress: Progress, until: ExitStack) -> Path:
    """Write a weights folder that exists until `until` is closed."""
    for note in source.spec.notes:
        progress.warn(note)
    folder = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="charonia-")))
    write_weights(source, folder, link=source.linkable, settings=settings, progress=progress)
    return folder


def _draft_weights(model: str, head: bool, progress: Progress, until: ExitStack) -> Path:
    """Return a weights folder of the draft model or, with `head`, of the EAGLE-3 head."""
    location = until.enter_context(workspace.located(model))
    return location.weights or _write_temporary(read_source(location.path, head=head), {}, progress, until)


@dataclass(frozen=True)
class _Options:
    """The fields of a request besides its prompt and its sampling parameters."""

    session: Session
    timeout: float | None
    priority: int
    guide: Guide | None
    cache_salt: str
    lora: str
    request_id: str = ""

    def __post_init__(self) -> None:
        _check_text("request_id", self.request_id)
        _check_text("cache_salt", self.cache_salt)
        _check_text("lora", self.lora)
        priority, guide = self.priority, self.guide
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise InvalidRequestError(f"priority = {priority!r} is not valid: it must be a 32-bit integer")
        if guide is not None:
            if not isinstance(guide, Guide):
                raise TypeError(
                    f"guide = {guide!r} is not valid: use Guide.regex, Guide.json_schema or another method of Guide"
                )
            _check_text("guide", guide.text)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} = {value!r} is not valid: it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} = {value!r} is not valid: it must not contain a lone surrogate") from None


def _milliseconds(timeout: float) -> int:
    if not 0 < timeout <= 1e6:
        raise InvalidRequestError(f"timeout = {timeout} is out of range: it must be in seconds, > 0 and <= 1e6")
    return max(1, round(1000 * timeout))


def _output(prompt: Encoded, chunk: Chunk) -> Output:
    values = {**vars(chunk), "finish_reason": chunk.finish_reason or ""}
    return Output(prompt_token_ids=prompt.token_ids, **values)
