"""Asynchronous, typed gRPC client of Charonia on Triton. See `Client`."""

from charonia_client.client import Client
from charonia_client.errors import (
    BadRequest,
    CharoniaError,
    ConnectionLost,
    DeadlineExceeded,
    Moved,
    NotFound,
    NotReady,
    Overloaded,
    ServerError,
    TooManyRounds,
    Unavailable,
    Unresponsive,
)
from charonia_client.progress import Progress
from charonia_client.tls import Tls
from charonia_client.tools import ToolResult, Tools, converse
from charonia_client.types import (
    GenerateRequest,
    GenerateResponse,
    Guide,
    ModelMetadata,
    ServerMetadata,
    Timings,
    Tokenized,
    TokenizeRequest,
    ToolCallDelta,
)

__all__ = [
    "BadRequest",
    "CharoniaError",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "GenerateRequest",
    "GenerateResponse",
    "Guide",
    "ModelMetadata",
    "Moved",
    "NotFound",
    "NotReady",
    "Overloaded",
    "Progress",
    "ServerError",
    "ServerMetadata",
    "Timings",
    "Tls",
    "TokenizeRequest",
    "Tokenized",
    "TooManyRounds",
    "ToolCallDelta",
    "ToolResult",
    "Tools",
    "Unavailable",
    "Unresponsive",
    "converse",
]
