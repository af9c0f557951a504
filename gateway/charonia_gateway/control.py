"""Requests to the `charonia serve` that started this gateway, by the socket in its run folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from charonia_gateway.errors import ApiError, unavailable

_SOCKET = "control.sock"
_MAX_LINE = 1 << 20
_CODES = {404: "model_not_found", 409: "busy"}


async def ask(folder: Path, **question: str) -> str:
    """Returns the message of `charonia serve`. Raises ApiError 400, 404, 409 or 503 with its error, and 503 if it does
    not respond."""
    line = b""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:  # a short name, because the kernel limits its length
            name = f"/proc/self/fd/{descriptor}/{_SOCKET}"
            reader, writer = await asyncio.open_unix_connection(name, limit=_MAX_LINE)
        finally:
            os.close(descriptor)
        try:
            writer.write(json.dumps(question).encode() + b"\n")
            line = await reader.readline()
        finally:
            writer.close()
    except OSError:
        pass
    if not line.endswith(b"\n"):
        raise unavailable("charonia serve does not respond: its log has the reason", code="not_ready")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        text, status = answer["error"], answer["status"]
        if status == 503:
            raise unavailable(text, code="not_ready")
        headers = {"Retry-After": "5"} if status == 409 else {}
        raise ApiError(status, text, param="model", code=_CODES.get(status, "invalid_value"), headers=headers)
    return str(answer["answer"])
