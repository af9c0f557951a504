"""`charonia calibrate`: the ranges that quantisation would meet, by layer, and what they advise."""

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

from charonia.errors import InvalidRequestError
from charonia.quality.evaluate import default_text
from charonia.quantize import environment
from charonia.quantize.command import check_calibration, check_source
from charonia.quantize.driver import IGNORED

# Rules of thumb, no measurements: relative errors of keys and values up to which so many bits are proposed, and
# outliers from which on activations of 8 bits want smoothing. What a model really loses, charonia evaluate measures.
MAX_ERROR = {8: 0.02, 4: 0.08}
MANY_OUTLIERS = 20.0
_SMOOTHED = re.compile(r".*[.](?:self_attn[.](?:q|k|v|qkv)|mlp[.](?:gate|up|gate_up))_proj")  # as driver.py has it
_STAYS = re.compile("|".join(one.removeprefix("re:") for one in IGNORED))  # in 16 bits, as routers do


@dataclass(frozen=True)
class Held:
    """Keys or values of a layer; errors are relative: root mean square of the error by that of the numbers."""

    min: float
    max: float
    error8: float
    error4: float


@dataclass(frozen=True)
class Inputs:
    """Of a linear layer: mean and maximum of absolute values; outliers: the largest channel's maximum by the median
    channel's."""

    mean: float
    max: float
    outliers: float


@dataclass(frozen=True)
class Ranges:
    """What was seen over `tokens` tokens."""

    model: str
    tokens: int
    keys: list[Held]  # by layer
    values: list[Held]
    inputs: dict[str, Inputs]  # by the module's name

    @property
    def quant_policy(self) -> int:
        """The one that is advised: 4, 8 or 0."""
        held = [*self.keys, *self.values]
        if all(one.error4 <= MAX_ERROR[4] for one in held):
            return 4
        return 8 if all(one.error8 <= MAX_ERROR[8] for one in held) else 0

    def advice(self) -> list[str]:
        """Sentences for the user."""
        worst8 = max(one.error8 for one in (*self.keys, *self.values))
        worst4 = max(one.error4 for one in (*self.keys, *self.values))
        lines = [
            f"quant_policy = {self.quant_policy}: the greatest relative error of keys or values in a layer is "
            f"{worst8:.2%} with 8 bits and {worst4:.2%} with 4 (a rule of thumb takes up to {MAX_ERROR[8]:.0%} and "
            f"{MAX_ERROR[4]:.0%}). Measure it: charonia evaluate {self.model} --against {self.model} --quant-policy "
            f"{self.quant_policy or 8}"
        ]
        reach = {
            True: "needs --method smoothquant",
            False: "may lose much there, as smoothquant reaches only what q, k, v, gate and up get, and no experts",
        }
        quantised = {name: one for name, one in self.inputs.items() if not _STAYS.match(name)}
        for smoothed, w8a8 in reach.items():
            rows = {name: one for name, one in quantised.items() if bool(_SMOOTHED.fullmatch(name)) == smoothed}
            if not rows or max(one.outliers for one in rows.values()) < MANY_OUTLIERS:
                continue
            name, most = max(rows.items(), key=lambda item: item[1].outliers)
            lines.append(
                f"activations have outliers ({name}: {most.outliers:.0f} times the median channel): w8a8 {w8a8}; w8a16 "
                "and w4a16 leave activations as they are"
            )
        if len(lines) == 1:
            name, most = max(quantised.items(), key=lambda item: item[1].outliers)
            lines.append(f"activations have few outliers ({name}: {most.outliers:.0f} times the median channel)")
        return lines

    def content(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "quant_policy": self.quant_policy, "advice": self.advice()}


def calibrate(
    model: str | os.PathLike[str],
    *,
    calibration: Path | None = None,
    samples: int = 128,
    max_length: int = 2048,
    say: Callable[[str], None] = lambda _: None,
) -> Ranges:
    """Runs the model over the calibration text with transformers, in the environment of charonia quantize.

    The arguments are those of quantize(). Raises CharoniaError saying what would be right.
    """
    if calibration is not None:
        check_calibration(calibration)
    if samples < 1 or max_length < 2:
        raise InvalidRequestError(f"samples = {samples} and max_length = {max_length}: at least 1 and 2 are needed")
    folder = check_source(model)
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
        keys=[Held(**layer["k"]) for layer in found["layers"]],
        values=[Held(**layer["v"]) for layer in found["layers"]],
        inputs={name: Inputs(**one) for name, one in found["inputs"].items()},
    )


def show(ranges: Ranges, console: Console) -> None:
    """Prints the ranges as tables, and the advice."""
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
