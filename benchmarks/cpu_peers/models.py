"""The models: random weights of one shape, in the three forms that the engines read. Nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.cpu_peers.engines import WORKERS, EngineSpec, Environment
from charonia.bench.random_model import parse_shape, write_random_model


class ModelNotMadeError(Exception):
    """A form of the model could not be made; says why."""


def make_model(shape: str, folder: Path) -> Path:
    """The Hugging Face folder of bf16 weights of a shape of charonia.bench.random_model, made once."""
    place = folder / shape
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        write_random_model(place, parse_shape(shape), quick=True)
        (place / "made").touch()
    return place


def form_for(spec: EngineSpec, environment: Environment, source: Path) -> Path:
    """What the engine reads: the folder itself, or what a script of its own environment makes of it, once."""
    if spec.model == "hf":
        return source
    place = source.with_name(f"{source.name}-{spec.model}")
    result = place / "model.gguf" if spec.model == "gguf" else place
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        command = [str(environment.python), str(WORKERS / f"make_{spec.model}.py"), str(source), str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ModelNotMadeError(f"converting the model failed: {lines[-1]}")
        (place / "made").touch()
    return result
