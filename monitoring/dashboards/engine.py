"""Engine: what the scheduler, the cache and the steps do, for when the overview says that something is slow."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from monitoring.dashboards import limits
from monitoring.dashboards.layout import Panel, dashboard, label_variable
from monitoring.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    RATIO,
    REQUESTS_PER_SECOND,
    SECONDS,
    TOKENS,
    Query,
    graph,
    mean,
    quantiles,
)

SERVERS = 'instance=~"$instance"'


def board() -> builders.Dashboard:
    return dashboard(
        "charonia-engine",
        "Charonia: engine",
        "Scheduler, KV cache and steps of the engine.",
        {
            "Requests": _requests(),
            "KV cache": _cache(),
            "Steps": _steps(),
            "What is asked": _shapes(),
            "Structured output": _grammars(),
        },
        [label_variable("instance", "Server", "charonia_kv_blocks_total", "instance")],
    )


def _each(metric: str) -> list[Query]:
    """A gauge, for each server."""
    return [Query(f"{metric}{{{SERVERS}}}", "{{instance}}")]


def _requests() -> list[Panel]:
    return [
        graph(
            "Running",
            COUNT,
            "At max_batch_size all the time: the server is full; add one, or raise it if the cache has room.",
            _each("charonia_num_requests_running"),
        ),
        graph(
            "Waiting",
            COUNT,
            "Above the line and not falling: more is asked than computed; runbook CharoniaQueueGrowing.",
            _each("charonia_num_requests_waiting"),
            limit=limits.WAITING_REQUESTS,
        ),
        graph(
            "Queue time",
            SECONDS,
            "Most of the time to first token: it is load, not speed. Add a server or lower what is sent.",
            quantiles("charonia_request_queue_time_seconds", SERVERS),
        ),
        graph(
            "Rejected or timed out",
            REQUESTS_PER_SECOND,
            "queue_*: overload, CharoniaRequestsRejected. deadline: raise timeouts. never_fits: raise session_len.",
            [
                Query(
                    f"sum by (reason) (rate(charonia_requests_rejected_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
            stacked=True,
        ),
        graph(
            "Preemptions",
            PER_SECOND,
            "Not 0 for long: the cache is too small for so many at once; runbook CharoniaCacheFullAndPreempting.",
            [
                Query(
                    f"sum by (instance) (rate(charonia_num_preemptions_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
        graph(
            "Cancel to free",
            SECONDS,
            "Longer than two steps: steps are long; see step_time_ms. It holds blocks that others wait for.",
            quantiles("charonia_cancel_to_free_seconds", SERVERS),
        ),
        graph(
            "Subscriptions",
            COUNT,
            "One for each process of a gateway that was asked. 0 there: see its log for why answers come by calls.",
            _each("charonia_subscriptions"),
        ),
    ]


def _cache() -> list[Panel]:
    return [
        graph(
            "Cache use",
            RATIO,
            "Above the line with preemptions: raise cache_max_entry_count, set quant_policy or lower max_batch_size.",
            _each("charonia_kv_cache_usage_perc"),
            limit=limits.CACHE_USAGE,
            top=1,
        ),
        graph(
            "Blocks",
            COUNT,
            "Active near the total: the cache is full. Kept for prefixes near 0: prefix hits will fall, too.",
            [
                Query(f"sum(charonia_kv_blocks_active{{{SERVERS}}})", "active"),
                Query(f"sum(charonia_kv_blocks_cached{{{SERVERS}}})", "kept for prefixes"),
                Query(f"sum(charonia_session_blocks_pinned{{{SERVERS}}})", "of sessions"),
                Query(f"sum(charonia_kv_blocks_committed{{{SERVERS}}})", "with memory"),
                Query(f"sum(charonia_kv_blocks_total{{{SERVERS}}})", "total"),
            ],
        ),
        graph(
            "Prefix hits",
            RATIO,
            "Lower than usual: prompts begin differently each time (a date in them?), or the cache is too small.",
            [
                Query(
                    f"sum by (instance) (rate(charonia_prefix_cache_hits_total{{{SERVERS}}}[$__rate_interval]))"
                    f" / sum by (instance) (rate(charonia_prefix_cache_queries_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
            top=1,
        ),
        graph(
            "Sessions",
            COUNT,
            "At max_sessions: the idlest are forgotten and computed anew at their next turn; raise max_sessions.",
            _each("charonia_num_sessions"),
        ),
        graph(
            "Memory",
            BYTES,
            "Changes at a start alone. Not what you expect: check MODEL, quant_policy and cache_max_entry_count.",
            [
                Query(f"sum by (instance) (charonia_weight_bytes{{{SERVERS}}})", "weights, {{instance}}"),
                Query(f"sum by (instance) (charonia_kv_cache_bytes{{{SERVERS}}})", "KV cache, {{instance}}"),
            ],
        ),
        graph(
            "Ended by reason",
            REQUESTS_PER_SECOND,
            "Any error: runbook CharoniaAnswersFailing. Many cancelled: users leave; look at the time to first token.",
            [
                Query(
                    f"sum by (finished_reason) (rate(charonia_request_success_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{finished_reason}}",
                )
            ],
            stacked=True,
        ),
    ]


def _steps() -> list[Panel]:
    return [
        graph(
            "Step time",
            SECONDS,
            "Longer at the same batch size: the machine is slower than usual (heat, neighbours, a lower clock).",
            quantiles("charonia_engine_step_seconds", SERVERS),
        ),
        graph(
            "Batch size",
            COUNT,
            "Near 1 while requests wait: look at cache use. Near max_batch_size: full, each user's text comes slower.",
            [
                *quantiles("charonia_engine_step_sequences", SERVERS, (0.5, 0.95)),
                Query(mean("charonia_engine_step_sequences", SERVERS, "instance"), "mean, {{instance}}"),
            ],
        ),
        graph(
            "Tokens per step",
            TOKENS,
            "Near token_budget while answers run: prompts fill the steps and answers stutter; see step_time_ms.",
            [
                *quantiles("charonia_engine_step_tokens", SERVERS, (0.5, 0.95)),
                Query(mean("charonia_engine_step_tokens", SERVERS, "instance"), "mean, {{instance}}"),
            ],
        ),
    ]


def _shapes() -> list[Panel]:
    return [
        graph(
            "Steps",
            PER_SECOND,
            "0 while requests run: the engine hangs; read the server's log, then restart it.",
            [
                Query(
                    f"sum by (instance) (rate(charonia_engine_steps_total{{{SERVERS}}}[$__rate_interval]))",
                    "{{instance}}",
                )
            ],
        ),
        graph(
            "Prompt tokens per request",
            TOKENS,
            "Longer than usual: the time to first token rises with it. Ask who sends them; session_len bounds them.",
            quantiles("charonia_request_prompt_tokens", SERVERS),
        ),
        graph(
            "Generated tokens per request",
            TOKENS,
            "Longer than usual: requests hold their blocks longer. Ask for max_tokens, or look at the answers.",
            quantiles("charonia_request_generation_tokens", SERVERS),
        ),
    ]


def _grammars() -> list[Panel]:
    def per_second(metric: str) -> str:
        return f"sum by (instance) (rate({metric}{{{SERVERS}}}[$__rate_interval]))"

    certain = per_second("charonia_jump_forward_tokens_total")
    return [
        graph(
            "Time to compile a grammar",
            SECONDS,
            "Milliseconds. Longer: large schemas, or guides that are made to cost much.",
            quantiles("charonia_guide_compile_seconds", SERVERS),
        ),
        graph(
            "Time of a token mask",
            SECONDS,
            "Longer than a forward pass: steps wait for it. Ambiguous grammars take long.",
            quantiles("charonia_token_mask_seconds", SERVERS),
        ),
        graph(
            "Tokens that were certain",
            RATIO,
            "With jump_forward: tokens of structured output that took no step of their own, among all tokens.",
            [Query(f"{certain} / {per_second('charonia_generation_tokens_total')}", "{{instance}}")],
        ),
    ]
