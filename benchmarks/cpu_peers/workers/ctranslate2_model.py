from __future__ import annotations

import json
import time

import ctranslate2
from common import arguments, say, say_imports, serve

path, threads, _, _ = arguments()
say_imports()
generator = ctranslate2.Generator(str(path), device="cpu", intra_threads=threads, inter_threads=1)
words = json.loads((path / "vocabulary.json").read_text(encoding="utf-8"))
say()


def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
    began = time.perf_counter()
    arrived: dict[int, float] = {}  # of the first token, by sequence

    def note(step: ctranslate2.GenerationStepResult) -> bool:
        arrived.setdefault(step.batch_id, time.perf_counter())
        return False

    generator.generate_batch(
        [[words[token] for token in prompt] for prompt in prompts],
        max_batch_size=len(prompts),
        max_length=new,
        min_length=new,
        sampling_topk=1,
        beam_size=1,
        end_token=[],
        include_prompt_in_result=False,
        callback=note,
    )
    first = max(arrived.values())
    return first - began, time.perf_counter() - first


serve(len(words), run)
