from __future__ import annotations

from pathlib import Path

from common import arguments, say, say_imports, serve

from charonia import SamplingParams
from charonia.api.engine import Engine
from charonia.text.tokenizer import load_tokenizer

model, threads, longest, batch = arguments()
# The tokenizer brings transformers along, and that PyTorch where it is installed: 300 MB that are not the engine's.
load_tokenizer(Path(model))
say_imports()
_BLOCK = 64  # tokens of a KV block
# Room for the longest sequence alone, and for all sequences of the decode benchmark.
blocks = max(-(-longest // _BLOCK), batch * -(-160 // _BLOCK)) + batch
engine = Engine.from_pretrained(
    str(model),
    threads=threads,
    session_len=longest,
    max_batch_size=batch,
    token_budget=512,
    cache_block_seq_len=_BLOCK,
    cache_max_entry_count=blocks,
    enable_prefix_caching=False,
)
info = engine.info
say(
    instruction_set=info.instruction_set,
    weight_mb=info.weight_bytes / 1e6,
    weight_mb_per_step=info.weight_bytes_per_step / 1e6,
    kv_mb=info.kv_cache_bytes / 1e6,
)


def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
    sampling = SamplingParams(max_tokens=new, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    outputs = engine.generate(prompts, sampling)
    first = max(output.timings.first_token_ms for output in outputs) / 1e3
    return first, max(output.timings.total_ms for output in outputs) / 1e3 - first


with engine:
    serve(info.vocab_size, run)
