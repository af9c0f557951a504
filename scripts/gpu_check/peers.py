"""Peers of the static table on the same weights: Hugging Face transformers with its static cache, and llama.cpp."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check import packages
from gpu_check.commands import run
from gpu_check.context import ROOT, Context
from gpu_check.records import Failure, Outcome, skipped
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


def llama_cpp(context: Context, session: Session, size: str) -> Outcome:
    """The build of llama.cpp that was brought along, by its own program for batches of equal length."""
    folder = packages.unpacked(context.carried, packages.LLAMA_CPP)
    program = folder / "bin" / "llama-batched-bench" if folder else Path()
    if not program.is_file():
        return skipped("no build of llama.cpp was brought along: scripts/gpu_check.sh --pack .whl --along llama_cpp")
    env = context.environment()
    env["LD_LIBRARY_PATH"] = os.pathsep.join([str(program.parents[1] / "lib"), env["LD_LIBRARY_PATH"]])
    source = Path(model_of(context, size))
    model = source.with_name(f"{source.name}.gguf")
    env["PYTHONSAFEPATH"] = ""  # the script imports what is beside it
    make: list[str | Path] = [
        sys.executable,
        ROOT / "benchmarks" / "cpu_peers" / "workers" / "make_gguf.py",
        source,
        model,
    ]
    if not model.is_file() and (done := run(make, context.logs / "gguf.log", limit_s=90, env=env)).code != 0:
        return Outcome("failed", f"making the GGUF file {done.how}", failures=[Failure("gguf", done.text[-1500:])])
    new = 8 if context.rehearse else _NEW
    command: list[str | Path] = [
        program, "-m", model, "-c", str((new + 1) * _BATCH), "-npp", "1", "-ntg", str(new), "-npl", f"1,{_BATCH}",
        "-ngl", "99", "--output-format", "jsonl",
    ]  # fmt: skip
    done = run(command, context.logs / "llama_cpp.log", limit_s=80, env=env)
    rows = [json.loads(line) for line in done.text.splitlines() if line.startswith("{")]
    if done.code != 0 or not rows:
        failure = Failure("llama.cpp", done.text[-1500:])
        return Outcome("failed", f"llama-batched-bench {done.how}", {"runs": rows}, failures=[failure])
    rates = {row["pl"]: row["speed_tg"] for row in rows}
    told = ", ".join(f"{rate:.0f} tokens/s at batch {batch}" for batch, rate in rates.items())
    figures = {"what": "llama.cpp", "runs": rows, "batch": _BATCH, "output_tokens_per_s": rates[_BATCH]}
    return Outcome("passed", told, figures)
