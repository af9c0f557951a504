"""Requests to a Triton model with Triton's own gRPC client, as an independent check of our client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
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
    tensors: dict[str, npt.NDArray[Any]]

    @property
    def text(self) -> bytes:
        found: bytes = self.tensors["text_output"][0]
        return found

    @property
    def ids(self) -> list[int]:
        found: list[int] = self.tensors["output_ids"].tolist()
        return found

    @property
    def finish_reason(self) -> str:
        return str(self.tensors["finish_reason"][0].decode())


def make_inputs(fields: dict[str, Any]) -> list[Any]:
    inputs = []
    for name, value in fields.items():
        datatype, dtype = TYPES[name]
        values = value if isinstance(value, list) and name != "messages" else [value]
        if datatype == "BYTES":
            values = [one if isinstance(one, str | bytes) else json.dumps(one) for one in values]
            values = [one.encode() if isinstance(one, str) else one for one in values]
        array = np.array(values, dtype)
        tensor = triton.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


async def stream(
    client: triton.InferenceServerClient,
    fields: dict[str, Any],
    *,
    request_id: str = "",
    model: str = "ensemble",
    outputs: Sequence[str] | None = None,
) -> AsyncGenerator[Response, None]:
    """Yield the responses to one request as they arrive. Raises tritonclient's exception for an error. Closing the
    generator cancels the call.

    A call that is almost over is read to its end: if a call is cancelled during its final response, this version of
    Triton keeps the request forever, and the model cannot be unloaded."""
    wanted = None if outputs is None else [triton.InferRequestedOutput(name) for name in outputs]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": make_inputs(fields), "request_id": request_id, "outputs": wanted}

    call = client.stream_infer(requests())
    failure = None
    over = False
    try:
        async for result, error in call:
            if error is not None:
                failure, over = error, True
                continue
            response = result.get_response()
            over = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield Response({output.name: result.as_numpy(output.name) for output in response.outputs})
    finally:
        if not over:
            call.cancel()
    if failure is not None:
        raise failure


async def collect(
    client: triton.InferenceServerClient, fields: dict[str, Any], begun: asyncio.Event | None = None, **options: Any
) -> list[Response]:
    """All responses. Sets `begun` with the first response."""
    responses = []
    async for response in stream(client, fields, **options):
        responses.append(response)
        if begun is not None:
            begun.set()
    return responses
