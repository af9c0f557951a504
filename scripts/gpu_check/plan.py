"""The pieces: what they are, in which order, how long they may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """run: module:function of this package, called with a Context and the worker's Session. group: pieces of one group
    share a worker process. limit_s: killed after that. guess_s: what it takes, until a run has shown it. needs: pieces
    that must have passed. size: of the model, for the function."""

    name: str
    what: str
    run: str
    group: str
    limit_s: float
    guess_s: float
    needs: tuple[str, ...] = ("build",)
    size: str = ""


def _bars(size: str, suffix: str, shape: str) -> list[Piece]:
    def piece(bar: int, what: str, limit_s: float, guess_s: float) -> Piece:
        return Piece(f"bench{bar}{suffix}", f"{shape}: {what}", f"speed:bench{bar}", size, limit_s, guess_s, size=size)

    return [
        piece(1, "decode at batch 1 against the bandwidth", 150, 25),
        piece(3, "prefill of 8 x 2048 tokens against a product", 120, 10),
        piece(2, "static table, batch 1, 16, 32, 64", 240, 65),
        piece(4, "the production trace", 240, 80),
    ]


# In the order of what one wants to know first.
PIECES = [
    Piece("machine", "the machine, its GPU and versions", "machine:run", "machine", 60, 8, ()),
    Piece("build", "engine, Python module and tests for this GPU", "build:run", "build", 1800, 150, ()),
    Piece("ops", "operations on the device against their references", "cpp_tests:ops", "ops", 150, 40),
    Piece("parity", "tokens and log probabilities against transformers", "python_tests:parity", "parity", 180, 60),
    Piece("engine", "engine and Python API on the device", "cpp_tests:engine", "engine", 170, 45),
    *_bars("7b", "", "Llama-2-7B"),
    Piece("peer", "transformers, static cache, batch 32", "peers:eager", "peer", 120, 35, size="7b"),
    Piece("bench5", "Llama-2-7B: Triton's gRPC against in process", "stack:bench5", "stack", 280, 100, size="7b"),
    Piece("bench7", "Llama-2-7B: decode over k/v in 16, 8 and 4 bits", "speed:bench7", "kv", 240, 75, size="7b"),
    *_bars("8b", "-8b", "Llama-3-8B"),
    Piece("memcheck", "compute-sanitizer on one test of every suite", "cpp_tests:memcheck", "memcheck", 150, 60),
    Piece("peer-compiled", "the same peer, compiled", "peers:compiled", "peer-compiled", 240, 120, size="7b"),
]
BY_NAME = {piece.name: piece for piece in PIECES}
ALIASES = {
    "tests": ["build", "ops", "parity", "engine", "memcheck"],
    "7b": [piece.name for piece in PIECES if piece.size == "7b"],
    "8b": [piece.name for piece in PIECES if piece.size == "8b"],
    "bench": [piece.name for piece in PIECES if piece.size],
    # Seconds each on two cores, with the package as it is installed.
    "quick": ["machine", "parity", "bench1", "bench2", "bench3", "bench4", "bench5", "peer"],
}


def select(names: Sequence[str]) -> list[Piece]:
    """The named pieces in the order of PIECES, all without a name. Raises KeyError with the unknown name."""
    wanted: set[str] = set()
    for name in names:
        wanted.update(ALIASES.get(name) or [BY_NAME[name].name])
    return [piece for piece in PIECES if not names or piece.name in wanted]
