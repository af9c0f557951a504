"""GPU: the cards as the GPU exporter sees them, what Triton sees without it, what the engine meets on them, and the
machine around them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.dashboards import limits
from monitoring.dashboards.layout import Panel, dashboard
from monitoring.dashboards.panels import (
    BYTES,
    BYTES_PER_SECOND,
    CELSIUS,
    COUNT,
    HERTZ,
    PER_SECOND,
    PERCENT,
    RATIO,
    WATTS,
    Query,
    graph,
)

_GPU = "{{Hostname}} GPU {{gpu}}"
_CARD = "{{gpu_uuid}}"
_DISK = 'fstype!~"tmpfs|overlay|squashfs|ramfs"'
_NETWORK = 'device!~"lo|veth.*|br-.*|docker.*"'


def board() -> builders.Dashboard:
    return dashboard(
        "charonia-gpu",
        "Charonia: GPU",
        "The first row needs compose's profile gpu (DCGM exporter), the last one its profile exporters (node).",
        {
            "GPUs (profile gpu)": _exporter(),
            "GPUs as Triton sees them": _triton(),
            "Engine on its GPUs": _engine(),
            "Machine (profile exporters)": _machine(),
        },
    )


def _exporter() -> list[Panel]:
    return [
        graph(
            "Use",
            PERCENT,
            "Low while requests wait: steps are held up elsewhere; see processor use below and step time on Engine.",
            [Query("DCGM_FI_DEV_GPU_UTIL", _GPU)],
            top=100,
        ),
        graph(
            "Memory use",
            RATIO,
            "Above the line: another program, or a cache sized too large; runbook CharoniaGpuMemoryFull.",
            [Query("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)", _GPU)],
            limit=limits.GPU_MEMORY,
            top=1,
        ),
        graph(
            "Temperature",
            CELSIUS,
            "Above the line the clock is lowered: look at cooling; runbook CharoniaGpuHot.",
            [Query("DCGM_FI_DEV_GPU_TEMP", _GPU)],
            limit=limits.GPU_TEMPERATURE_C,
        ),
        graph(
            "Power",
            WATTS,
            "At the card's limit all the time: it lowers its clock. Low at high use is usual: it waits for memory.",
            [Query("DCGM_FI_DEV_POWER_USAGE", _GPU)],
        ),
        graph(
            "Clock",
            HERTZ,
            "Falls under load: heat or power limit. Compare with temperature and power at the same time.",
            [Query("DCGM_FI_DEV_SM_CLOCK * 1e6", _GPU)],
        ),
        graph(
            "Last Xid error",
            COUNT,
            "Changes: the driver reported an error with that number; runbook CharoniaGpuError.",
            [Query("DCGM_FI_DEV_XID_ERRORS", _GPU)],
        ),
    ]


def _triton() -> list[Panel]:
    return [
        graph(
            "Use",
            RATIO,
            "Low while requests wait: steps are held up elsewhere; see processor use below and step time on Engine.",
            [Query("nv_gpu_utilization", _CARD)],
            top=1,
        ),
        graph(
            "Memory",
            BYTES,
            "Used near total: another program, or a cache sized too large; runbook CharoniaGpuMemoryFull.",
            [
                Query("nv_gpu_memory_used_bytes", f"used, {_CARD}"),
                Query("nv_gpu_memory_total_bytes", f"total, {_CARD}"),
            ],
        ),
        graph(
            "Power",
            WATTS,
            "At its limit all the time: the card lowers its clock, and steps become longer.",
            [Query("nv_gpu_power_usage", f"used, {_CARD}"), Query("nv_gpu_power_limit", f"limit, {_CARD}")],
        ),
    ]


def _engine() -> list[Panel]:
    return [
        graph(
            "GEMMs rejected",
            PER_SECOND,
            "Not 0: own kernels take what cuBLASLt rejects, slower for prompts. Report the warning in Triton's log.",
            [
                Query(
                    "sum by (instance) (rate(charonia_gemms_rejected_total[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
    ]


def _machine() -> list[Panel]:
    return [
        graph(
            "Processor use",
            RATIO,
            "Near 1: without a GPU that is the engine itself; with one, find the process that takes the cores.",
            [
                Query(
                    'sum by (instance) (rate(node_cpu_seconds_total{mode!~"idle|iowait"}[$__rate_interval]))'
                    " / sum by (instance) (rate(node_cpu_seconds_total[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
            top=1,
        ),
        graph(
            "Memory available",
            BYTES,
            "Near 0: the system will end a process, the server first; lower cache_max_entry_count or give it more.",
            [Query("node_memory_MemAvailable_bytes", "{{instance}}")],
        ),
        graph(
            "Disk available",
            RATIO,
            "Below 10 %: remove models that nobody serves, or let Prometheus keep fewer days (15 unless told).",
            [
                Query(
                    f"node_filesystem_avail_bytes{{{_DISK}}} / node_filesystem_size_bytes{{{_DISK}}}",
                    "{{instance}} {{mountpoint}}",
                )
            ],
            top=1,
        ),
        graph(
            "Network received",
            BYTES_PER_SECOND,
            "Higher than usual without requests: a model is being fetched, or somebody else uses the machine.",
            [
                Query(
                    f"sum by (instance) (rate(node_network_receive_bytes_total{{{_NETWORK}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
    ]
