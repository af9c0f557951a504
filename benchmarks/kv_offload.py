"""Measures how long a prompt takes to its first token when it is computed, and when a new engine loads it from files.

python benchmarks/kv_offload.py build/m05 --tokens 3000 --rounds 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from charonia import Engine, SamplingParams


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, int, list[int]]:
    """Return the seconds, the cached tokens and the response's tokens."""
    began = time.perf_counter()
    (response,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return time.perf_counter() - began, response.num_cached_tokens, response.token_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    settings = {"threads": arguments.threads, "session_len": arguments.tokens + 64, "max_batch_size": 8}
    ratios = []
    for seed in range(arguments.rounds):
        prompt = random.Random(seed).choices(range(3, 300), k=arguments.tokens)
        with tempfile.TemporaryDirectory() as folder:
            with Engine.from_pretrained(arguments.model, kv_offload_path=folder, **settings) as engine:
                engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # the first step is slower
                computed_s, cached, expected = first_token_s(engine, prompt)
                assert cached == 0
            with Engine.from_pretrained(arguments.model, kv_offload_path=folder, **settings) as engine:
                engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
                loaded_s, cached, tokens = first_token_s(engine, prompt)
            assert tokens == expected
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
        ratios.append(computed_s / loaded_s)
        print(
            f"{arguments.tokens} tokens: computed in {computed_s:.3f} s, loaded in {loaded_s:.3f} s "
            f"({cached} tokens, {size / 1e6:.0f} MB): {ratios[-1]:.1f} times as fast"
        )
    print(f"median of {len(ratios)}: {statistics.median(ratios):.1f} times as fast")


if __name__ == "__main__":
    main()
