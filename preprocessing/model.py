"""Triton Python model `preprocessing`: converts a chat or a text to token ids. docs/contracts.md describes the
tensors."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parent))

import prompt
import prompt_ids
from answer_guide import Guide
from context_length import context_length, guide_max_bytes, model_info, model_task
from model_fingerprint import fingerprint
from model_log import ModelLog
from prepare import Fields, Preparation
from prompt_ids import PromptError, TokenizerError, load_tokenizer

# From this number of characters in a request on, free memory is returned to the system afterwards. The C library does
# not return free memory between used blocks by itself.
_LARGE = 1 << 20


class TritonPythonModel:
    """Stateless: any number of instances may run."""

    def initialize(self, args: dict[str, str]) -> None:
        self.log = ModelLog("preprocessing", pb_utils.Logger.log_info, pb_utils.Logger.log_error)
        folder = Path(args["model_repository"]) / args["model_version"] / "tokenizer"
        prompt_ids.tokenizers_alone = True
        # With several models, this model is preprocessing.LABEL, and its engine is engine.LABEL.
        engine = f"engine{args['model_name'].removeprefix('preprocessing')}"
        engine_config = Path(args["model_repository"]).parent / engine / "config.pbtxt"
        weights = folder.resolve().parent / "weights"
        settings = (weights, engine_config, os.environ)
        limit = context_length(*settings)
        groups = json.loads(args["model_config"])["instance_group"]
        self.info = {
            **model_info(*settings, limit),
            "fingerprint": fingerprint(*settings, folder),
            "instances": sum(group["count"] for group in groups),
        }
        try:
            tokenizer, guide_bytes = load_tokenizer(folder), guide_max_bytes(*settings)
            self.preparation = Preparation(tokenizer, os.environ, limit, guide_bytes, model_task(weights))
        except (TokenizerError, ValueError, OSError) as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self.large = False  # ends with the request
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # glibc's

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = [self._answer(request) for request in requests]
        if self.large:
            self.large = False
            self.trim(0)
        return responses

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(output_tensors=self._outputs(request))
        except PromptError as error:
            text = f"[400] {error}"
            self.log.request("rejected", request.request_id(), {"error": "invalid_argument"}, {"error_text": text})
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG))
        except Exception as error:
            text = self.log.failed(error, request.request_id())
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL))

    def _outputs(self, request: Any) -> list[Any]:
        wanted = set(request.requested_output_names())
        if wanted and wanted <= {"tokenizer_info", "answer_formats", "model_info"}:
            return self._described(wanted, [])
        began = time.perf_counter()
        fields = fields_of(request)
        given = (fields.text_input, fields.messages, fields.tools, fields.chat_template_kwargs)
        self.large |= sum(len(one or "") for one in given) > _LARGE
        made = self.preparation.prepare(fields)
        chat, guide = made.chat, made.guide
        if self.log.requests:
            count, ms = len(chat.token_ids), (time.perf_counter() - began) * 1000
            noted: dict[str, Any] = {"prompt_tokens": count, "duration_ms": round(ms, 3)}
            if guide.type:
                noted |= {"guide": guide.type, "guide_bytes": len(guide.text)}
            self.log.request(
                f"{count} tokens in {ms:.1f} ms", request.request_id(), noted, {"prompt": chat.text or chat.token_ids}
            )
        return [
            pb_utils.Tensor("input_ids", np.array(chat.token_ids, np.int32)),
            pb_utils.Tensor("continuation_ids", np.array(chat.continuation_ids, np.int32)),
            pb_utils.Tensor("bad_words_ids", np.array(prompt.pack_token_lists(made.bad_words), np.int32)),
            _texts_tensor("stop_words", made.stop_words),
            _texts_tensor("stop_until", made.stop_until),
            pb_utils.Tensor("logit_bias_ids", np.array(made.bias_ids, np.int32)),
            pb_utils.Tensor("logit_bias_values", np.array(made.bias_values, np.float32)),
            pb_utils.Tensor("strip_leading_space", np.array([chat.strip_leading_space])),
            pb_utils.Tensor("in_reasoning", np.array([made.in_reasoning])),
            pb_utils.Tensor("thinking_begin_ids", np.array(made.thinking[0], np.int32)),
            pb_utils.Tensor("thinking_end_ids", np.array(made.thinking[1], np.int32)),
            pb_utils.Tensor("thinking_call_ids", np.array(prompt.pack_token_lists(made.thinking_calls), np.int32)),
            pb_utils.Tensor("guided_decoding_guide_type", np.array([guide.type.encode()], np.object_)),
            pb_utils.Tensor("guided_decoding_guide", np.array([guide.text.encode()], np.object_)),
            pb_utils.Tensor("echo", np.array([made.echo.encode()], np.object_)),
            *self._described(wanted, chat.token_ids),
        ]

    def _described(self, wanted: set[str], token_ids: list[int]) -> list[Any]:
        """The requested outputs that describe the tokenizer and the chat template."""
        tensors = []
        if "token_strings" in wanted:
            strings = [name.encode() for name in prompt.token_strings(self.preparation.tokenizer, token_ids)]
            tensors.append(pb_utils.Tensor("token_strings", np.array(strings, np.object_)))
        if "context_length" in wanted:
            tensors.append(pb_utils.Tensor("context_length", np.array([self.preparation.limit or 0], np.int32)))
        if "answer_formats" in wanted:
            formats = json.dumps(self.preparation.formats.describe()).encode()
            tensors.append(pb_utils.Tensor("answer_formats", np.array([formats], np.object_)))
        if "model_info" in wanted:
            tensors.append(pb_utils.Tensor("model_info", np.array([json.dumps(self.info).encode()], np.object_)))
        if "tokenizer_info" in wanted:
            info = json.dumps(prompt.tokenizer_info(self.preparation.tokenizer), ensure_ascii=False).encode()
            tensors.append(pb_utils.Tensor("tokenizer_info", np.array([info], np.object_)))
        return tensors


def _texts_tensor(name: str, values: Sequence[str]) -> Any:
    return pb_utils.Tensor(name, np.array([value.encode() for value in values], np.object_))


def texts(request: Any, name: str) -> list[str]:
    """The elements of a BYTES input; [] if it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return []
    return [prompt.decode_utf8(name, value) for value in tensor.as_numpy().reshape(-1)]


