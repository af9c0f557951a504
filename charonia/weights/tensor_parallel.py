"""Splits a model over tensor-parallel ranks: computes the range of each tensor that each rank holds.

Layers are split by columns, then by rows, so that a layer needs two sums over the ranks (Shoeybi et al., Megatron-LM,
2019): q, k, v, gate and up by output features, o and down by input features; a short convolution by channels. Experts
are split like dense layers: every rank has a share of each expert and of the shared expert. The shares are equal,
unless this would separate columns that are quantised together: then they are whole groups of columns. The output layer
is split by rows. The engine reads the split from the shapes in the manifest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from charonia import _engine
from charonia.errors import UnsupportedError
from charonia.families import ModelConfig, TensorMap, TensorPart
from charonia.families.layer_attributes import LayerAttributes

_LOGITS_ALIGNMENT = 4  # logits in a rank's share are a multiple of this: 16 bytes
_LAYER_TENSOR = re.compile(
    r"(layers\.\d+\.(?:attention|conv|delta|feed_forward(?:\.experts\.\d+|\.shared)?)\.)"
    r"(w_qkv|w_gate|wq|wkv_b|wk_b|wv_b|wo|w_in|w_conv|w_qkvz|w_ba|conv_qkv|w_out|w1|w2|w3)\.0\.(weight|bias)"
)


def ranks_of(settings: Mapping[str, str]) -> int:
    """Return tensor_para_size of these settings, or 1 if they do not contain it. Raises InvalidRequestError for a
    setting that the engine does not allow."""
    _engine.check_settings(dict(settings))
    return int(settings.get("tensor_para_size", 1))


def _check_ranks(tensors: TensorMap, config: ModelConfig, ranks: int) -> None:
    """Raises UnsupportedError, with the possible numbers of ranks, if the model cannot be split over `ranks`."""

    units = units_of(tensors)

    def obstacle_of(count: int) -> str:
        return _obstacle(config, units, count) or _cut_obstacle(units, tensors, config, count)

    obstacle = obstacle_of(ranks)
    if obstacle:
        possible = [str(count) for count in range(1, config.head_num + 1) if not obstacle_of(count)]
        raise UnsupportedError(
            f"{config.model_name} cannot be split over {ranks} tensor-parallel ranks: {obstacle}. "
            f"Use --tp {' or '.join(possible)}"
        )


def _obstacle(config: ModelConfig, units: Mapping[str, int], ranks: int) -> str:
    if config.delta_tiled and ranks > 1:
        return "GGUF files have the v heads of gated delta nets in an order that needs one rank"
    for key in ("head_num", *_widths(config)):
        size, unit = getattr(config, key), units.get(key, 1)
        if size % ranks and (unit == 1 or size <= (ranks - 1) * unit):
            return f"{key} = {size} is not a multiple of {ranks}"
    for heads in sorted({config.kv_heads(layer) for layer in config.layers}):
        if heads % ranks and ranks % heads:
            return f"the number of KV heads, {heads}, is neither a multiple nor a divisor of {ranks}"
    if config.model_task == "generate" and output_rows(config, ranks - 1, ranks)[0] >= config.vocab_size:
        return f"vocab_size = {config.vocab_size} leaves the last rank no rows of the output layer"
    return ""


def _cut_obstacle(units: Mapping[str, int], tensors: TensorMap, config: ModelConfig, ranks: int) -> str:
    """Check that values that are packed together or share a scale stay together."""
    if not _any_quantised(tensors):
        return ""
    from charonia.weights.quantised_tensors import cut_obstacle

    cut = split_by(units, tensors, config, ranks)
    obstacles = (cut_obstacle(part) for parts in cut.values() for part in parts)
    return next(filter(None, obstacles), "")


def _any_quantised(tensors: TensorMap) -> bool:
    return any(part.quantised for parts in tensors.values() for part in parts)


def _widths(config: ModelConfig) -> list[str]:
    """Return the keys of the widths that the ranks share."""
    dense = any(layer.ffn == "dense" for layer in config.layers)
    shared = bool(config.shared_expert_inter_size)
    convolutions = any(layer.mixer == "short_conv" for layer in config.layers)
    return (
        ["hidden_units"] * convolutions
        + ["delta_k_heads"] * bool(config.delta_k_heads)
        + ["inter_size"] * dense
        + ["expert_inter_size"] * bool(config.num_experts)
        + ["shared_expert_inter_size"] * shared
    )


def _width_of(place: str) -> str:
    """Return the key of the width of a feed-forward layer. place: begin of its tensors' names."""
    return {"experts": "expert_inter_size", "shared": "shared_expert_inter_size"}.get(place.split(".")[3], "inter_size")


def units_of(tensors: TensorMap) -> dict[str, int]:
    """Return how many columns of the feed-forward layers cannot be separated, by the key of the layers' width."""
    units: dict[str, int] = {}
    if not _any_quantised(tensors):
        return units
    from charonia.weights.quantised_tensors import cut_units

    for name, parts in tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        if not match or match[2] not in ("w1", "w2", "w3") or match[3] != "weight":
            continue
        key, dimension = _width_of(match[1]), 1 if match[2] == "w2" else 0
        units[key] = math.lcm(units.get(key, 1), *(cut_units(part)[dimension] for part in parts))
    return units


