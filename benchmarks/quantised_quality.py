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
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    made = folder / variant.name.replace(" ", "-") if variant.options else DEMO / "model"
    options: tuple[str | Path, ...] = (
        *variant.options,
        "--samples",
        "32",
        "--max-length",
        "512",
        "--calibration",
        calibration,
    )
    how: list[str | Path] = ["--text", DEMO / "text.txt", "--quant-policy", str(variant.quant_policy)]
    return made_and_measured(DEMO / "model", made, options, how)


def made_and_measured(
    model: Path, made: Path, options: Sequence[str | Path], how: Sequence[str | Path]
) -> dict[str, Any] | str:
    """Like measure(). options: of charonia quantize, for `made`, where it is not there. how: options of evaluate."""
    seconds = 0.0
    if not made.exists():
        began = time.monotonic()
        code, said = charonia("quantize", model, "--dst", made, *options)
        seconds = time.monotonic() - began
        if code:
            return said
    code, said = charonia("evaluate", made, "--against", model, "--json", "--no-save", *how)
    return said if code else {**json.loads(said), "seconds": seconds}


FAMILIES = ("llama3", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mixtral", "qwen3-moe-dense-layers")
WORSE = 3.0  # times the KL divergence of rounding to the nearest that another method may have
_WINDOW = ("--window", "64", "--stride", "32", "--no-ask")


def write_small_model(name: str, folder: Path) -> None:
    """A model of the parity tests, with sizes that groups of 32 divide."""
    sys.path.insert(0, str(ROOT / "tests" / "parity"))
    from parity_models import VARIANTS, write_model  # type: ignore[import-not-found]  # of the tests

    variant = VARIANTS[name]
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    config = type(variant.config)(**{**variant.config.to_dict(), **sizes, "moe_intermediate_size": 64})
    write_model(folder, replace(variant, config=config), seed=3)


def run_families(folder: Path | None, names: Sequence[str]) -> tuple[list[str], list[Record]]:
    """Like run_quantised_quality(), of a small random model of every family, or of those named, in every scheme and
    method: whether llm-compressor makes of each what it should, which no other family shows."""
    from charonia.quantize.command import SCHEMES

    folder = folder or ROOT / "build" / "quantised"
    folder.mkdir(parents=True, exist_ok=True)
    text, calibration = folder / "text.txt", folder / "calibration.txt"
    content = calibration_text()
    text.write_text(content[-2000:], encoding="utf-8")
    calibration.write_text(content[:4000], encoding="utf-8")
    records: list[Record] = []
    missing: list[str] = []
    for name in names or FAMILIES:
        model = folder / name
        if not model.exists():
            write_small_model(name, model)
        for scheme, known in SCHEMES.items():
            nearest: float | None = None
            for method in sorted(known.methods, key="rtn".__ne__):
                grouped = ("--group-size", "32") if scheme == "w4a16" else ()
                options = ("--scheme", scheme, "--method", method, *grouped, "--calibration", calibration)
                made = folder / f"{name}-{scheme}-{method}"
                found = made_and_measured(model, made, (*options, "--max-length", "128"), ("--text", text, *_WINDOW))
                if isinstance(found, str):
                    missing.append(f"{name}, {scheme} {method}: {found}")
                    print(missing[-1], file=sys.stderr, flush=True)
                    continue
                kl, same = found["reference"]["kl_mean"], 100 * found["reference"]["top1_agreement"]
                print(
                    f"{name}, {scheme} {method}: KL {kl:.5f}, same top token {same:.1f} %", file=sys.stderr, flush=True
                )
                case = {"family": name, "scheme": scheme, "method": method}
                asked = None if nearest is None else {"asked": WORSE * nearest, "at_most": True}
                records.append(Record.of("quantised_families", "KL mean", "", kl, case=case, **(asked or {})))
                records.append(Record.of("quantised_families", "same top token", "%", same, case=case))
                nearest = kl if method == "rtn" else nearest
    return missing, records


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
