"""Triton: what the server says of its models, the text models around the engine above all.

To Triton, a request by subscription ends when the engine has accepted it, and what comes of it is no request. So the
panels say what they leave out, and which panels of the engine's own metrics have it.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.dashboards.layout import Panel, dashboard, label_variable
from monitoring.dashboards.panels import (
    BYTES,
    COUNT,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    Query,
    graph,
)

SERVERS = 'instance=~"$instance"'
MODELS = f'{SERVERS},model=~"$model"'


def board() -> builders.Dashboard:
    return dashboard(
        "charonia-triton",
        "Charonia: Triton",
        "Requests, queue and compute times of the models in the Triton server. The ensemble contains the others. Of a "
        "request by subscription, the gateway's default, this is what happens until the engine has accepted it; "
        "Overview and Engine show its answer.",
        {
            "Models": _models(),
            "Times per request": _times(),
            "Process": _process(),
        },
        [
            label_variable("instance", "Server", "nv_inference_count", "instance"),
            label_variable("model", "Model", "nv_inference_count", "model"),
        ],
    )


def _rate(metric: str, by: str = "model") -> str:
    return f"sum by ({by}) (rate({metric}{{{MODELS}}}[$__rate_interval]))"


def _per_request(microseconds: str) -> list[Query]:
    """Of a counter of microseconds: seconds per request."""
    return [Query(f"{_rate(microseconds)} / {_rate('nv_inference_count')} / 1e6", "{{model}}")]


def _models() -> list[Panel]:
    return [
        graph(
            "Requests",
            REQUESTS_PER_SECOND,
            "A model without requests while others have some: it is not loaded; runbook CharoniaModelNotLoaded. But by "
            "subscription postprocessing and parsing have none, and engine also counts messages of subscriptions. "
            "Answers: Overview, Finish reasons.",
            [Query(_rate("nv_inference_request_success"), "{{model}}")],
        ),
        graph(
            "Failures",
            REQUESTS_PER_SECOND,
            "BACKEND: the model's own error, in the server's log. REJECTED: its queue is full. CANCELED: callers left. "
            "By subscription, what fails after the engine has accepted it is not here: Overview, Finish reasons.",
            [Query(_rate("nv_inference_request_failure", "model, reason"), "{{model}}, {{reason}}")],
        ),
        graph(
            "Pending",
            COUNT,
            "preprocessing above 0 for long: more text_instances, or more cores. postprocessing: no free core.",
            [Query(f"sum by (model) (nv_inference_pending_request_count{{{MODELS}}})", "{{model}}")],
        ),
    ]


def _times() -> list[Panel]:
    return [
        graph(
            "Queue time",
            SECONDS,
            "Above some milliseconds: no free core; of preprocessing too few instances, too.",
            _per_request("nv_inference_queue_duration_us"),
        ),
        graph(
            "Compute time",
            SECONDS,
            "preprocessing rises: long prompts; raise text_instances. engine counts the handing over alone: "
            "Engine, Step time.",
            _per_request("nv_inference_compute_infer_duration_us"),
        ),
        graph(
            "Whole time",
            SECONDS,
            "By calls, the ensemble's minus that of its parts is Triton's own; if it is large, the server is short of "
            "cores. By subscription it ends when the engine has accepted the request: Overview, Whole answer.",
            _per_request("nv_inference_request_duration_us"),
        ),
        graph(
            "Input",
            SECONDS,
            "Copying inputs: above a millisecond, prompts are very long or shared memory is short (shm_size).",
            _per_request("nv_inference_compute_input_duration_us"),
        ),
        graph(
            "Output",
            SECONDS,
            "Copying outputs: above a millisecond, log probabilities are asked for, or shm_size is short. By "
            "subscription no answer is copied here: Overview, Between two tokens.",
            _per_request("nv_inference_compute_output_duration_us"),
        ),
        graph(
            "Requests per execution",
            COUNT,
            "postprocessing near 1 at high load: its batching does not work; is dynamic_batching in its config.pbtxt? "
            "By subscription it has no requests: Engine, Batch size.",
            [
                Query(
                    f"{_rate('nv_inference_count')} / ({_rate('nv_inference_exec_count')} > 0)",
                    "{{model}}",
                )
            ],
        ),
    ]


def _process() -> list[Panel]:
    return [
        graph(
            "Processor use",
            RATIO,
            "Of the machine. Near 1 with a GPU: text models or neighbours take the cores; give the server more.",
            [Query(f"nv_cpu_utilization{{{SERVERS}}}", "{{instance}}")],
            top=1,
        ),
        graph(
            "Memory",
            BYTES,
            "Of the machine. Used near total: the system will end the server; lower cache_max_entry_count or sessions.",
            [
                Query(f"nv_cpu_memory_used_bytes{{{SERVERS}}}", "used, {{instance}}"),
                Query(f"nv_cpu_memory_total_bytes{{{SERVERS}}}", "total, {{instance}}"),
            ],
        ),
        graph(
            "Pinned memory pool",
            BYTES,
            "Used near total: copies to the GPU become slower; start the server with a larger pinned memory pool.",
            [
                Query(f"nv_pinned_memory_pool_used_bytes{{{SERVERS}}}", "used, {{instance}}"),
                Query(f"nv_pinned_memory_pool_total_bytes{{{SERVERS}}}", "total, {{instance}}"),
            ],
        ),
    ]
