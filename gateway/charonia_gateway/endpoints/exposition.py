"""The endpoints' state as Prometheus metrics, read when they are asked for."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from charonia_gateway.endpoints.pool import Pool
from charonia_gateway.shared import Shared


class EndpointMetrics(Collector):
    """A series for each endpoint that there is; one that has gone leaves none. Of several models each has its own.
    Where the gateway has several workers, an endpoint is up when all find it so, and its tokens are those of all."""

    def __init__(self, pools: Mapping[str, Pool], shared: Shared | None = None) -> None:
        """pools: by model. shared: with the other workers; what they see is as old as their last follow()."""
        self._pools = pools
        self._shared = shared
        self._told: list[tuple[str, str, bool, int]] | None = None

    def describe(self) -> Iterator[Metric]:
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        up, outstanding = self._families()
        rows = self._own()
        if self._shared:
            with contextlib.suppress(sqlite3.Error):  # then those of this worker
                self._tell(self._shared)
                rows = self._shared.endpoints()
        for model, target, usable, tokens in rows:
            labels = (target, model)[: self._num_labels]
            up.add_metric(labels, float(usable))
            outstanding.add_metric(labels, tokens)
        yield from (up, outstanding)

    async def follow(self, interval_s: float) -> None:
        """Tells the other workers of this one's endpoints, until it is cancelled."""
        assert self._shared is not None
        while True:
            with contextlib.suppress(sqlite3.Error):  # the others' metrics do not show it until it can be told
                self._tell(self._shared)
            await asyncio.sleep(interval_s)

    def _own(self) -> list[tuple[str, str, bool, int]]:
        return [
            (model, endpoint.target, endpoint.usable, endpoint.outstanding_tokens)
            for model, pool in self._pools.items()
            for endpoint in pool.endpoints
        ]

    def _tell(self, shared: Shared) -> None:
        if (rows := self._own()) != self._told:
            shared.tell_endpoints(rows)
            self._told = rows

    @property
    def _num_labels(self) -> int:
        return 2 if len(self._pools) > 1 else 1

    def _families(self) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        labels = ("endpoint", "model")[: self._num_labels]
        return (
            GaugeMetricFamily("charonia_gateway_endpoint_up", "1: Triton there can take requests", labels=labels),
            GaugeMetricFamily(
                "charonia_gateway_endpoint_outstanding_tokens",
                "tokens to come of the requests that this gateway has there, as far as they can be told",
                labels=labels,
            ),
        )
