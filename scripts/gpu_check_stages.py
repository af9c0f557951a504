"""The measurements of gpu_check.py, and the decisions that their figures allow. All models have random weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Figure = dict[str, Any]  # as charonia.bench.records.Record


@dataclass(frozen=True)
class Command:
    """`charonia benchmark`, or gpu_check_torch.py. tiny: the options of a rehearsal. model: scheme and shape. labels:
    columns for its figures. variables: of the environment, without CHARONIA_. optional: may fail."""

    name: str
    options: str = ""
    tiny: str = ""
    model: tuple[str, str] | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    optional: bool = False


LLAMA = "32,4096,32,8,14336,128256"
CASES = "--case 1,32,256 --case 64,1024,256 --case 4,2048,2 --case 8,1024,64 --case 256,256,256"


def static(scheme: str, shape: str = LLAMA, cases: str = CASES, label: str = "", **variables: str) -> Command:
    labels = {"weights": scheme or "bf16", "reproducible": "REPRODUCIBLE" in variables, "setting": label}
    tiny = "--runs 1 --case 1,32,4 --case 4,32,2"
    return Command("static", f"--runs 1 {cases}", tiny, (scheme, shape), labels, variables)


def both_modes(scheme: str, **variables: str) -> list[Command]:
    return [static(scheme, **variables), static(scheme, REPRODUCIBLE="True", **variables)]


def kernels(library: str, options: str, sizes: str, **variables: str) -> Command:
    ours = library.startswith("charonia")
    options = f"--no-reproducible {options}" if ours else f"--library {library} {options}"
    small = "--experts 4,2,128,128 --rows 16" if "experts" in options else "--rows 1 --context 70 --batch 2"
    tiny = f"--device {'cuda' if ours else 'cpu'} {options} --shape 1,128,4,2,256,300 {small} --rounds 1"
    whole = f"--device cuda {options} {sizes} --rounds 3"
    return Command("kernels", whole, tiny, None, {"library": library}, variables, not ours)


PDL = {  # those that may gain most come first
    "early": {"CUDA_PDL": "early"}, "late": {"CUDA_PDL": "late"},
    "late, prefetch": {"CUDA_PDL": "late", "CUDA_PREFETCH": "16"},
    "splits of 64": {"CUDA_DECODE_SPLIT": "64"}, "off": {"CUDA_PDL": "off"},
}  # fmt: skip
ATTENTION = ("--only attention", "--context 2048 --context 8192")
EXPERTS = ("--only experts --format w4a16 --format mxfp4", "--rows 1 --rows 64 --rows 512 --rows 2048")
# The stages in the order of their value: an estimate of the seconds with an H200 and 16 cores, and the commands.
MEASUREMENTS: dict[str, tuple[float, list[Command]]] = {
    "limits": (25, [Command("limits")]),
    "bf16": (80, both_modes("")),
    "w4a16": (75, both_modes("w4a16")),
    "yard_attention": (110, [
        kernels("charonia, proven", *ATTENTION, CUDA_UNPROVEN="0"),
        *(kernels(name, *ATTENTION) for name in ("charonia", "flashinfer", "xqa", "torch", "flash_attn_3"))]),
    "gap": (35, [Command("gap", model=("", LLAMA))]),
    "fp8": (75, both_modes("fp8")),
    "lib": (50, [kernels("charonia", "--only gemm --format bf16 --format w8a8", "--rows 1 --rows 16 --rows 2048")]),
    "w8a8": (75, both_modes("w8a8")),
    "python_tests": (45, []),
    "pdl": (120, [
        static(scheme, "4,4096,32,8,14336,32000", "--case 1,1024,256", name, CUDA_MEASURE_S="2", **variables)
        for name, variables in PDL.items() for scheme in ("", "w4a16")]),
    "yard_gemm": (90, [
        kernels(name, "--only gemm --format w4a16", "--rows 1 --rows 64") for name in ("charonia", "humming")]),
    "gpt_oss_20b": (140, [static("mxfp4", "gpt-oss-24,2880,64,8,2880,201088", "--case 1,32,256 --case 512,1000,1000")]),
    "qwen3_30b": (100, [static("w4a16", "qwen3-moe-48,2048,32,4,768,151936"), kernels("charonia", *EXPERTS)]),
    "two_ranks": (75, both_modes("w4a16", TENSOR_PARA_SIZE="2", DEVICE_IDS="0,0", CACHE_MAX_ENTRY_COUNT="4096")),
    "adapters": (60, [Command("adapters", "--check --prompt-tokens 256 --runs 1",
        "--check --batch-size 3 --rank 4 --prompt-tokens 8 --output-tokens 6 --runs 1", ("", LLAMA))]),
    "serving": (100, [Command(
        "compare", "--concurrency 64 --concurrency 256 --requests-per-client 2 --prompt-tokens 256",
        "--concurrency 2 --requests-per-client 1 --max-tokens 4 --device cpu", ("", LLAMA))]),
}  # fmt: skip
# Goals in tokens per second on an H200, by figure and batch.
GOALS: dict[str, dict[tuple[str, int], float]] = {
    "bf16": {("decode", 1): 265, ("decode", 64): 9500, ("prefill", 4): 45000},
    "w4a16": {("decode", 1): 560, ("decode", 64): 12000, ("prefill", 4): 40000},
    "fp8": {("decode", 1): 380, ("prefill", 4): 62000},
    "w8a8": {("prefill", 4): 48000},
    "gpt_oss_20b": {("output in all", 512): 13858},
}
PRICES = {1: 5.0, 64: 15.0}  # the most percent that `reproducible` may cost, by batch


def decide(stage: str, figures: Sequence[Figure], gpu: str = "") -> Iterator[str]:
    """Yield a line for each decision that the figures of a stage allow. The goals have a verdict only on an H200."""
    no_verdict = "" if re.search(r"\bH200\b", gpu) else f"no verdict on {gpu or 'this device'}"

    def at(name: str, **case: Any) -> float:
        return next((f["value"] for f in figures if f["name"] == name and case.items() <= f["case"].items()), math.nan)

    def cases(key: str) -> list[Any]:
        return list(dict.fromkeys(one["case"][key] for one in figures if key in one["case"]))

    for (name, batch), goal in GOALS.get(stage, {}).items():
        rate = at(name, batch=batch, reproducible=False)
        what = no_verdict or ("reached" if rate >= goal else f"missed by {1 - rate / goal:.1%}")
        figure = "not measured, " if math.isnan(rate) else f"{rate:.0f} tokens/s, {what}; "
        yield f"{stage}, batch {batch}: {name} {figure}goal for an H200: {goal:.0f}"
    for batch, limit in PRICES.items():
        price = 100 * (1 - at("decode", batch=batch, reproducible=True) / at("decode", batch=batch, reproducible=False))
        if not math.isnan(price):
            what = no_verdict or ("reached" if price <= limit else f"missed by {price - limit:.1f} points")
            yield f"{stage}, batch {batch}: reproducible costs {price:.1f} %, goal for an H200 {limit:.0f} %: {what}"
    if stage == "probe":
        yield f"reproducible mode {'may' if all(one['value'] == 100 for one in figures) else 'must not'} use wgmma"
    elif stage == "limits" and not math.isnan(sustained := at("bf16 GEMM", what="after 5 s")):
        burst = at("bf16 GEMM", what="burst")
        yield f"100 % is {at('read'):.2f} TB/s and {sustained:.0f} T operations/s in bf16 ({burst:.0f} in a burst)"
    elif stage == "gap" and not math.isnan(idle := (span := at("first to last kernel")) - at("kernels")):
        what = "shorten the gaps first" if idle > span / 20 else "the kernels decide"
        yield f"{idle:.2f} of {span:.2f} ms of a step are in no kernel: {what}"
    elif stage == "lib":
        for weight in cases("weight"):
            bf16, int8 = (at("time", weight=weight, format=kind, rows=2048) for kind in ("bf16", "w8a8"))
            kernel = next(one["case"]["kernel"] for one in figures if one["case"].get("weight") == weight)
            yield f"{weight}: w8a8 is {bf16 / int8:.2f} times as fast as bf16 with 2048 rows; 1 row in bf16: {kernel}"
    elif stage == "pdl":
        for weights in (one for one in cases("weights") if at("decode", weights=one, setting="early") > 0):
            rates = {name: at("decode", weights=weights, setting=name) for name in cases("setting")}
            rates = {name: rate / rates["early"] for name, rate in rates.items() if not math.isnan(rate)}
            best = max(rates, key=rates.__getitem__)
            take = best if rates[best] >= 1.02 else "early, as no other is 2 % faster"
            yield f"{weights}: {', '.join(f'{one} {rate:.3f}' for one, rate in rates.items())} of early: take {take}"
    elif stage == "qwen3_30b":
        names = {"wgmma": "charonia", "tiles": "charonia, proven"}
        times = [one for one in figures if one["name"] == "time" and one["case"]["kernel"] in names]
        times = [one | {"case": one["case"] | {"library": names[one["case"]["kernel"]]}} for one in times]
        yield from decide_yard(times)
    elif stage.startswith("yard"):
        yield from decide_yard([one for one in figures if one["name"] == "time"])


def decide_yard(times: Sequence[Figure]) -> Iterator[str]:
    operations: dict[str, dict[str, float]] = {}
    for one in times:
        operation = ", ".join(f"{k} {v}" for k, v in one["case"].items() if k not in ("library", "kernel", "mode"))
        operations.setdefault(operation, {})[one["case"]["library"]] = one["value"]
    for operation, by_library in operations.items():
        ours, proven = by_library.pop("charonia", math.nan), by_library.pop("charonia, proven", math.nan)
        if by_library and not math.isnan(ours):
            name = min(by_library, key=by_library.__getitem__)
            what = "keep our kernel" if ours <= by_library[name] / 0.85 else "below 85 %"
            yield f"{operation}: {by_library[name] / ours:.0%} of the speed of {name}: {what}"
        if not math.isnan(ours / proven):
            what = "prove them" if proven >= 1.02 * ours else "keep the proven ones"
            yield f"{operation}: with unproven kernels {proven / ours:.2f} times as fast: {what}"
