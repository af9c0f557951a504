"""The endpoints' state as Prometheus metrics, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from charonia_gateway.endpoints.pool import Pool


class EndpointMetrics(Collector):
    """A series for each endpoint that there is; one that has gone leaves none."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def describe(self) -> Iterator[Metric]:
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        up, outstanding = self._families()
        for endpoint in self._pool.endpoints:
            up.add_metric((endpoint.target,), float(endpoint.usable))
            outstanding.add_metric((endpoint.target,), endpoint.outstanding_tokens)
        yield from (up, outstanding)

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
        return (
            GaugeMetricFamily(
                "charonia_gateway_endpoint_up", "1: Triton there can take requests", labels=("endpoint",)
            ),
            GaugeMetricFamily(
                "charonia_gateway_endpoint_outstanding_tokens",
                "tokens to come of the requests that this gateway has there, as far as they can be told",
                labels=("endpoint",),
            ),
        )
