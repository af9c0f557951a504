from __future__ import annotations

import time

import llama_cpp
import numpy as np
from common import arguments, say, say_imports, serve

path, threads, longest, batch_size = arguments()
say_imports()
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
if not model:
    raise SystemExit(f"llama.cpp cannot load {path}")
vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
params = llama_cpp.llama_context_default_params()
params.n_ctx = max(longest, batch_size * 192)
params.n_batch = params.n_ubatch = 512
params.n_seq_max = batch_size
params.n_threads = params.n_threads_batch = threads
if hasattr(params, "kv_unified"):
    params.kv_unified = True  # one cache that all sequences share, so that one sequence may take all of it
context = llama_cpp.llama_init_from_model(model, params)
if not context:
    raise SystemExit(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
say()
batch = llama_cpp.llama_batch_init(max(512, batch_size), 0, 1)


def step(rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
    """Rows of (token, position, sequence, wanted): the most likely next token of every sequence whose row is wanted."""
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = sequence
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise SystemExit(f"llama_decode: {status}")
    return {
        sequence: int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=(vocab,)).argmax())
        for i, (_, _, sequence, wanted) in enumerate(rows)
        if wanted
    }


def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    began = time.perf_counter()
    rows = [
        (token, position, sequence, position == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for position, token in enumerate(prompt)
    ]
    tokens: dict[int, int] = {}
    for i in range(0, len(rows), 512):
        tokens |= step(rows[i : i + 512])
    first = time.perf_counter()
    for i in range(new - 1):
        tokens = step([(token, len(prompts[0]) + i, sequence, True) for sequence, token in tokens.items()])
    return first - began, time.perf_counter() - first


serve(vocab, run)
