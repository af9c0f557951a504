"""The Triton servers behind the gateway: where they are, which one a request goes to, what happens when one fails."""

from __future__ import annotations

from charonia_gateway.endpoints.discovery import Discovery
from charonia_gateway.endpoints.exposition import EndpointMetrics
from charonia_gateway.endpoints.pool import Answer, NotLoaded, Pool, SessionLost
from charonia_gateway.endpoints.server import Server

__all__ = ["Answer", "Discovery", "EndpointMetrics", "NotLoaded", "Pool", "Server", "SessionLost"]
