"""`charonia calibrate`: measures the value ranges of each layer and recommends quantisation settings."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from charonia.quality.evaluate import default_text
from charonia.quantize import environment
from charonia.quantize.command import checked_source
from charonia.quantize.driver import IGNORED

# Rules of thumb, not measurements. MAX_ERROR: the largest relative error of keys and values that is acceptable for a
# number of bits. MANY_OUTLIERS: 8-bit activations with more outliers need smoothing. `charonia evaluate` measures the
# real loss of a model.
MAX_ERROR = {8: 0.02, 4: 0.08}
MANY_OUTLIERS = 20.0
_SMOOTHED = re.compile(r".*[.](?:self_attn[.](?:q|k|v|qkv)|mlp[.](?:gate|up|gate_up))_proj")  # same as in driver.py
_STAYS = re.compile("|".join(one.removeprefix("re:") for one in IGNORED))  # modules that keep 16 bits


@dataclass(frozen=True)
class KvStats:
    """Statistics of the keys or the values of a layer. An error is the RMS error divided by the RMS value."""

    min: float
    max: float
    error8: float
    error4: float


@dataclass(frozen=True)
class InputStats:
    """Statistics of the input of a linear layer: mean and maximum of the absolute values. outliers: the maximum of the
    largest channel divided by the maximum of the median channel."""

    mean: float
    max: float
    outliers: float


@dataclass(frozen=True)
class Ranges:
    """The statistics of a model over `tokens` tokens."""

    model: str
    tokens: int
    keys: list[KvStats]  # by layer
    values: list[KvStats]
    inputs: dict[str, InputStats]  # by module name

    @property
    def quant_policy(self) -> int:
        """The recommended KV-cache policy: 4, 8 or 0."""
        held = [*self.keys, *self.values]
        if all(one.error4 <= MAX_ERROR[4] for one in held):
            return 4
        return 8 if all(one.error8 <= MAX_ERROR[8] for one in held) else 0

    def advice(self) -> list[str]:
        """Return recommendations for the user, one sentence each."""
        worst8 = max(one.error8 for one in (*self.keys, *self.values))
        worst4 = max(one.error4 for one in (*self.keys, *self.values))
        lines = [
            f"quant_policy = {self.quant_policy}: the largest relative error of keys or values in a layer is "
            f"{worst8:.2%} with 8 bits and {worst4:.2%} with 4 (rule of thumb: at most {MAX_ERROR[8]:.0%} and "
            f"{MAX_ERROR[4]:.0%}). Measure it: charonia evaluate {self.model} --against {self.model} --quant-policy "
            f"{self.quant_policy or 8}"
        ]
        reach = {
            True: "needs --method smoothquant",
            False: "may lose much accuracy there: smoothquant scales the inputs of q, k, v, gate and up, no experts",
        }
        quantised = {name: one for name, one in self.inputs.items() if not _STAYS.match(name)}
        for smoothed, w8a8 in reach.items():
            rows = {name: one for name, one in quantised.items() if bool(_SMOOTHED.fullmatch(name)) == smoothed}
            if not rows or max(one.outliers for one in rows.values()) < MANY_OUTLIERS:
                continue
            name, most = max(rows.items(), key=lambda item: item[1].outliers)
            lines.append(
                f"activations have outliers ({name}: {most.outliers:.0f} times the median channel): w8a8 {w8a8}; w8a16 "
                "and w4a16 do not change activations"
            )
        if len(lines) == 1:
            name, most = max(quantised.items(), key=lambda item: item[1].outliers)
            lines.append(f"activations have few outliers ({name}: {most.outliers:.0f} times the median channel)")
        return lines

    def content(self) -> dict[str, Any]:
        """Return the JSON object that `--json` prints."""
        return {**asdict(self), "quant_policy": self.quant_policy, "advice": self.advice()}


def calibrate(
    model: str | os.PathLike[str],
    *,
    calibration: Path | None = None,
    samples: int = 128,
    max_length: int = 2048,
    say: Callable[[str], None] = lambda _: None,
) -> Ranges:
    """Run the model over the calibration text with transformers, in the environment of `charonia quantize`.

    The arguments are the same as for quantize(). Raises CharoniaError with advice for the user.
    """
    folder = checked_source(model, calibration, samples, max_length)
    with tempfile.TemporaryDirectory(prefix="charonia-") as temporary:
        job, output = Path(temporary) / "job.json", Path(temporary) / "ranges.json"
        content = {
            "task": "calibrate",
            "model": str(folder),
            "output": str(output),
            "calibration": str(calibration or default_text()),
            "samples": samples,
            "max_length": max_length,
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        environment.run(job, output, say)
        found = json.loads(output.read_text(encoding="utf-8"))
    return Ranges(
        model=str(model),
        tokens=found["tokens"],
        keys=[KvStats(**layer["k"]) for layer in found["layers"]],
        values=[KvStats(**layer["v"]) for layer in found["layers"]],
        inputs={name: InputStats(**one) for name, one in found["inputs"].items()},
    )


def show(ranges: Ranges, console: Console) -> None:
    """Print the ranges as tables, then the recommendations."""
    cache = Table(title=f"Keys and values over {ranges.tokens} tokens", title_justify="left")
    cache.add_column("layer", justify="right")
    for kind in ("k", "v"):
        for what in ("min", "max", "int8 error", "int4 error"):
            cache.add_column(f"{kind} {what}", justify="right")
    for number, pair in enumerate(zip(ranges.keys, ranges.values, strict=True)):
        cells = [(f"{x.min:.3g}", f"{x.max:.3g}", f"{x.error8:.2%}", f"{x.error4:.2%}") for x in pair]
        cache.add_row(str(number), *cells[0], *cells[1])
    inputs = Table(title="Inputs of linear layers", title_justify="left")
    inputs.add_column("module")
    for what in ("mean |x|", "max |x|", "outliers"):
        inputs.add_column(what, justify="right")
    for name, one in ranges.inputs.items():
        inputs.add_row(name, f"{one.mean:.3g}", f"{one.max:.3g}", f"{one.outliers:.1f}")
    for table in (cache, inputs):
        console.print(table)
    for line in ranges.advice():
        console.print(line, highlight=False, markup=False)
