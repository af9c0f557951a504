"""The models: random weights of one shape, in the three forms that the engines read. Nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

from benchmarks.cpu_peers.engines import WORKERS, EngineSpec, Environment
from charonia.bench.random_model import parse_shape, write_random_model

# Of every model: room for the longest prompts that are measured.
MAX_POSITIONS = 65536


class ModelNotMadeError(Exception):
    """A form of the model could not be made; says why."""


def make_model(shape: str, folder: Path, scheme: str = "") -> Path:
    """The Hugging Face folder of a shape of charonia.bench.random_model, made once: weights in bf16, or quantised by
    `scheme`."""
    place = folder / (f"{shape}-{scheme}" if scheme else shape)
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        sizes = replace(parse_shape(shape), max_positions=MAX_POSITIONS)
        write_random_model(place, sizes, scheme=scheme, quick=True)
        (place / "made").touch()
    return place


def form_for(spec: EngineSpec, environment: Environment, source: Path) -> Path:
    """What the engine reads: the bf16 folder itself, or what a script of its own environment makes of it, once."""
    if spec.model == "hf":
        return make_model(source.name, source.parent, spec.variant) if spec.variant else source
    if spec.model == "gguf":
        whole = _made(source, "gguf", environment, "make_gguf.py", "model.gguf", [str(source)])
        if not spec.variant:
            return whole
        return _made(
            source, f"gguf-{spec.variant}", environment, "quantise_gguf.py", "model.gguf", [str(whole), spec.variant]
        )
    kind = f"{spec.model}-{spec.variant}" if spec.variant else spec.model
    return _made(source, kind, environment, f"make_{spec.model}.py", "", [str(source), spec.variant])


def _made(source: Path, kind: str, environment: Environment, script: str, file: str, arguments: list[str]) -> Path:
    """What a script makes: it is called with the arguments and behind them the place, a folder or a file in one."""
    place = source.with_name(f"{source.name}-{kind}")
    result = place / file if file else place
    if not (place / "made").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        command = [str(environment.python), str(WORKERS / script), *arguments, str(result)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ModelNotMadeError(f"converting the model failed: {lines[-1]}")
        (place / "made").touch()
    return result
