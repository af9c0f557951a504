from __future__ import annotations

import time

import torch
from common import arguments, say, say_imports, serve
from transformers import AutoModelForCausalLM

path, threads, _, _ = arguments()
torch.set_num_threads(threads)
torch.set_grad_enabled(False)
say_imports()
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
say()


def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
    """A loop of its own over the model: generate() does the same and more around it."""
    began = time.perf_counter()
    out = model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    tokens = out.logits[:, -1].argmax(-1, keepdim=True)
    first = time.perf_counter()
    for _ in range(new - 1):
        out = model(input_ids=tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1].argmax(-1, keepdim=True)
    return first - began, time.perf_counter() - first


serve(model.config.vocab_size, run)
