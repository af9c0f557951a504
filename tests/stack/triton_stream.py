"""Requests to a Triton model with Triton's own gRPC client, as an independent check of our client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc.aio as triton

_MODELS = Path(__file__).resolve().parents[2] / "model_repository"
_DTYPES = {"BYTES": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}


def _types(model: str) -> dict[str, tuple[str, Any]]:
    """The types of a model's inputs, from its configuration."""
    text = (_MODELS / model / "config.pbtxt").read_text(encoding="utf-8").partition("\noutput [")[0]
    found = re.findall(r'name: "(\w+)" data_type: TYPE_(\w+)', text)
    kinds = {name: "BYTES" if kind == "STRING" else kind for name, kind in found}
    return {name: (kind, _DTYPES[kind]) for name, kind in kinds.items()}


TYPES = _types("engine") | _types("ensemble")


@dataclass(frozen=True)
class Response:
    """One response of the ensemble."""

    text: bytes
    ids: list[int]
    finish_reason: str
    tensors: dict[str, npt.NDArray[Any]]


def make_inputs(fields: dict[str, Any]) -> list[Any]:
    inputs = []
    for name, value in fields.items():
        datatype, dtype = TYPES[name]
        values = value if isinstance(value, list) and name != "messages" else [value]
        if datatype == "BYTES":
            values = [one if isinstance(one, str | bytes) else json.dumps(one) for one in values]
            values = [one.encode() if isinstance(one, str) else one for one in values]
        tensor = triton.InferInput(name, [len(values)], datatype)
        tensor.set_data_from_numpy(np.array(values, dtype))
        inputs.append(tensor)
    return inputs


async def stream(
    client: triton.InferenceServerClient, fields: dict[str, Any], *, request_id: str = "", model: str = "ensemble"
) -> AsyncIterator[Response]:
    """Yield the responses to one request as they arrive. Raises tritonclient's exception for an error."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": make_inputs(fields), "request_id": request_id}

    async for result, error in client.stream_infer(requests()):
        if error is not None:
            raise error
        names = [output.name for output in result.get_response().outputs]
        tensors = {name: result.as_numpy(name) for name in names}
        if tensors:
            yield Response(
                tensors["text_output"][0] if "text_output" in tensors else b"",
                tensors["output_ids"].tolist(),
                tensors["finish_reason"][0].decode(),
                tensors,
            )


async def collect(client: triton.InferenceServerClient, fields: dict[str, Any]) -> list[Response]:
    return [response async for response in stream(client, fields)]