def text(request: Any, name: str) -> str | None:
    """A BYTES input of one element; None if it was not sent."""
    values = texts(request, name)
    if len(values) > 1:
        raise PromptError(name, f"{len(values)} elements", "send one")
    return values[0] if values else None


def fields_of(request: Any) -> Fields:
    """The inputs. Raises PromptError for an input that is not a valid text or flag."""
    guide = Guide(text(request, "guided_decoding_guide_type") or "", text(request, "guided_decoding_guide") or "")
    return Fields(
        text_input=text(request, "text_input"),
        prompt_token_ids=ids(request, "prompt_token_ids"),
        messages=text(request, "messages"),
        tools=text(request, "tools"),
        tool_choice=text(request, "tool_choice"),
        parallel_tool_calls=flag(request, "parallel_tool_calls", True),
        any_arguments=flag(request, "any_arguments", False),
        chat_template_kwargs=text(request, "chat_template_kwargs"),
        continue_final_message=flag(request, "continue_final_message", False),
        prompt_time=text(request, "prompt_time"),
        add_special_tokens=flag(request, "add_special_tokens", None),
        stop_words=texts(request, "stop_words"),
        bad_words=texts(request, "bad_words"),
        logit_bias=text(request, "logit_bias"),
        exclude_input_in_output=flag(request, "exclude_input_in_output", True),
        guide=guide,
        session_id=text(request, "session_id") or "",
        interactive=flag(request, "interactive", False),
        pooling=text(request, "pooling") or "",
    )


def ids(request: Any, name: str) -> list[int] | None:
    """An INT32 input; None if it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else [int(token) for token in tensor.as_numpy().reshape(-1)]


Default = TypeVar("Default", bool, None)


def flag(request: Any, name: str, default: Default) -> bool | Default:
    """A BOOL input of one element."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else bool(tensor.as_numpy().item())
