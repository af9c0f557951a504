"""The Triton models preprocessing and postprocessing as modules of this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from charonia_client import GenerateRequest, Tokenized, TokenizeRequest
from charonia_client.types import as_json

from charonia import _engine
from charonia.errors import InvalidRequestError, ModelError
from charonia.text import prompt_ids
from charonia.triton_models import source_dir
from charonia.weights import workspace


def _modules(*names: str) -> list[Any]:
    """Import modules of the Triton models. They import each other like files in one folder, as in a workspace."""
    folders = [source_dir() / name for name in ("preprocessing", "postprocessing")]
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in (*folders, Path(prompt_ids.__file__).parent)]
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path[:] = before


class TextModels:
    """The text models of a workspace. At most one thread may call prepare() and tokenize(); the event loop the rest.

    limit: tokens of the longest sequence. environment: settings by variable. Raises ModelError for an unusable
    tokenizer, and InvalidRequestError for a setting that names an unknown format.
    """

    def __init__(self, location: workspace.Location, limit: int, environment: Mapping[str, str]) -> None:
        assert location.weights and location.tokenizer
        self._prepare, self._prompt, ids, lengths, detokenize, identity = _modules(
            "prepare", "prompt", "prompt_ids", "context_length", "detokenize", "model_fingerprint"
        )
        ids.tokenizers_alone = prompt_ids.tokenizers_alone
        try:
            tokenizer = ids.load_tokenizer(location.tokenizer)
        except ids.TokenizerError as error:
            raise ModelError(str(error)) from error
        try:
            guide_bytes = lengths.guide_max_bytes(location.weights, Path(), environment)
            task = lengths.model_task(location.weights)
            self._preparation = self._prepare.Preparation(tokenizer, environment, limit, guide_bytes, task)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        self._table = detokenize.TokenTable.load(location.weights / workspace.TOKEN_TABLE)
        settings = (
            location.weights,
            Path(),
            {**environment, identity.ENGINE_BUILD: workspace.sha256(Path(_engine.__file__))},
        )
        self.model_info: dict[str, Any] = {
            **lengths.model_info(*settings, limit),
            "fingerprint": identity.fingerprint(*settings, location.tokenizer),
        }
        self.answer_formats: dict[str, Any] = self._preparation.formats.describe()

    def prepare(self, request: GenerateRequest) -> Any:
        """Preprocess a request; returns prepare.Prepared. Raises ValueError if the request is wrong."""
        given = self._prepare.Fields().guide
        guide = type(given)(request.guide.type, request.guide.text) if request.guide else given
        return self._preparation.prepare(
            self._prepare.Fields(
                **_prompt_fields(request),
                tool_choice=None if request.tool_choice is None else as_json(request.tool_choice),
                parallel_tool_calls=request.parallel_tool_calls is not False,
                any_arguments=request.any_arguments,
                prompt_time=request.prompt_time,
                stop_words=request.stop_words,
                bad_words=request.bad_words,
                logit_bias=as_json(dict(request.logit_bias)) if request.logit_bias else None,
                exclude_input_in_output=not request.echo,
                guide=guide,
                session_id=request.session_id or "",
                interactive=request.interactive,
                pooling=request.pooling or "",
            )
        )

    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Tokenize a request. Raises ValueError if the request is wrong."""
        made = self._preparation.prepare(
            self._prepare.Fields(
                **_prompt_fields(request),
                add_special_tokens=request.add_special_tokens,
                exclude_input_in_output=request.prompt_token_ids is None,
            )
        )
        tokens = list(made.chat.token_ids)
        strings = None
        if request.with_strings:
            strings = self._prompt.token_strings(self._preparation.tokenizer, tokens)
        return Tokenized(tokens, made.echo, self._preparation.limit, strings)

    def tokenizer_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._prompt.tokenizer_info(self._preparation.tokenizer)
        return info

    def token_bytes(self, ids: Sequence[int]) -> tuple[bytes, ...]:
        """Return the bytes of each token; empty for special tokens."""
        return tuple(map(self._table.piece, ids))

    def look_up(self, ids: Sequence[int]) -> tuple[list[bytes], list[bool]]:
        """Return the bytes of each token, and whether it is special."""
        found: tuple[list[bytes], list[bool]] = self._table.lookup(np.array(ids, np.int32))
        return found


def _prompt_fields(request: GenerateRequest | TokenizeRequest) -> dict[str, Any]:
    return {
        "text_input": request.text,
        "prompt_token_ids": request.prompt_token_ids,
        "messages": None if request.messages is None else as_json(request.messages),
        "tools": as_json(request.tools) if request.tools else None,
        "chat_template_kwargs": as_json(request.chat_template_kwargs) if request.chat_template_kwargs else None,
        "continue_final_message": request.continue_final_message,
    }
