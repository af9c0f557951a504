"""Health and metrics for the gateway's operator."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from charonia_gateway import __version__
from charonia_gateway.context import GatewayState

router = APIRouter(tags=["service"])


@router.get("/health/live", summary="Whether the gateway runs")
async def live() -> dict[str, str]:
    """200 while this process serves. Independent of Triton, because a restart of the gateway would not help there."""
    return {"status": "live"}


@router.get(
    "/ping", summary="Like /health/ready, as vLLM and SageMaker call it", responses={503: {"description": "why not"}}
)
@router.get("/health", summary="Like /health/ready, as vLLM calls it", responses={503: {"description": "why not"}})
@router.get("/health/ready", summary="Whether requests can be served", responses={503: {"description": "why not"}})
async def ready(gateway: GatewayState) -> Response:
    """200 if a Triton server has a ready model and the gateway is not shutting down, else 503 with the reason. With
    several models, `models` says which are ready."""
    if gateway.drain.begun:
        return JSONResponse({"status": "not ready", "reason": "the gateway is shutting down"}, 503)
    reasons = await asyncio.gather(*(engine.pool.why_not_ready() for engine in gateway.engines.values()))
    states = dict(zip(gateway.engines, ("not ready" if reason else "ready" for reason in reasons), strict=True))
    more = {"models": states} if len(states) > 1 else {}
    if all(reasons) and not (gateway.settings.models_autoload and gateway.is_reachable):
        return JSONResponse({"status": "not ready", "reason": reasons[0], **more}, 503)
    return JSONResponse({"status": "ready", **more})


@router.get("/version", summary="The version of Charonia")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", summary="Prometheus metrics of the gateway", response_class=Response)
async def metrics(gateway: GatewayState) -> Response:
    """Triton's metrics port has the engine's own metrics."""
    return Response(await gateway.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})
