"""Health and metrics, for those who operate the gateway."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from charonia_gateway.context import GatewayState

router = APIRouter(tags=["service"])


@router.get("/health/live", summary="Whether the gateway runs")
async def live() -> dict[str, str]:
    """200 while this process serves. Says nothing of Triton: restarting the gateway would not mend that."""
    return {"status": "live"}


@router.get("/health/ready", summary="Whether requests can be served", responses={503: {"description": "why not"}})
async def ready(gateway: GatewayState) -> Response:
    """200 when Triton (of several, one at least) answers and its models are ready and this process does not end, else
    503 with the reason."""
    if gateway.drain.begun:
        return JSONResponse({"status": "not ready", "reason": "the gateway is shutting down"}, 503)
    if reason := await gateway.engine.pool.why_not_ready():
        return JSONResponse({"status": "not ready", "reason": reason}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics", summary="Prometheus metrics of the gateway", response_class=Response)
async def metrics(gateway: GatewayState) -> Response:
    """The engine's own metrics are on Triton's metrics port."""
    return Response(gateway.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
