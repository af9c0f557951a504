"""Hugging Face transformers with its static cache on the same weights: the peer of the static table at batch 32."""

from __future__ import annotations

import time
from typing import Any

from gpu_check.context import Context
from gpu_check.records import Outcome
from gpu_check.speed import model_of
from gpu_check.worker import Session

_BATCH = 32
_CACHE = 2049  # as long as the table's: every step attends over all of it, whatever the place
_NEW = 160


def eager(context: Context, session: Session, size: str) -> Outcome:
    return _generate(context, size, compiled=False)


def compiled(context: Context, session: Session, size: str) -> Outcome:
    """As generate() does by itself with a static cache on a GPU: the forward pass goes through torch.compile."""
    return _generate(context, size, compiled=True)


def _generate(context: Context, size: str, *, compiled: bool) -> Outcome:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, StaticCache

    device = "cpu" if context.rehearse else "cuda"
    batch, cache_len, new = (2, 65, 8) if context.rehearse else (_BATCH, _CACHE, _NEW)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model_of(context, size), dtype=torch.bfloat16)
    model = loaded.to(device).eval()
    prompt = torch.randint(3, model.config.vocab_size, (batch, 1), device=device)

    def seconds(tokens: int) -> float:
        cache = StaticCache(config=model.config, max_cache_len=cache_len)
        began = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                disable_compile=not compiled,
            )
        if out.shape[1] != tokens + 1:
            raise RuntimeError(f"transformers generated {out.shape[1] - 1} tokens instead of {tokens}")
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    warmup = seconds(min(new, 12))
    took = seconds(new)
    rate = batch * new / took
    figures = {
        "what": f"transformers {transformers.__version__}, torch {torch.__version__}, static cache of {cache_len}, "
        + ("compiled" if compiled else "not compiled"),
        "batch": batch,
        "output_tokens": new,
        "output_tokens_per_s": rate,
        "first_run_s": warmup,
    }
    return Outcome("passed", f"{rate:.0f} tokens/s at batch {batch} ({figures['what']})", figures)
