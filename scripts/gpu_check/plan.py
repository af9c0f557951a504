"""The stages: what they are, in which order and in which call to a machine that is lent for minutes, how long they may
take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Seconds of a call in all. Where a command may take ten minutes, this leaves time to end and to copy results.
BUDGET_S = 520


@dataclass(frozen=True)
class Stage:
    """run: module:function of this package, called with a Context and the worker's Session. group: stages of one group
    share a worker process. limit_s: killed after that. guess_s: what it takes, until a run has shown it. call: in which
    call it is run; 0: in every one. needs: stages that must have passed. size: of the model, for the function."""

    name: str
    what: str
    run: str
    group: str
    limit_s: float
    guess_s: float
    call: int
    needs: tuple[str, ...] = ("build",)
    size: str = ""


# In the order of what one wants to know first.
STAGES = [
    Stage("machine", "the machine, its GPU and versions", "machine:run", "machine", 60, 8, 0, ()),
    Stage("build", "engine, Python module and tests for this GPU", "build:run", "build", 3600, 60, 0, ()),
    Stage("ops", "operations on the device against their references", "cpp_tests:ops", "ops", 150, 45, 1),
    Stage("kernels", "tables of single kernels", "kernel_tables:kernels", "kernels", 200, 120, 1),
    Stage("parity", "tokens and log probabilities against transformers; guides", "python_tests:parity", "parity",
          180, 80, 1),
    Stage("engine", "engine and Python API on the device", "cpp_tests:engine", "engine", 170, 45, 1),
    Stage("why", "C++ tests that failed, run again in several ways", "cpp_tests:why", "why", 180, 30, 1),
    Stage("memcheck", "compute-sanitizer on one test of every suite", "cpp_tests:memcheck", "memcheck", 150, 60, 1),
    Stage("bench1", "Llama-2-7B: decode at batch 1 against the bandwidth", "speed:bench1", "7b", 150, 40, 2, size="7b"),
    Stage("bench2", "Llama-2-7B: static table, batch 1, 16, 32, 64", "speed:bench2", "7b", 240, 65, 2, size="7b"),
    Stage("bench3", "Llama-2-7B: prefill of 8 x 2048 tokens against a GEMM", "speed:bench3", "7b", 120, 10, 2,
          size="7b"),
    Stage("bench7", "Llama-2-7B: decode over KV in 16, 8 and 4 bits", "speed:bench7", "kv", 240, 75, 2, size="7b"),
    Stage("bench8", "Llama-3-8B: decode and prefill by the scheme of quantised weights", "speed:bench8", "schemes", 280,
          140, 2, size="8b"),
    Stage("bench1-8b", "Llama-3-8B: decode at batch 1 against the bandwidth", "speed:bench1", "8b", 150, 40, 3,
          size="8b"),
    Stage("bench3-8b", "Llama-3-8B: prefill of 8 x 2048 tokens against a GEMM", "speed:bench3", "8b", 120, 10, 3,
          size="8b"),
    Stage("bench2-8b", "Llama-3-8B: static table, batch 1, 16, 32, 64", "speed:bench2", "8b", 240, 65, 3, size="8b"),
    Stage("bench4-8b", "Llama-3-8B: the production trace", "speed:bench4", "8b", 240, 80, 3, size="8b"),
    Stage("bench4", "Llama-2-7B: the production trace", "speed:bench4", "trace", 240, 80, 3, size="7b"),
    Stage("peer-compiled", "transformers, static cache, batch 32, compiled", "peers:compiled", "peer-compiled", 240,
          110, 3, size="7b"),
    Stage("peer", "the same peer, not compiled", "peers:eager", "peer", 120, 35, 3, size="7b"),
    Stage("peer-llama", "llama.cpp, batch 1 and 32", "peers:llama_cpp", "peer-llama", 180, 60, 3, size="7b"),
    Stage("bench5", "Llama-2-7B: Triton's gRPC against in process", "stack:bench5", "stack", 280, 100, 3, size="7b"),
]  # fmt: skip
BY_NAME = {stage.name: stage for stage in STAGES}
CALLS = {f"call{call}": [stage.name for stage in STAGES if stage.call in (0, call)] for call in (1, 2, 3)}
ALIASES = {
    **CALLS,
    "tests": ["build", "ops", "parity", "engine", "why", "memcheck"],
    "7b": [stage.name for stage in STAGES if stage.size == "7b"],
    "8b": [stage.name for stage in STAGES if stage.size == "8b"],
    "bench": [stage.name for stage in STAGES if stage.size],
}


def select(names: Sequence[str]) -> list[Stage]:
    """The named stages in the order of STAGES, all without a name. Raises KeyError with the unknown name."""
    wanted: set[str] = set()
    for name in names:
        wanted.update(ALIASES.get(name) or [BY_NAME[name].name])
    return [stage for stage in STAGES if not names or stage.name in wanted]
