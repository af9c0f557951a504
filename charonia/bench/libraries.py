"""Measures kernels of other libraries with the operations of `charonia benchmark kernels`, for a comparison.

Only PyTorch is needed. The others are used if they are installed: FlashInfer and its XQA kernels, FlashAttention 3 and
Humming. Each compiles its kernels on first use, or has them compiled.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from charonia.bench.limits import seconds_of
from charonia.bench.random_model import Shape
from charonia.bench.records import Record
from charonia.errors import UnsupportedError

log = logging.getLogger("charonia")

# The modules to import, by the name of the library.
LIBRARIES = {
    "torch": "torch",
    "flashinfer": "flashinfer",
    "xqa": "flashinfer.decode",
    "flash_attn_3": "flash_attn_interface",
    "humming": "humming.layer",
}
_COPIES = 16  # of weights and of caches, so that the L2 cache does not hold them
_PAGE = 64  # positions of a page of a KV cache
Call = Callable[[], object]


def measure_library(
    library: str,
    shape: Shape,
    weights: Mapping[str, tuple[int, int]],
    *,
    device: str,
    formats: Sequence[str],
    rows: Sequence[int],
    contexts: Sequence[int],
    batch: int,
    rounds: int,
) -> Iterator[Record]:
    """Yield the times of the operations that the library has. An operation that fails is left out, with a warning:
    these interfaces change. Raises UnsupportedError if none could be measured."""
    try:
        import torch

        module = importlib.import_module(LIBRARIES[library])
    except ImportError as error:
        raise UnsupportedError(f"{library} cannot be imported: {error}") from error
    random = partial(torch.randn, dtype=torch.bfloat16, device=device)
    operations: list[tuple[str, dict[str, object], int, Callable[[], Call | None]]] = []
    for name, (n, k) in weights.items():
        for code in formats:
            for count in rows:
                case: dict[str, object] = {"weight": f"{name} {n} x {k}", "format": code, "rows": count}
                operations.append(("gemm", case, _COPIES, partial(_gemm, library, module, random, code, n, k, count)))
    for context in contexts:
        for sequences in dict.fromkeys((1, batch)):
            case = {"KV cache": "16 bits", "context": context, "sequences": sequences, "rows": 1}
            decode = partial(_decode, library, module, torch, random, shape, sequences, context)
            operations.append(("attention", case, _COPIES, decode))
        case = {"KV cache": "16 bits", "context": context, "sequences": 1, "rows": context}
        operations.append(("attention", case, 1, partial(_prompt, library, module, random, shape, context)))
    measured = False
    for benchmark, case, copies, prepare in operations:
        try:
            call = prepare()
            if call is not None:
                times = [1e6 * one / copies for one in _seconds(torch, device, call, rounds)]
                yield Record.of(benchmark, "time", "us", times, case={**case, "library": library})
                measured = True
        except Exception as error:  # of a library whose version we do not know
            text = " ".join(f"{type(error).__name__}: {error}".split())
            log.warning("%s, %s: ERROR %s", library, ", ".join(f"{key} {value}" for key, value in case.items()), text)
    if not measured:
        raise UnsupportedError(f"{library} could not measure any operation")


def _seconds(torch: Any, device: str, call: Call, rounds: int) -> list[float]:
    """On a GPU the call is captured in a CUDA graph, so launches do not count."""
    call()
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(rounds):
            call()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds_of(torch, rounds, graph.replay)


def _gemm(library: str, module: Any, random: Any, code: str, n: int, k: int, rows: int) -> Call | None:
    """in [rows, k] times the transpose of each of _COPIES weights [n, k]; int4 in groups of 128."""
    inputs = random(rows, k)
    if library == "torch" and code == "bf16":
        weights = random(_COPIES, n, k)
        return lambda: [inputs @ weight.t() for weight in weights]
    if library != "humming" or code != "w4a16":
        return None
    layers = []
    for _ in range(_COPIES):
        config = {"dtype": "uint4", "group_size": 128}
        layer = module.HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=inputs.dtype).cuda()
        layer.load_from_unquantized(random(n, k))
        layer.transform()
        layers.append(layer)
    return lambda: [layer(inputs) for layer in layers]


def _prompt(library: str, module: Any, random: Any, shape: Shape, rows: int) -> Call | None:
    dim = shape.hidden // shape.heads
    q, k, v = (random(rows, heads, dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    if library == "torch":
        of_sequence = [x[None].transpose(1, 2) for x in (q, k, v)]
        attend = module.nn.functional.scaled_dot_product_attention
        return partial(attend, *of_sequence, is_causal=True, enable_gqa=True)
    if library == "flashinfer":
        return partial(module.single_prefill_with_kv_cache, q, k, v, causal=True)
    if library == "flash_attn_3":
        return partial(module.flash_attn_func, q[None], k[None], v[None], causal=True)
    return None


def _decode(library: str, module: Any, torch: Any, random: Any, shape: Shape, batch: int, context: int) -> Call | None:
    """One query for each sequence over each of _COPIES caches."""
    dim, pages = shape.hidden // shape.heads, -(-context // _PAGE)
    q = random(batch, shape.heads, dim)
    caches = [tuple(random(2, batch * pages, _PAGE, shape.kv_heads, dim)) for _ in range(_COPIES)]
    integers = partial(torch.full, (batch,), dtype=torch.int32, device=q.device)
    table = torch.arange(batch * pages, dtype=torch.int32, device=q.device)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)
    if library == "torch":
        attend = partial(module.nn.functional.scaled_dot_product_attention, q[:, :, None], enable_gqa=True)
        rows = [[x.view(batch, -1, *x.shape[2:]).transpose(1, 2)[:, :, :context] for x in cache] for cache in caches]
        return lambda: [attend(k, v) for k, v in rows]
    if library == "flashinfer":
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        begins = pages * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        last = integers(context - (pages - 1) * _PAGE)
        types = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        wrapper.plan(begins, table, last, shape.heads, shape.kv_heads, dim, _PAGE, **types)
        return lambda: [wrapper.run(q, cache) for cache in caches]
    if library == "xqa":
        attend = module.xqa_batch_decode_with_kv_cache
        lengths = integers(context).to(torch.uint32)
        tables = table.view(batch, pages)
        return lambda: [attend(q, cache, workspace, tables, lengths, context, dim**-0.5) for cache in caches]
    return None
