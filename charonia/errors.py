"""The errors that users of the package see. The engine's C++ errors become these in one place, module.cpp."""

from __future__ import annotations


class CharoniaError(Exception):
    """Base of all errors of this package."""

    exit_code = 1  # of a command that it ends


class InvalidRequestError(CharoniaError, ValueError):
    """A request, a prompt or a configuration value is wrong; the text says what would be right."""


class OverloadedError(CharoniaError):
    """The queue is full, or the request waited too long in it, or memory does not suffice; worth another try later."""


class DeadlineExceededError(CharoniaError, TimeoutError):
    """The request did not end within its own time limit."""


class EngineClosedError(CharoniaError):
    """The engine is shutting down, closed, or has failed, for example because of a CUDA error."""


class UnsupportedError(CharoniaError):
    """A model or a feature that this version or installation does not have."""


class InternalError(CharoniaError):
    """A broken invariant inside the engine: a bug."""


class ModelError(CharoniaError):
    """A model folder or a workspace that is not there, not complete or not consistent."""
