"""Decisions that the figures of scripts/gpu_check.sh allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

Record = dict[str, Any]  # as charonia.bench.records.Record


def decide(stage: str, records: Sequence[Record]) -> Iterator[str]:
    """Yield one line for each decision that the figures of a stage allow."""

    def at(name: str, **case: Any) -> float:
        found = (one["value"] for one in records if one["name"] == name and case.items() <= one["case"].items())
        return next(found, math.nan)

    def cases(key: str) -> list[Any]:
        return list(dict.fromkeys(one["case"][key] for one in records if key in one["case"]))

    if stage == "probe":
        may = "may" if all(one["value"] == 100 for one in records) else "must not"
        yield f"reproducible mode {may} use wgmma"
    elif stage == "limits":
        burst, sustained = at("bf16 GEMM", what="burst"), at("bf16 GEMM", what="after 5 s")
        yield f"100 % is {at('read'):.2f} TB/s and {sustained:.0f} T operations/s in bf16 ({burst:.0f} in a burst)"
    elif stage == "gap":
        span = at("first to last kernel")
        what = "shorten the gaps first" if (idle := span - at("kernels")) > span / 20 else "the kernels decide"
        yield f"{idle:.2f} of {span:.2f} ms of a step are in no kernel: {what}"
    elif stage == "lib":
        for weight in cases("weight"):
            one, padded = at("time", weight=weight, rows=1), at("time", weight=weight, rows=16)
            yield f"{weight}: 1 row {one:.1f} us, 16 rows {padded:.1f} us: {'pad' if padded < one else 'do not pad'}"
            bf16, s8 = (at("time", weight=weight, type=kind, rows=2048) for kind in ("bf16", "s8"))
            yield f"{weight}: int8 {bf16 / s8:.2f} times bf16: {'cuBLASLt' if s8 < bf16 else 'our tiles'} for W8A8"
    elif stage == "pdl":
        for weights in cases("weights"):
            rates = {name: at("decode", weights=weights, setting=name) for name in cases("setting")}
            of_early = ", ".join(f"{name} {rate / rates['early']:.3f}" for name, rate in rates.items())
            best = max(rates, key=rates.__getitem__)
            take = best if rates[best] >= 1.02 * rates["early"] else "early, as no other is 2 % faster"
            yield f"{weights}: {of_early} of early: take {take}"
    elif stage == "yard":
        for rows in cases("rows"):
            rates = {name: at("rate", kernel=name, rows=rows) for name in cases("kernel")}
            ours = {name: rate for name, rate in rates.items() if name in ("charonia tiles", "charonia wgmma")}
            library = max((rate for name, rate in rates.items() if not name.startswith("charonia")), default=0.0)
            if ours and library > 0:
                best = max(ours, key=ours.__getitem__)
                what = "keep our attention" if ours[best] >= 0.85 * library else "below 85 %, the exit rule counts"
                yield f"{rows} rows: {best} has {ours[best] / library:.0%} of the best library: {what}"
            for name, rate in rates.items():
                tiles = rates.get(name.replace("wgmma", "tiles"))
                if name.startswith("charonia wgmma") and tiles:
                    what = "prove it" if rate >= 1.02 * tiles else "keep tiles"
                    yield f"{rows} rows: {name} {rate / tiles:.2f} times tiles: {what}"
    elif stage in ("decode", "decode_w4a16"):
        for weights in cases("weights"):
            for batch, prompt, limit, goal in ((1, 32, 0.05, "265 / 560"), (64, 1024, 0.15, "9,500 / 12,000")):
                case = {"weights": weights, "batch": batch, "prompt": prompt}
                exact, fast = (at("decode", reproducible=of, **case) for of in (True, False))
                if not math.isnan(fast):
                    yield f"{weights}, batch {batch}: {fast:.0f} tokens/s; goal for an H200: {goal} in bf16 / w4a16"
                    what = "kept" if exact >= (1 - limit) * fast else "missed"
                    cost = f"{1 - exact / fast:.0%} of at most {limit:.0%}"
                    yield f"{weights}, batch {batch}: reproducible costs {cost}: {what}"
