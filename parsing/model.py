"""Triton Python model `parsing`: tokens become text, reasoning and calls of tools. Tensors as in docs/contracts.md.

One instance: it remembers how far it has read each answer. The ensemble runs it only for requests that ask for one of
its outputs, and nothing is loaded before the first of these.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detokenize import TextTokens, TokenTable
from model_log import ModelLog


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.log = ModelLog("parsing", pb_utils.Logger.log_info, pb_utils.Logger.log_error)
        folder = Path(args["model_repository"]) / args["model_version"] / "tokenizer"
        self.file = folder / "token_table.safetensors"
        if not self.file.is_file():
            raise pb_utils.TritonModelException(
                f"the token table {self.file} is missing: convert the model again with charonia convert"
            )
        self.answers: Any = None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(self._outputs(request))
        except Exception as error:
            text = self.log.failed(error, request.request_id())
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL))

    def _outputs(self, request: Any) -> list[Any]:
        if self.answers is None:
            from parse import Answers

            self.answers = Answers(TokenTable.load(self.file))
        options = _values(request, "parsing_options")[0].decode()
        tokens = TextTokens.of(_values(request, "text_tokens"))
        part = self.answers.read(
            options,
            tokens.sequence,
            tokens.ids.tolist(),
            (tokens.begin, tokens.end),
            last=tokens.last,
            cut_off=tokens.cut_off,
        )
        return [
            _text("content_output", part.content),
            _text("reasoning_output", part.reasoning),
            _text("tool_calls", json.dumps(part.calls)),
            pb_utils.Tensor("num_reasoning_tokens", np.array([part.num_reasoning_tokens], np.int32)),
        ]


def _values(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)


def _text(name: str, text: str) -> Any:
    return pb_utils.Tensor(name, np.array([text.encode()], np.object_))
