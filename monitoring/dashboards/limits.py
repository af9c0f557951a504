"""From where on a figure is bad: the numbers that alerts compare with, drawn as lines in graphs."""

from __future__ import annotations

TIME_TO_FIRST_TOKEN_S = 5.0
INTER_TOKEN_LATENCY_S = 0.25
ERROR_RATIO = 0.05
WAITING_REQUESTS = 10.0
CACHE_USAGE = 0.9
GPU_MEMORY = 0.97
GPU_TEMPERATURE_C = 85.0

# The alert that each belongs to: a test holds the two together.
ALERTS = {
    "CharoniaTimeToFirstTokenHigh": TIME_TO_FIRST_TOKEN_S,
    "CharoniaInterTokenLatencyHigh": INTER_TOKEN_LATENCY_S,
    "CharoniaErrorRatioHigh": ERROR_RATIO,
    "CharoniaQueueGrowing": WAITING_REQUESTS,
    "CharoniaCacheFullAndPreempting": CACHE_USAGE,
    "CharoniaGpuMemoryFull": GPU_MEMORY,
    "CharoniaGpuHot": GPU_TEMPERATURE_C,
}
