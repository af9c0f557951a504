"""The errors that users of the package see. module.cpp translates the engine's C++ errors to these."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CharoniaError(Exception):
    """Base of all errors of this package. status: HTTP status, for requests to the gateway that fail with this error.
    Errors that may disappear by themselves have 409 or 503."""

    exit_code = 1  # exit code of a command that fails with this error

    def __init__(self, text: str = "", status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class InvalidRequestError(CharoniaError, ValueError):
    """A request, a prompt or a configuration value is wrong. The text says how to correct it."""


class NotFoundError(InvalidRequestError):
    """The request names something that does not exist, such as a LoRA adapter."""


class OverloadedError(CharoniaError):
    """The queue is full, or the request waited too long in it, or there is not enough memory. Retry later."""


class DeadlineExceededError(CharoniaError, TimeoutError):
    """The request did not end within its own time limit."""


class EngineClosedError(CharoniaError):
    """The engine is shutting down, closed, or has failed, for example because of a CUDA error."""


class UnsupportedError(CharoniaError):
    """A model or a feature that this version or installation does not have."""


class InternalError(CharoniaError):
    """A violated invariant inside the engine: a bug."""


class ModelError(CharoniaError):
    """A model folder or a workspace is missing, incomplete or inconsistent."""


class ServeError(CharoniaError):
    """`charonia serve` cannot go on. The text names the fault and the remedy. It may have the last lines of a log."""


def as_given(text: str, path: Path, given: str) -> str:
    """Put what the user gave into a text that names a path. A file below the path follows in parentheses, because the
    user's file or model may not have it under this name."""

    def name(match: re.Match[str]) -> str:
        return f"{given} ({match[1]})" if match[1] else given

    # The path is not a part of a longer path, and a full stop after it is not a part of its name.
    return re.sub(rf"(?<![\w./~-]){re.escape(str(path))}(?![\w-]|\.\w)(?:/([\w./-]*\w))?", name, text)


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Put the path before errors, which do not name it."""
    try:
        yield
    except CharoniaError as error:
        raise type(error)(f"{path}: {error}", error.status) from error


@contextmanager
def named_as_given(path: Path, given: str) -> Iterator[None]:
    """Put what the user gave into errors that name the path that was made of it."""
    try:
        yield
    except CharoniaError as error:
        raise type(error)(as_given(str(error), path, given), error.status) from error
