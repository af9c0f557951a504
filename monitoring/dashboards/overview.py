"""Overview: is the service well? The page that Grafana opens with."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.dashboards import limits
from monitoring.dashboards.layout import Panel, dashboard, label_variable
from monitoring.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS_PER_SECOND,
    Query,
    figure,
    graph,
    quantiles,
)

SERVERS = 'instance=~"$instance"'
API = 'route=~"/v1/.*"'
_RED_IF_ANY: list[tuple[float | None, str]] = [(None, "green"), (1, "red")]


def board() -> builders.Dashboard:
    return dashboard(
        "charonia-overview",
        "Charonia: overview",
        "Is the service well, and what do its users get?",
        {
            "Now": _now(),
            "Traffic": _traffic(),
            "Speed as users feel it": _speed(),
            "What goes wrong": _errors(),
            "Gateway and its servers": _gateway(),
        },
        [label_variable("instance", "Server", "charonia_kv_blocks_total", "instance")],
    )


def _now() -> list[Panel]:
    return [
        figure(
            "Alerts",
            COUNT,
            "Not 0: Alerting, Alert rules in the menu has the first steps of each; more in docs/runbooks.md.",
            'count(ALERTS{alertname=~"Charonia.*",alertstate="firing"}) or vector(0)',
            colours=_RED_IF_ANY,
        ),
        figure(
            "Servers down",
            COUNT,
            "Not 0: docker compose ps server, then its logs; runbook CharoniaServerDown.",
            'sum(1 - up{job="triton"})',
            colours=_RED_IF_ANY,
        ),
        figure(
            "Gateways down",
            COUNT,
            "Not 0: docker compose ps gateway, then its logs; runbook CharoniaGatewayDown.",
            'sum(1 - up{job="gateway"})',
            colours=_RED_IF_ANY,
        ),
        figure(
            "Running",
            COUNT,
            "Requests in the batch. 0 while requests wait: the engine hangs; read the server's log and restart it.",
            f"sum(charonia_num_requests_running{{{SERVERS}}})",
        ),
        figure(
            "Waiting",
            COUNT,
            "Stays above 0: more is asked than is computed; runbook CharoniaQueueGrowing.",
            f"sum(charonia_num_requests_waiting{{{SERVERS}}})",
            colours=[(None, "green"), (1, "yellow"), (limits.WAITING_REQUESTS, "red")],
        ),
        figure(
            "Tokens generated",
            TOKENS_PER_SECOND,
            "Lower than usual with requests waiting: see step time on the Engine dashboard.",
            f"sum(rate(charonia_generation_tokens_total{{{SERVERS}}}[$__rate_interval]))",
        ),
        figure(
            "First token, p95",
            SECONDS,
            "Red: users wait too long; runbook CharoniaTimeToFirstTokenHigh.",
            f"max(instance_model:charonia_time_to_first_token_seconds:p95_5m{{{SERVERS}}})",
            colours=[
                (None, "green"),
                (limits.TIME_TO_FIRST_TOKEN_S / 2, "yellow"),
                (limits.TIME_TO_FIRST_TOKEN_S, "red"),
            ],
        ),
        figure(
            "Errors",
            RATIO,
            "Red: look at Responses by status below, then runbook CharoniaErrorRatioHigh.",
            "max(instance:charonia_gateway_errors:ratio_rate5m)",
            colours=[(None, "green"), (limits.ERROR_RATIO / 5, "yellow"), (limits.ERROR_RATIO, "red")],
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        graph(
            "Requests",
            REQUESTS_PER_SECOND,
            "Falls to 0: is the gateway up, do clients reach it? Jumps: one client may be repeating; limit it.",
            [Query(f"sum by (route) (rate(charonia_gateway_requests_total{{{API}}}[$__rate_interval]))", "{{route}}")],
            stacked=True,
        ),
        graph(
            "Tokens",
            TOKENS_PER_SECOND,
            "Generated falls while requests wait: see step time and preemptions on the Engine dashboard.",
            [
                Query(f"sum(rate(charonia_generation_tokens_total{{{SERVERS}}}[$__rate_interval]))", "generated"),
                Query(f"sum(rate(charonia_prompt_tokens_total{{{SERVERS}}}[$__rate_interval]))", "of prompts"),
            ],
        ),
        graph(
            "Running and waiting",
            COUNT,
            "Waiting grows and does not fall: add a server, or send less; runbook CharoniaQueueGrowing.",
            [
                Query(f"sum(charonia_num_requests_running{{{SERVERS}}})", "running"),
                Query(f"sum(charonia_num_requests_waiting{{{SERVERS}}})", "waiting"),
            ],
            limit=limits.WAITING_REQUESTS,
        ),
    ]


def _speed() -> list[Panel]:
    return [
        graph(
            "Time to first token",
            SECONDS,
            "Above the line: compare with queue time on the Engine dashboard; runbook CharoniaTimeToFirstTokenHigh.",
            quantiles("charonia_time_to_first_token_seconds", SERVERS),
            limit=limits.TIME_TO_FIRST_TOKEN_S,
        ),
        graph(
            "Between two tokens",
            SECONDS,
            "Above the line people read faster than it writes; runbook CharoniaInterTokenLatencyHigh.",
            quantiles("charonia_inter_token_latency_seconds", SERVERS),
            limit=limits.INTER_TOKEN_LATENCY_S,
        ),
        graph(
            "Whole answer",
            SECONDS,
            "Longer with the two others unchanged: answers are longer than usual; see tokens per request on Engine.",
            quantiles("charonia_e2e_request_latency_seconds", SERVERS),
        ),
    ]


def _errors() -> list[Panel]:
    errors = "instance:charonia_gateway_errors:ratio_rate5m"
    failed = f"instance_model:charonia_answers_failed:ratio_rate5m{{{SERVERS}}}"
    return [
        graph(
            "Alerts",
            COUNT,
            "Raised, or pending before they are: Alerting, Alert rules has the first steps; more in docs/runbooks.md.",
            [
                Query(
                    'sum by (alertname, alertstate) (ALERTS{alertname=~"Charonia.*"})'
                    ' or label_replace(vector(0), "alertname", "none", "", "")',
                    "{{alertname}} {{alertstate}}",
                )
            ],
            stacked=True,
        ),
        graph(
            "Error ratio",
            RATIO,
            "Gateway above the line: CharoniaErrorRatioHigh. Engine above 1 %: CharoniaAnswersFailing.",
            [
                Query(f"max({errors})", "gateway: status 500 or above"),
                Query(f"max({failed})", "engine: answers failed"),
            ],
            limit=limits.ERROR_RATIO,
        ),
        graph(
            "Responses by status",
            REQUESTS_PER_SECOND,
            "429: overload. 499: clients leave. 503: no server. 504: time limits. 500: logs. 501: no structured "
            "output. 4xx: ask the client.",
            [
                Query(
                    f"sum by (status) (rate(charonia_gateway_requests_total{{{API}}}[$__rate_interval]))", "{{status}}"
                )
            ],
            stacked=True,
        ),
        graph(
            "Finish reasons",
            REQUESTS_PER_SECOND,
            "Much length: max_tokens is too low. Much cancelled: users do not wait. Any error: CharoniaAnswersFailing.",
            [
                Query(
                    f"sum by (finished_reason) (rate(charonia_request_success_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{finished_reason}}",
                )
            ],
            stacked=True,
        ),
        graph(
            "Rejected or timed out",
            REQUESTS_PER_SECOND,
            "queue_*: overload, add a server. deadline: time limits too short. never_fits: prompts beyond the context.",
            [
                Query(
                    f"sum by (reason) (rate(charonia_requests_rejected_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
            stacked=True,
        ),
        graph(
            "Disconnected clients",
            PER_SECOND,
            "Rises with the time to first token: people give up. Alone: a client's time limit is too short.",
            [Query("sum(rate(charonia_gateway_disconnects_total[$__rate_interval]))", "left")],
        ),
    ]


def _gateway() -> list[Panel]:
    return [*_gateway_load(), *_gateway_choices(), *_gateway_keys()]


def _gateway_load() -> list[Panel]:
    """What it has to do, and what its servers have."""
    return [
        graph(
            "Requests in work",
            COUNT,
            "Much higher than running and waiting together: clients do not read their answers, or the gateway hangs.",
            [Query("charonia_gateway_requests_running", "{{instance}}")],
        ),
        graph(
            "Time to the answer's beginning, p95",
            SECONDS,
            "Higher than the time to first token: the gateway itself is busy; run another one.",
            [
                Query(
                    "histogram_quantile(0.95, sum by (le, route) "
                    f"(rate(charonia_gateway_time_to_first_byte_seconds_bucket{{{API}}}[$__rate_interval])))",
                    "{{route}}",
                )
            ],
        ),
        graph(
            "Servers that take requests",
            COUNT,
            "0: the gateway sends that server nothing; it is down, not ready or hangs; runbook CharoniaEndpointDown. "
            "One of several models: it is unloaded there.",
            [Query("min by (endpoint, model) (charonia_gateway_endpoint_up)", "{{endpoint}} {{model}}")],
            top=1,
        ),
    ]


def _gateway_choices() -> list[Panel]:
    """Failures of processes and servers, and how answers come."""
    return [
        graph(
            "Processes that died and were replaced",
            COUNT,
            "Not 0: the answers of a process of the gateway were lost with it; runbook CharoniaGatewayWorkerRestarted.",
            [
                Query(
                    "sum by (instance) (increase(charonia_gateway_worker_restarts_total[$__rate_interval]))",
                    "{{instance}}",
                ),
            ],
        ),
        graph(
            "Retries",
            PER_SECOND,
            "Not 0 for long: a server fails or is full; see which takes no requests, and read its log.",
            [Query("sum(rate(charonia_gateway_retries_total[$__rate_interval]))", "sent on to another server")],
        ),
        graph(
            "How answers come from Triton",
            REQUESTS_PER_SECOND,
            "Nearly all by call costs CPU time: is CHARONIA_GATEWAY_SUBSCRIBE off? See docs/operations.md.",
            [Query("sum by (way) (rate(charonia_gateway_triton_requests_total[$__rate_interval]))", "by {{way}}")],
            stacked=True,
        ),
    ]


def _gateway_keys() -> list[Panel]:
    return [
        graph(
            "Tokens by API key",
            TOKENS_PER_SECOND,
            "One key far above the others: bound its tokens_per_minute. Empty: the gateway asks for no keys.",
            [Query("sum by (key) (rate(charonia_gateway_key_tokens_total[$__rate_interval]))", "{{key}}")],
            stacked=True,
        ),
        graph(
            "Requests over a key's limit",
            PER_SECOND,
            "Not 0 for long: that user needs more, or does not wait as Retry-After says.",
            [
                Query(
                    "sum by (key, limit) (rate(charonia_gateway_key_limited_total[$__rate_interval]))",
                    "{{key}}: {{limit}}",
                )
            ],
        ),
    ]
