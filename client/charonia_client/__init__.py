"""Asynchronous, typed gRPC client of Charonia on Triton. See `Client`."""

from charonia_client.client import Client
from charonia_client.errors import (
    BadRequest,
    CharoniaError,
    DeadlineExceeded,
    Lost,
    Overloaded,
    ServerError,
    Silent,
    Unavailable,
)
from charonia_client.types import GenerateRequest, GenerateResponse, ModelMetadata, ServerMetadata, Timings

__all__ = [
    "BadRequest",
    "CharoniaError",
    "Client",
    "DeadlineExceeded",
    "GenerateRequest",
    "GenerateResponse",
    "Lost",
    "ModelMetadata",
    "Overloaded",
    "ServerError",
    "ServerMetadata",
    "Silent",
    "Timings",
    "Unavailable",
]
