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
    """The engine is shutting down or closed."""


class DeviceFailedError(CharoniaError):
    """The device has failed, as a GPU does after an illegal access or an error of its memory. All requests of the
    engine end with this, and it takes no more: only a new process can use the device again."""


class UnsupportedError(CharoniaError):
    """A model or a feature that this version or installation does not have."""


class InternalError(CharoniaError):
    """A broken invariant inside the engine: a bug."""


class ModelError(CharoniaError):
    """A model folder or a workspace that is not there, not complete or not consistent."""
