"""What the workers share: process.py says how they are spoken to. No package but numpy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Of every random vocabulary the first 259 tokens are special ones and bytes.
FIRST_TOKEN = 259


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def say_imports() -> None:
    """Tells how much memory the libraries take before a model is loaded."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    say(imports_mb=pages * 4096 / 1e6)


def arguments() -> tuple[Path, int, int, int]:
    """Model, threads, longest sequence, most sequences at once."""
    model, threads, longest, batch, _ = sys.argv[1:]
    return Path(model), int(threads), int(longest), int(batch)


def option() -> str:
    """What the engine is told beside the model; empty: nothing."""
    return sys.argv[-1]


def serve(vocab: int, run: Callable[[list[list[int]], int], tuple[float, float]]) -> None:
    """Answers until the input ends. Prompts are random and never the same, so that none is found in a cache."""
    generator = np.random.default_rng(0)
    for line in sys.stdin:
        asked = json.loads(line)
        shape = (asked["batch"], asked["prompt"])
        prompts: list[list[int]] = generator.integers(FIRST_TOKEN, vocab, shape).tolist()
        first, rest = run(prompts, asked["new"])
        say(first_s=first, rest_s=rest)


def config_of(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return config
