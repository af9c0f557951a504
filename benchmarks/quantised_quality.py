"""Quantises the demo model in every scheme and measures each: the table of benchmarks/results/quantised_quality.md.

It runs the real llm-compressor (`charonia quantize`), whose environment it makes where there is none. A folder that is
there is measured as it is. The calibration text is drawn from the demo model's corpus with another seed than the text
that is measured with.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.bench.records import Record

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
CALIBRATION_CHARACTERS = 40_000


@dataclass(frozen=True)
class Variant:
    """A row: options of charonia quantize (none: the model as it is), and the KV cache's quant_policy."""

    name: str
    options: tuple[str, ...] = ()
    quant_policy: int = 0


# 704, the demo model's intermediate size, is no multiple of 128.
_W4 = ("--scheme", "w4a16", "--group-size", "64")
VARIANTS = (
    Variant("bf16"),
    Variant("bf16", quant_policy=8),
    Variant("bf16", quant_policy=4),
    Variant("w8a16 rtn", ("--scheme", "w8a16")),
    Variant("w8a8 smoothquant", ("--scheme", "w8a8", "--method", "smoothquant")),
    Variant("w8a8 rtn", ("--scheme", "w8a8", "--method", "rtn")),
    Variant("fp8 rtn", ("--scheme", "fp8")),
    Variant("w4a16 awq", (*_W4, "--method", "awq")),
    Variant("w4a16 gptq", (*_W4, "--method", "gptq")),
    Variant("w4a16 rtn", (*_W4, "--method", "rtn")),
    Variant("w4a16 gptq", (*_W4, "--method", "gptq"), quant_policy=8),
)


def calibration_text() -> str:
    """Conversations of the kind that the model has learned."""
    sys.path.insert(0, str(DEMO))
    from demo_corpus.conversation import sample_without_tools  # type: ignore[import-not-found]  # beside the demo model

    rng, text = random.Random("calibration"), ""
    while len(text) < CALIBRATION_CHARACTERS:
        text += "".join(part for part, _ in sample_without_tools(rng))
    return text


def charonia(*arguments: str | Path) -> tuple[int, str]:
    """The exit code, and stdout or, of a failure, the last line of stderr."""
    # With -m, the sources in the current folder would come before the installed package.
    program = Path(sys.executable).with_name("charonia")
    try:
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    except OSError as error:
        return 1, f"{program} cannot be run: {error.strerror}"
    if done.returncode == 0:
        return 0, done.stdout
    return done.returncode, (done.stderr.strip().splitlines() or ["no message"])[-1]


def measure(variant: Variant, folder: Path, calibration: Path) -> dict[str, Any] | str:
    """charonia evaluate's record, with `seconds` of charonia quantize; or why there is none."""
    model, seconds = DEMO / "model", 0.0
    if variant.options:
        model = folder / variant.name.replace(" ", "-")
        if not model.exists():
            began = time.monotonic()
            options = (*variant.options, "--samples", "32", "--max-length", "512", "--calibration")
            code, said = charonia("quantize", DEMO / "model", "--dst", model, *options, calibration)
            seconds = time.monotonic() - began
            if code:
                return said
    how: list[str | Path] = ["--against", DEMO / "model", "--text", DEMO / "text.txt", "--json", "--no-save"]
    code, said = charonia("evaluate", model, *how, "--quant-policy", str(variant.quant_policy))
    return said if code else {**json.loads(said), "seconds": seconds}


def figures(variant: Variant, found: dict[str, Any]) -> list[Record]:
    kv = {0: "16 bits", 8: "int8", 4: "int4"}[variant.quant_policy]
    reference, questions = found["reference"], found["questions"]
    values = (
        ("weights", "bytes", found["weight_bytes"]),
        ("perplexity", "", found["text"]["perplexity"]),
        ("KL mean", "", reference["kl_mean"]),
        ("KL 99th", "", reference["kl_p99"]),
        ("same top token", "%", 100 * reference["top1_agreement"]),
        ("right answers", f"of {questions['asked']}", questions["right"]),
        *([("quantising", "s", found["seconds"])] if found["seconds"] else []),
    )
    case = {"scheme": variant.name, "KV cache": kv}
    return [Record.of("quantised_quality", name, unit, value, case=case) for name, unit, value in values]


def run_quantised_quality(folder: Path | None) -> tuple[list[str], list[Record]]:
    """What the report says beside the figures, and the figures. folder: where the quantised folders go, and stay; None:
    build/quantised of the checkout."""
    folder = folder or ROOT / "build" / "quantised"
    folder.mkdir(parents=True, exist_ok=True)
    calibration = folder / "calibration.txt"
    calibration.write_text(calibration_text(), encoding="utf-8")
    records: list[Record] = []
    missing: list[str] = []
    about = ""
    for variant in VARIANTS:
        name = f"{variant.name}, quant_policy {variant.quant_policy}"
        print(name, file=sys.stderr, flush=True)
        found = measure(variant, folder, calibration)
        if isinstance(found, str):
            missing.append(f"{name}, was not measured: {found}")
            print(missing[-1], file=sys.stderr, flush=True)
        else:
            measured = figures(variant, found)
            told = ", ".join(f"{one.name} {one.shown} {one.unit}".strip() for one in measured)
            print(f"{name}: {told}", file=sys.stderr, flush=True)
            records += measured
            text = found["text"]
            about = (
                f"{text['tokens']} tokens of models/demo/text.txt in windows of {text['window']}, stride "
                f"{text['stride']}; against the bf16 model with a 16-bit KV cache; {found['device']}. Weights of 4 "
                "bits are in groups of 64. The embedding, which is the output layer too, stays in bf16."
            )
    return [note for note in (about, *missing) if note], records