def _bounds(size: int, unit: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the begin and the end of a rank's share of a width. Shares are equal if they can be; otherwise they are
    multiples of `unit`, except for the last one. The first rank has the largest share."""
    units = -(-size // unit)
    if size % ranks == 0 and (size // ranks % unit == 0 or units < ranks):
        return rank * size // ranks, (rank + 1) * size // ranks
    begin, end = (unit * -(-units * one // ranks) for one in (rank, rank + 1))
    return begin, min(end, size)


def output_rows(config: ModelConfig, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's rows [begin, end) of the output layer. Shares are equal, but the last one may be shorter."""
    unit = ranks * _LOGITS_ALIGNMENT if ranks > 1 else 1
    share = -(-config.vocab_size // unit) * unit // ranks
    return rank * share, min(config.vocab_size, (rank + 1) * share)


def split(tensors: TensorMap, config: ModelConfig, ranks: int) -> TensorMap:
    """Return the tensors of all ranks by canonical name. `tensors`: the whole model, with names of rank 0.

    With more ranks than KV heads, several ranks hold the same KV head. Only rank 0 has the biases that are added after
    the sum over the ranks. Tensors without a rank in the name (embedding, norms, router) exist once for all ranks. The
    output layer is `output.<rank>.weight`; if it is tied to the embedding, these are ranges of the embedding. All ranks
    share the rows of a score, and a model of embeddings has no output layer. Raises UnsupportedError, with the possible
    numbers of ranks, if the model cannot be split over `ranks`.
    """
    _check_ranks(tensors, config, ranks)
    return split_by(units_of(tensors), tensors, config, ranks)


def split_by(units: Mapping[str, int], tensors: TensorMap, config: ModelConfig, ranks: int) -> TensorMap:
    """Return the tensors as split() does, without its checks. units: the result of units_of()."""
    split_tensors: TensorMap = {}
    whole_output = tensors.get("output.weight") or tensors["tok_embeddings.weight"]
    if config.model_task == "score":
        split_tensors["output.0.weight"] = whole_output
    for rank in range(ranks if config.model_task == "generate" else 0):
        rows = output_rows(config, rank, ranks)
        split_tensors[f"output.{rank}.weight"] = whole_output if ranks == 1 else _stacked_rows(whole_output, *rows)
    for name, parts in tensors.items():
        if name == "output.weight":
            continue
        match = _LAYER_TENSOR.fullmatch(name)
        if not match:
            split_tensors[name] = parts
            continue
        place, module, kind = match.groups()
        layer = config.layers[int(place.split(".")[1])]
        unit = units.get(_width_of(place), 1) if module in ("w1", "w2", "w3") else 1
        for rank in range(ranks):
            mine = _parts_of(module, kind, parts, config, layer, unit, rank, ranks)
            if mine:
                split_tensors[f"{place}{module}.{rank}.{kind}"] = mine
    return split_tensors


def _parts_of(
    module: str,
    kind: str,
    parts: tuple[TensorPart, ...],
    config: ModelConfig,
    layer: LayerAttributes,
    unit: int,
    rank: int,
    ranks: int,
) -> tuple[TensorPart, ...]:
    """unit: see units_of()."""
    if ranks == 1:
        return parts
    if module in ("wo", "w_out", "w2"):
        if kind == "bias":
            return parts if rank == 0 else ()
        return tuple(part.take(1, *_bounds(part.taken[1], unit, rank, ranks)) for part in parts)
    if module == "w_qkv":
        # With more ranks than KV heads, each rank uses the KV head of its group of q heads.
        head, kv_heads = config.head_size(layer), config.kv_heads(layer)
        groups = min(ranks, kv_heads)
        group = rank * groups // ranks
        q_size, kv_size = config.head_num * head, kv_heads * head
        q, kv = q_size // ranks, kv_size // groups
        k_first = q_size + group * kv
        v_first = k_first + kv_size
        return (
            *_stacked_rows(parts, rank * q, (rank + 1) * q),
            *_stacked_rows(parts, k_first, k_first + kv),
            *_stacked_rows(parts, v_first, v_first + kv),  # none if the values are the keys
        )
    if module in ("w_qkvz", "w_ba", "conv_qkv"):
        k_size, v_size = config.delta_k_heads * config.delta_k_dim, config.delta_v_heads * config.delta_v_dim
        sizes = [config.delta_v_heads] * 2 if module == "w_ba" else [k_size, k_size, v_size]
        return _sections(parts, sizes + [v_size] * (module == "w_qkvz"), rank, ranks)
    rows = sum(part.taken[0] for part in parts)
    if module == "w_in":  # B, C and x, each of all channels
        channels = rows // 3
        share = channels // ranks
        first = [third * channels + rank * share for third in range(3)]
        return tuple(part for begin in first for part in _stacked_rows(parts, begin, begin + share))
    return _stacked_rows(parts, *_bounds(rows, unit, rank, ranks))


def _sections(parts: tuple[TensorPart, ...], sizes: list[int], rank: int, ranks: int) -> tuple[TensorPart, ...]:
    """Return the rank's share of each section of rows. sizes: of the sections."""
    taken: list[TensorPart] = []
    for index, size in enumerate(sizes):
        first, share = sum(sizes[:index]), size // ranks
        taken += _stacked_rows(parts, first + rank * share, first + (rank + 1) * share)
    return tuple(taken)


def _stacked_rows(parts: tuple[TensorPart, ...], begin: int, end: int) -> tuple[TensorPart, ...]:
    """Return rows [begin, end) of the parts stacked along dimension 0."""
    taken: list[TensorPart] = []
    first = 0
    for part in parts:
        last = first + part.taken[0]
        low, high = max(begin, first), min(end, last)
        if low < high:
            taken.append(part.take(0, low - first, high - first))
        first = last
    return tuple(taken)


def rank_of(name: str) -> int | None:
    """Return the rank in a canonical name; None for tensors that exist once for all ranks."""
    match = re.search(r"\.(\d+)\.(?:weight|bias)$", name)
    return int(match.group(1)) if match else None
