"""The endpoints' state as Prometheus metrics, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from charonia_gateway.endpoints.pool import Pool


class EndpointMetrics(Collector):
    """A series for each endpoint that there is; one that has gone leaves none. Of several models each has its own."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        """pools: by model."""
        self._pools = pools

    def describe(self) -> Iterator[Metric]:
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        up, outstanding = self._families()
        for model, pool in self._pools.items():
            for endpoint in pool.endpoints:
                labels = (endpoint.target, model)[: self._num_labels]
                up.add_metric(labels, float(endpoint.usable))
                outstanding.add_metric(labels, endpoint.outstanding_tokens)
        yield from (up, outstanding)

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
