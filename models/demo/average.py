"""Writes a model whose weights are a weighted mean of those of models that were trained from one another.

    python models/demo/average.py build/first=0.5 build/second=0.5 --output build/mean

Of models on one path of training the mean is often better than each of them (Wortsman et al. 2022, "Model soups").
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor


def parse(text: str) -> tuple[Path, float]:
    """FOLDER=WEIGHT; a typer.BadParameter where it is something else."""
    folder, _, weight = text.rpartition("=")
    try:
        share = float(weight)
    except ValueError:
        share = math.nan
    if not folder or not math.isfinite(share):
        raise typer.BadParameter(f"{text!r} is not FOLDER=WEIGHT, as in build/demo=0.5")
    return Path(folder), share


def main(
    models: Annotated[list[str], typer.Argument(help="FOLDER=WEIGHT of each model; the weights add up to 1.")],
    output: Annotated[Path, typer.Option(help="Folder of the mean; its other files are the first model's.")],
) -> None:
    """Writes the weighted mean of models of one shape, summed in fp32, in bf16."""
    parts = [parse(text) for text in models]
    if abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise typer.BadParameter(f"the weights add up to {sum(share for _, share in parts):g}, not to 1")
    mean: dict[str, Tensor] = {}
    for folder, share in parts:
        for name, tensor in load_file(folder / "model.safetensors").items():
            mean[name] = mean.get(name, torch.zeros(())) + share * tensor.float()
    shutil.copytree(parts[0][0], output, dirs_exist_ok=True)
    save_file(
        {name: tensor.to(torch.bfloat16) for name, tensor in mean.items()},
        output / "model.safetensors",
        metadata={"format": "pt"},
    )


if __name__ == "__main__":
    typer.run(main)
