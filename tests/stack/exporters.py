"""Metrics of parts that a machine may lack: a GPU, and the exporters that need a compose profile.

Names and labels follow the documentation:
- DCGM_*: etc/default-counters.csv of github.com/NVIDIA/dcgm-exporter, the fields that it exports unless told otherwise;
  its labels gpu, UUID, device, modelName and Hostname are in the README there.
- nv_gpu_*: "GPU metrics" in docs/user_guide/metrics.md of github.com/triton-inference-server/server.
- node_*: the collectors cpu, meminfo, filesystem and netdev of github.com/prometheus/node_exporter, on by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from charonia_gateway.metrics import Metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CARD = "GPU-4f1a0001-0000-0000-0000-000000000000"


class _Exporter:
    """A collector of prometheus_client."""

    def gauge(self, name: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, name, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def counter(self, name: str, labels: dict[str, str], per_second: float) -> Metric:
        """A counter that grows with time."""
        family = CounterMetricFamily(name, name, labels=list(labels))
        family.add_metric(list(labels.values()), per_second * time.monotonic())
        return family


class GpuExporter(_Exporter):
    def collect(self) -> Iterable[Metric]:
        labels = {"gpu": "0", "UUID": CARD, "device": "nvidia0", "modelName": "NVIDIA H100", "Hostname": "machine"}
        values = {
            "DCGM_FI_DEV_SM_CLOCK": 1755,  # MHz
            "DCGM_FI_DEV_GPU_TEMP": 58,  # degrees Celsius
            "DCGM_FI_DEV_POWER_USAGE": 410.5,  # W
            "DCGM_FI_DEV_GPU_UTIL": 93,  # %
            "DCGM_FI_DEV_FB_FREE": 9000,  # MiB
            "DCGM_FI_DEV_FB_USED": 72000,  # MiB
            "DCGM_FI_DEV_XID_ERRORS": 0,
        }
        return [self.gauge(name, labels, value) for name, value in values.items()]


class TritonOnGpu(_Exporter):
    def collect(self) -> Iterable[Metric]:
        values = {
            "nv_gpu_utilization": 0.93,
            "nv_gpu_memory_total_bytes": 81e9,
            "nv_gpu_memory_used_bytes": 72e9,
            "nv_gpu_power_usage": 410.5,  # W
            "nv_gpu_power_limit": 700,  # W
        }
        return [self.gauge(name, {"gpu_uuid": CARD}, value) for name, value in values.items()]


class KeyUsage(_Exporter):
    """The metrics of a gateway with API keys and a certificate that servers without them do not have."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._metrics.expiries.of_certificates = lambda: {"server.pem": time.time() + 9e6}
        self._metrics.expiries.of_keys = lambda: {"team": time.time() + 9e6}

    def collect(self) -> Iterable[Metric]:
        self._metrics.key_requests.labels("team").inc()
        self._metrics.key_tokens.labels("team", "prompt").inc(20)
        self._metrics.key_limited.labels("team", "tokens").inc()
        counters = (self._metrics.key_requests, self._metrics.key_tokens, self._metrics.key_limited)
        return [metric for source in (*counters, self._metrics.expiries) for metric in source.collect()]


class NodeExporter(_Exporter):
    def collect(self) -> Iterable[Metric]:
        disk = {"device": "/dev/nvme0n1p1", "fstype": "ext4", "mountpoint": "/"}
        cpu = CounterMetricFamily("node_cpu_seconds", "node_cpu_seconds", labels=["cpu", "mode"])
        for mode, share in {"user": 0.5, "idle": 0.4, "iowait": 0.1}.items():
            cpu.add_metric(["0", mode], share * time.monotonic())
        return [
            cpu,
            self.gauge("node_memory_MemAvailable_bytes", {}, 100e9),
            self.gauge("node_filesystem_avail_bytes", disk, 300e9),
            self.gauge("node_filesystem_size_bytes", disk, 900e9),
            self.gauge("node_filesystem_readonly", disk, 0),
            self.counter("node_network_receive_bytes", {"device": "eth0"}, 1e6),
        ]
