"""Triton Python model `postprocessing`: converts token ids to text. docs/contracts.md describes the tensors.

Stateless. One instance keeps the responses of a stream in order. It needs no tokenizer, whose decoder cannot decode a
text in pieces.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.path.insert(0, str(Path(__file__).resolve().parent))

from detokenize import TextTokens, TokenTable
from model_log import ModelLog

WEIGHTS_VERSION = "2-"  # charonia/weights/fingerprint.py begins with it


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.log = ModelLog("postprocessing", pb_utils.Logger.log_info, pb_utils.Logger.log_error)
        folder = Path(args["model_repository"]) / args["model_version"] / "tokenizer"
        self.manifest = folder.resolve().parent / "weights" / "manifest.json"
        file = folder / "token_table.safetensors"
        try:
            self.table = TokenTable.load(file)
        except Exception as error:
            raise pb_utils.TritonModelException(
                f"the token table {file} cannot be loaded ({error}): convert the model again with charonia convert"
            ) from error

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(self._outputs(request))
        except Exception as error:
            text = self.log.failed(error, request.request_id())
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, pb_utils.TritonError.INTERNAL))

    def _outputs(self, request: Any) -> list[Any]:
        # One batch entry per request: text_tokens [1, 2 + n], echo [1, 1].
        tokens = TextTokens.of(pb_utils.get_input_tensor_by_name(request, "text_tokens").as_numpy().reshape(-1))
        ids = tokens.ids
        wanted = request.requested_output_names()
        tensors = []
        if "text_output" in wanted:
            echo = pb_utils.get_input_tensor_by_name(request, "echo").as_numpy().reshape(-1)[0]
            text = echo + self.table.text(ids, tokens.begin, tokens.end)
            # Only for verbose logging: one line per part of each response.
            if self.log.prompts:
                shown = {"text": text.decode(errors="replace")}
                self.log.request(f"{len(ids)} tokens", request.request_id(), {"tokens": len(ids)}, shown)
            tensors.append(pb_utils.Tensor("text_output", np.array([[text]], np.object_)))
        if "token_bytes" in wanted or "token_special" in wanted:
            token_bytes, special = self.table.lookup(ids)
            tensors.append(pb_utils.Tensor("token_bytes", np.array([token_bytes], np.object_)))
            tensors.append(pb_utils.Tensor("token_special", np.array([special], np.bool_)))
        if "model_quality" in wanted:
            records = json.dumps(quality_records(self.manifest)).encode()
            tensors.append(pb_utils.Tensor("model_quality", np.array([[records]], np.object_)))
        return tensors


def quality_records(manifest: Path) -> list[Any]:
    """The current records of `charonia evaluate`, which may run at the same time. Without records that servers of
    other versions have stored."""
    try:
        status = manifest.stat()
        return _records_of(manifest, (status.st_ino, status.st_mtime_ns, status.st_size))
    except (OSError, ValueError):  # the engine reports the error when it loads
        return []


@functools.lru_cache(maxsize=1)
def _records_of(manifest: Path, version: tuple[int, ...]) -> list[Any]:
    """Cached, because the manifest of a model with many experts has tens of megabytes, and responses wait while it is
    read."""
    content = json.loads(manifest.read_text(encoding="utf-8"))
    records = content.get("quality") if isinstance(content, dict) else None
    if not isinstance(records, list):
        return []
    # A server of another version may have stored its own fingerprint in the manifest.
    own = (None, "", content.get("weights"))
    return [
        one
        for one in records
        if isinstance(one, dict) and (one.get("weights") in own or str(one["weights"]).startswith(WEIGHTS_VERSION))
    ]
