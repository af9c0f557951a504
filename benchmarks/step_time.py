"""How much later tokens of running requests come while long prompts are computed, with step_time_ms and without.

    python benchmarks/step_time.py MODEL [--rounds N]

benchmarks/results/step_time.md has figures. Each row is a fresh engine in this process: four requests decode, alone for
some seconds and then beside prompts that come one after the other. Every other round is in the other order.
"""

from __future__ import annotations

import argparse
import threading
import time
from itertools import pairwise

import numpy as np

from charonia.api.engine import Engine
from charonia.api.results import SamplingParams

_STREAMS = 4
_QUIET_S = 4.0
_PROMPTS = 2


def measure(engine: Engine, prompt_tokens: int, seed: int) -> tuple[list[float], list[float], float]:
    """Milliseconds between tokens alone and beside prompts, and the mean seconds of a prompt."""
    generator = np.random.default_rng(seed)

    def prompt(tokens: int) -> list[int]:
        ids: list[int] = generator.integers(3, engine.info.vocab_size, tokens).tolist()
        return ids

    stop = threading.Event()
    arrivals: list[list[float]] = [[] for _ in range(_STREAMS)]

    def read(times: list[float], ids: list[int]) -> None:
        endless = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
        with engine.stream(ids, endless) as stream:
            for _ in stream:
                times.append(time.perf_counter())
                if stop.is_set():
                    break

    readers = [threading.Thread(target=read, args=(times, prompt(64))) for times in arrivals]
    for reader in readers:
        reader.start()
    while min(map(len, arrivals)) < 5:
        time.sleep(0.02)
    begun = time.perf_counter()
    time.sleep(_QUIET_S)
    prompts_begun = time.perf_counter()
    for _ in range(_PROMPTS):
        engine.generate([prompt(prompt_tokens)], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    ended = time.perf_counter()
    stop.set()
    for reader in readers:
        reader.join()

    def between(first: float, last: float) -> list[float]:
        return [1e3 * (b - a) for times in arrivals for a, b in pairwise(times) if first <= a and b <= last]

    return between(begun, prompts_begun), between(prompts_begun, ended), (ended - prompts_begun) / _PROMPTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=3900)
    options = parser.parse_args()
    for number in range(options.rounds):
        for step_time_ms in (0, -1)[:: 1 - 2 * (number % 2)]:
            with Engine.from_pretrained(
                options.model,
                step_time_ms=step_time_ms,
                token_budget=512,
                session_len=4096,
                enable_prefix_caching=False,
                stream_interval_ms=0,
                threads=2,
            ) as engine:
                alone, beside, prompt_s = measure(engine, options.prompt_tokens, number)
            figures = [np.percentile(times, share) for times in (alone, beside) for share in (50, 99)]
            print(
                f"step_time_ms {step_time_ms:2}: alone {figures[0]:.1f}, p99 {figures[1]:.1f} ms;"
                f" beside prompts {figures[2]:.1f}, p99 {figures[3]:.1f} ms"
                f" ({figures[2] / figures[0]:.1f}, {figures[3] / figures[1]:.1f} times); a prompt {prompt_s:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
