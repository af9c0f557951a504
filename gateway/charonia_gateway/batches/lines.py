"""The lines of batch files: requests, and their answers, in OpenAI's format."""

from __future__ import annotations

import fcntl
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json

from charonia_gateway.inner import InnerAnswer
from charonia_gateway.json_values import TOO_MANY, has_too_many_values
from charonia_gateway.record import REQUEST_ID_HEADER

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
# Fields of requests whose response is not one JSON object.
_NOT_WHOLE = ("stream", "background")
_MAX_ID = 512
_MAX_BYTES = 64 << 20  # of a line
_HEAD = b'{"id":"batch_req_'  # of each answer


class LineError(ValueError):
    """A line is not a request. code, param: as OpenAI's errors have them."""

    def __init__(self, line: int, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(f"line {line}: {message}")
        self.line = line
        self.message = message
        self.code = code
        self.param = param

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "param": self.param, "line": self.line}


@dataclass(frozen=True)
class Line:
    """One request. number: of the line, from 1. size: of the line in bytes."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    size: int


def parse_line(text: bytes, number: int, endpoint: str | None = None) -> Line:
    """Parse a line {"custom_id", "method", "url", "body"}. endpoint: the URL that all lines must have. The body is
    checked when the request runs. Raises LineError."""
    if has_too_many_values([text]):  # before each of them is an object in memory
        raise LineError(number, f"it has {TOO_MANY}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise LineError(number, "it is not JSON: write one JSON object per line", code="invalid_json_line") from None
    if not isinstance(value, dict):
        raise LineError(number, "it is not a JSON object", code="invalid_json_line")
    given = value.get("custom_id")
    if not isinstance(given, str) or not 1 <= len(given) <= _MAX_ID:
        problem = "is missing" if given is None else f"is not a text of 1 to {_MAX_ID} characters"
        code = "missing_required_parameter" if given is None else "invalid_value"
        raise LineError(number, f"custom_id {problem}", code=code, param="custom_id")
    if value.get("method", "POST") != "POST":
        raise LineError(number, "method is not POST: send POST", param="method")
    url = value.get("url", endpoint)
    if url not in ENDPOINTS or (endpoint and url != endpoint):
        right = f"the batch's endpoint, {endpoint}" if endpoint else f"one of {', '.join(ENDPOINTS)}"
        raise LineError(number, f"url is {str(url)[:100]!r}: send {right}", code="invalid_url", param="url")
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError(number, "body is not an object: send the request's fields in it", param="body")
    if name := next((name for name in _NOT_WHOLE if body.get(name)), None):
        raise LineError(number, f"body.{name}: batches have whole responses only; leave it out", param=f"body.{name}")
    try:
        to_json([given, body])
    except ValueError:
        problem = "it has a lone surrogate, or too many levels of lists and objects: write whole characters, and fewer "
        raise LineError(number, problem + "levels", code="invalid_json_line") from None
    return Line(number, given, str(url), body, len(text))


def read_lines(
    file: BinaryIO, parse: Callable[[bytes, int], Line], max_bytes: int = _MAX_BYTES
) -> Iterator[Line | LineError]:
    """Yield the requests of a file. Empty lines are skipped. A custom_id that an earlier line has is an error. A line
    with more than max_bytes is the last one."""
    known: set[str] = set()
    for number, text in enumerate(iter(lambda: file.readline(max_bytes + 1), b""), 1):
        if len(text) > max_bytes:
            yield LineError(
                number, f"it is longer than {max_bytes} bytes, the most that a request has here", code="line_too_long"
            )
            return
        if not text.strip():
            continue
        try:
            line = parse(text, number)
            if line.custom_id in known:
                shown = line.custom_id[:100]
                raise LineError(
                    number,
                    f"an earlier line has the custom_id {shown!r}",
                    code="duplicate_custom_id",
                    param="custom_id",
                )
            known.add(line.custom_id)
            yield line
        except LineError as error:
            yield error


def answer_line(custom_id: str, answer: InnerAnswer) -> bytes:
    """The line with the response to a request, or with its error."""
    body = answer.body if answer.body.strip() else b"null"
    head = {"status_code": answer.status, "request_id": answer.headers.get(REQUEST_ID_HEADER)}
    response = to_json(head)[:-1] + b',"body":' + body + b"}"
    return _line(custom_id, response, b"null")


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that did not run."""
    return _line(custom_id, b"null", to_json({"code": code, "message": message}))


def _line(custom_id: str, response: bytes, error: bytes) -> bytes:
    head = to_json({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id})[:-1]
    return head + b',"response":' + response + b',"error":' + error + b"}\n"


class AnswerFile:
    """A file of answers that only grows. Each line is written with one call, so a process that ends leaves at most an
    incomplete last line."""

    def __init__(self, path: Path) -> None:
        """Remove an incomplete last line of an existing file. Raises ValueError if a line is not an answer, or if
        another process writes the file."""
        self._path = path
        self.done: set[str] = set()  # custom_ids
        self._file = path.open("ab+", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.seek(0)
            end = 0
            for number, text in enumerate(iter(self._file.readline, b""), 1):
                if not text.endswith(b"\n"):
                    if not _HEAD.startswith(text[: len(_HEAD)]):  # the file is not ours
                        raise ValueError(_not_ours(f"{path}, line {number}"))
                    break
                self.done.add(_answered(text, f"{path}, line {number}"))
                end += len(text)
            self._file.truncate(end)
            self._end = end
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another process writes {path}: wait for its end, or name another file") from None
        except BaseException:
            self._file.close()
            raise

    def write(self, custom_id: str, line: bytes) -> None:
        """Raises OSError if the line cannot be written completely. Then the file has no part of it."""
        rest = memoryview(line)
        try:
            while rest:  # on a full disk the first write may be shorter, and the second one has the error
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._file.truncate(self._end)
            error.filename = str(self._path)
            raise
        self._end += len(line)
        self.done.add(custom_id)

    def close(self) -> None:
        self._file.close()


def _answered(text: bytes, place: str) -> str:
    try:
        value = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str) and "response" in value:
            return str(value["custom_id"])
    except ValueError:
        pass
    raise ValueError(_not_ours(place))


def _not_ours(place: str) -> str:
    return f"{place} is not an answer of a batch; name another file"
