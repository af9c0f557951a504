"""Bar 5: the same requests to the engine in this process and through Triton's gRPC, at several concurrencies."""

from __future__ import annotations

import importlib.util
from typing import Any

from gpu_check.context import Context
from gpu_check.records import Outcome, bar, skipped
from gpu_check.speed import model_of, told_errors
from gpu_check.worker import Session

_NEEDED = {
    "pytriton": "nvidia-pytriton", "tritonclient": "tritonclient", "fastapi": "fastapi", "uvicorn": "uvicorn",
    "pydantic_settings": "pydantic-settings", "dotenv": "python-dotenv", "prompt_toolkit": "prompt-toolkit",
    "prometheus_client": "prometheus-client",
}  # fmt: skip


def bench5(context: Context, session: Session, size: str) -> Outcome:
    missing = [wheel for module, wheel in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return skipped(f"not here: {', '.join(missing)}; bring them along with scripts/gpu_check.sh --pack .whl")
    from rich.console import Console

    from charonia.bench import workload
    from charonia.bench.compare import compare_records, run_compare
    from charonia.bench.figures import print_errors
    from charonia.bench.records import print_records

    levels, tokens, prompt = ((1, 4), 16, 8) if context.rehearse else ((1, 32, 128, 256), 128, 32)
    settings: dict[str, Any] = {"max_batch_size": max(levels), "session_len": 1024, "device": context.device}
    if context.rehearse:
        settings |= {"cache_max_entry_count": 256, "threads": 1}
    settings |= context.settings
    model = model_of(context, size)
    jobs = {level: workload.random_jobs(model, max(2 * level, 4), prompt, tokens, seed=level) for level in levels}
    console = Console(width=140)
    results = run_compare(
        model,
        jobs,
        rounds=1,
        settings=settings,
        console=console,
        targets=("in-process", "triton"),
        processes=1 if context.rehearse else 4,
        serve_options=[] if context.rehearse else ["--text-instances", "4"],
    )
    found = compare_records(results)
    print_records(console, found)
    print_errors(console, found)
    bars = [
        bar("5", f"through Triton's gRPC at {record.case['requests at once']} at once: share of in process",
            record.value, "%", 95)
        for record in found
        if record.name == "of in process" and record.case["target"] == "triton"
    ]  # fmt: skip
    told = ", ".join(f"{one.value:.0f} %" for one in bars)
    summary = f"{told} of the tokens/s in process at {', '.join(map(str, levels))} at once"
    return told_errors("bench5", found, Outcome("passed", summary, settings, [*found, *bars]))
