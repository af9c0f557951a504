"""Parse and check a request's body. An error has status 400 and names the field and its valid values."""

from __future__ import annotations

import codecs
import json
import logging
import re
from itertools import islice
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from charonia_gateway.errors import ApiError
from charonia_gateway.json_values import TOO_MANY, has_too_many_values

log = logging.getLogger("charonia_gateway")
Body = TypeVar("Body", bound=BaseModel)

IGNORED_HEADER = "charonia-ignored-fields"
_MAX_NAMED_ERRORS = 3
# The remedy for each kind of pydantic's errors. {...} is filled from the error's context.
_RIGHT = {
    "int_type": "send a whole number",
    "int_from_float": "send a whole number",
    "int_parsing_size": "send a smaller number",
    "float_type": "send a number",
    "finite_number": "send a finite number",
    "bool_type": "send true or false",
    "string_type": "send a text",
    "string_unicode": "it has a lone surrogate: send whole characters",
    "list_type": "send a list",
    "dict_type": "send an object",
    "none_required": "send null, or leave it out",
    "literal_error": "send {expected}",
    "greater_than": "send more than {gt}",
    "greater_than_equal": "send at least {ge}",
    "less_than": "send less than {lt}",
    "less_than_equal": "send at most {le}",
    "too_short": "it has {actual_length} entries: send at least {min_length}",
    "too_long": "send at most {max_length} entries",
    "string_too_short": "send at least {min_length} character(s)",
    "string_too_long": "send at most {max_length} characters",
    "extra_forbidden": "unknown field; remove it",
}
_SHOWN_CHARACTERS = 60
_MAX_REMEMBERED = 1000
_warned: set[str] = set()


async def read_body(request: Request, limit: int) -> bytes:
    """Read the body. Its content type must be JSON, and its size at most `limit` bytes."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"the content type is {kind[:100]!r}: send JSON with Content-Type: application/json",
            code="content_type",
        )
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415,
            f"the body is compressed ({encoding[:100]!r}), which is not supported: send it uncompressed",
            code="content_encoding",
        )
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise ApiError(413, f"the body is larger than {limit} bytes, the most this server takes", code="too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def parse(model: type[Body], body: bytes) -> Body:
    """Return the checked body. Raises ApiError 400 if it is not valid."""
    if has_too_many_values([body]):
        raise ApiError(400, f"the body has {TOO_MANY}", code="invalid_value")
    if body.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ApiError(
            400, "the body begins with a byte order mark: send UTF-8 without a byte order mark", code="invalid_json"
        )
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _bad_request(error.errors(include_url=False, include_context=True)) from None


def ignored_fields(body: BaseModel) -> list[str]:
    """Remove the fields that the gateway does not know, and return their names, which are valid in a header. Each is
    logged once. Their values would otherwise stay in memory until the response ends."""
    names = []
    extra = body.model_extra or {}
    for name in islice(extra, _MAX_REMEMBERED):
        # Other names may be a user's text, which must not be logged.
        if not re.fullmatch(r"[A-Za-z_][\w.-]{0,63}", name, re.ASCII):
            continue
        names.append(name)
        if name not in _warned and len(_warned) < _MAX_REMEMBERED:
            _warned.add(name)
            log.warning("ignoring the unknown field %r of requests", name)
    extra.clear()
    parts = getattr(body, "ignored_parts", [])
    for kind in islice({re.sub(r"\[\d+\]", "", part) for part in parts}, _MAX_REMEMBERED):
        if kind not in _warned and len(_warned) < _MAX_REMEMBERED:
            _warned.add(kind)
            log.warning("ignoring parts of requests that this server does not support: %s", kind)
    return [*names, *parts][:20]


def _bad_request(details: list[ErrorDetails]) -> ApiError:
    first = details[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    missing = first["type"] == "missing"
    texts = [_text(detail) for detail in details[:_MAX_NAMED_ERRORS]]
    if more := len(details) - len(texts):
        texts.append(f"and {more} more")
    return ApiError(
        400,
        "; ".join(texts),
        param=_path(first) or _named_in(first),
        code="missing_required_parameter" if missing else "invalid_value",
    )


def _path(detail: ErrorDetails) -> str | None:
    """Format a location, for example as messages[0].content."""
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path[:200] or None


def _named_in(detail: ErrorDetails) -> str | None:
    """The field that a check of the whole body names: its text begins with the field's name."""
    found = re.match(r"[a-z_][a-z_0-9]*", detail["msg"])
    return found.group() if found else None


def _text(detail: ErrorDetails) -> str:
    path = _path(detail)
    if detail["type"] == "missing":
        return f"{path} is missing"
    if detail["type"] == "wrong":
        return f"{path}: {detail['msg']}" if path else detail["msg"]
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"{path or 'the body'} is not a JSON object"
    message = f"{detail['msg'][:1].lower()}{detail['msg'][1:]}"
    if right := _RIGHT.get(detail["type"]):
        message = right.format_map({name: _plain(value) for name, value in detail.get("ctx", {}).items()})
    return f"{path} = {_shown(detail['input'])}: {message}"


def _plain(value: Any) -> Any:
    """Format a value of an error's context: a bound of a number, or a Python literal."""
    if value == "True":
        return "true"
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    try:
        # Format only the part that is shown: the value may be the whole body.
        text = "".join(islice(json.JSONEncoder(ensure_ascii=False).iterencode(value), _SHOWN_CHARACTERS + 1))
    except (ValueError, TypeError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
