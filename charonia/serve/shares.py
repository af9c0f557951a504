"""Divides the memory for keys and values among several models.

Each engine alone would take most of the free memory, and the engines load at the same time. So the size of each cache
is computed before, from the plans of the models (charonia plan), and passed to the engine.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from charonia import _engine
from charonia.errors import InvalidRequestError, ServeError
from charonia.serve.checks import option_of
from charonia.serve.models import Served
from charonia.settings import env_name
from charonia.units import spell_bytes
from charonia.weights.draft_model import METHOD, MODEL, draft_of
from charonia.weights.workspace import WEIGHTS

if TYPE_CHECKING:
    from charonia.weights.plan import Plan

# Each engine has its own values of these settings, so they are not in the environment, which all engines share.
KEYS = (
    "cache_max_entry_count",
    "cache_size",
    "cache_users",
    "cache_user_tokens",
    "max_batch_size",
    "token_budget",
    "session_dir",
    "lora_adapters",
    "kv_offload_path",
    METHOD,
    MODEL,
)
OF_FIRST = {"lora_adapters", MODEL}  # the first model's; other models have none
FOLDERS = {"session_dir", "kv_offload_path"}


_DEFAULT_RATIO = 0.8  # as in engine/src/runtime/memory_plan.cpp
_MOST_SHARE = 1_000_000  # its inverse is the smallest share, so that sums and ratios are finite


def parse_shares(text: str, count: int) -> list[float]:
    """The numbers of CHARONIA_MODEL_SHARES, one for each of `count` models; equal numbers if it is empty."""
    if not text.strip():
        return [1.0] * count
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(1 / _MOST_SHARE <= share <= _MOST_SHARE for share in shares):  # nor is any of them NaN
        raise InvalidRequestError(
            f"{env_name('model_shares')}={text!r}: expected numbers from {1 / _MOST_SHARE:f} to {_MOST_SHARE}, "
            "separated by commas, such as 3,1"
        )
    if len(shares) != count:
        raise InvalidRequestError(
            f"{env_name('model_shares')}={text!r} has {len(shares)} shares, and there are {count} models: give each one"
        )
    return shares


def divide(
    served: Sequence[Served],
    inference: Mapping[str, str],
    shares: Sequence[float],
    plan: Callable[..., Plan] | None = None,
) -> list[Served]:
    """Adds the settings that divide the memory. Raises ServeError with the numbers if the models do not fit."""
    plans = _plans(served, inference, plan)
    for one, made in zip(served, plans, strict=True):
        if made.num_blocks == 0:
            raise ServeError(f"{one.name} does not fit: {made.warnings[-1]}")
    _check_host_memory(served, plans)
    # On GPUs: the memory of one rank, and the free memory of the GPU that has least.
    divisors = [made.ranks if made.device == "cuda" else 1 for made in plans]
    free = min(made.free_bytes // divisor for made, divisor in zip(plans, divisors, strict=True))
    fixed = [made.fixed_bytes // divisor for made, divisor in zip(plans, divisors, strict=True)]
    block = [_block_bytes(made) // divisor for made, divisor in zip(plans, divisors, strict=True)]
    ratios = [_ratio(one, inference) for one in served]
    most = [made.num_blocks for made in plans]  # what the model would take alone
    blocks = [most[at] if ratio is None else 0 for at, ratio in enumerate(ratios)]
    left = free - sum(fixed) - sum(blocks[at] * block[at] for at in range(len(served)))
    sharing = [at for at, ratio in enumerate(ratios) if ratio is not None]
    if left < sum(block[at] for at in sharing):
        raise ServeError(_refusal(served, plans, divisors, blocks, free))
    # A model that needs less than its share leaves the rest to the others.
    total = sum(shares[at] for at in sharing)
    rest = float(left)
    for at in sorted(sharing, key=lambda at: most[at] * block[at] / ((ratios[at] or 1) * shares[at])):
        portion = rest * shares[at] / total
        blocks[at] = min(most[at], int(portion * (ratios[at] or 1) // block[at]))
        rest -= min(portion, blocks[at] * block[at] / (ratios[at] or 1)) if blocks[at] == most[at] else portion
        total -= shares[at]
        if blocks[at] < 1:
            raise ServeError(
                f"the share of {served[at].name} in the memory for keys and values is {spell_bytes(int(portion))} of "
                f"{spell_bytes(left)}, less than one block of {spell_bytes(block[at])}: raise it with "
                f"{env_name('model_shares')}, lower cache_block_seq_len or free memory"
            )
    return [
        _with_blocks(one, made, count, inference, free) for one, made, count in zip(served, plans, blocks, strict=True)
    ]


def rotate(
    served: Sequence[Served],
    inference: Mapping[str, str],
    shares: Sequence[float],
    plan: Callable[..., Plan] | None = None,
) -> list[Served]:
    """Like divide(), for models that need not be loaded at the same time: each alone must fit. The cache of a model has
    its share of the memory that is free if the model is loaded alone."""
    try:
        return divide(served, inference, shares, plan)
    except ServeError:
        plans = _plans(served, inference, plan)
    divisors = [made.ranks if made.device == "cuda" else 1 for made in plans]
    free = min(made.free_bytes // divisor for made, divisor in zip(plans, divisors, strict=True))
    found = []
    for one, made, share, divisor in zip(served, plans, shares, divisors, strict=True):
        if made.num_blocks == 0:
            raise ServeError(f"{one.name} does not fit: {made.warnings[-1]}")
        _check_host_memory([one], [made])
        block, ratio = _block_bytes(made) // divisor, _ratio(one, inference)
        left = (free - made.fixed_bytes // divisor) * share / sum(shares)
        blocks = made.num_blocks if ratio is None else min(made.num_blocks, int(left * ratio // block))
        if (made.fixed_bytes + max(blocks, 1) * _block_bytes(made)) // divisor > free:
            raise ServeError(_refusal([one], [made], [divisor], [blocks], free))
        if blocks < 1:
            raise ServeError(
                f"the share of {one.name} in the memory for keys and values is {spell_bytes(int(left))}, less than one "
                f"block of {spell_bytes(block)}: raise it with {env_name('model_shares')}, or free memory"
            )
        found.append(_with_blocks(one, made, blocks, inference, free))
    return found


def _plans(served: Sequence[Served], inference: Mapping[str, str], plan: Callable[..., Plan] | None) -> list[Plan]:
    """The plans of the models. Their num_blocks leave no room for kv_offload_memory and, on CPUs, for adapters: callers
    reduce the cache."""
    from charonia.weights.plan import make_plan

    return [_planned(one, {**inference, **_of_first(one, inference)}, plan or make_plan) for one in served]


def _planned(one: Served, settings: dict[str, str], plan: Callable[..., Plan]) -> Plan:
    made = plan(one.workspace, settings)
    if not made.adapter_bytes + made.offload_bytes:
        return made
    left_out = {"kv_offload_memory": ""}
    if made.device == "cpu":  # on GPUs the slots for adapters are beside the cache
        left_out["lora_adapters"] = ""
    alone = plan(one.workspace, {**settings, **left_out})
    return replace(alone, adapter_bytes=made.adapter_bytes, offload_bytes=made.offload_bytes)


def _with_blocks(one: Served, made: Plan, blocks: int, inference: Mapping[str, str], free: int) -> Served:
    """Adds the settings of a cache with this number of blocks."""
    divisor = made.ranks if made.device == "cuda" else 1
    cache = blocks * _block_bytes(made)
    return replace(
        one,
        settings={
            "cache_size": str(cache),
            "cache_users": "0",
            "max_batch_size": str(made.max_batch_size),
            "token_budget": str(made.token_budget),
            **_folders(one, inference),
            **_of_first(one, inference),
        },
        need_bytes=(made.fixed_bytes + cache) // divisor,
        room_bytes=free,
    )


def _check_host_memory(served: Sequence[Served], plans: Sequence[Plan]) -> None:
    """Raises ServeError if the weights that GPUs read from host memory, and the KV that engines keep there, do not fit
    there together."""
    sizes = [made.host_bytes + made.offload_bytes for made in plans]
    if sum(sizes) > (free := _engine.free_host_memory()):
        parts = ", ".join(
            f"{one.name} takes {spell_bytes(size)}" for one, size in zip(served, sizes, strict=True) if size
        )
        raise ServeError(
            "the models do not fit together: per-layer embeddings and adapters of GPUs, and kv_offload_memory, take "
            f"host memory, of which {parts}, and {spell_bytes(free)} are free. Serve fewer or smaller models, leave "
            "out LoRA adapters, lower kv_offload_memory, or free memory"
        )


def _block_bytes(made: Plan) -> int:
    """Bytes of a block of all ranks. With windows the ratio of both kinds of blocks depends on the size of the cache.
    The engine keeps within the size."""
    return made.kv_cache_bytes // made.num_blocks


def as_given(one: Served, inference: Mapping[str, str]) -> Served:
    """Adds the given settings, for a model that is added later: it takes of the memory that is free then."""
    given = {key: inference[key] for key in KEYS if key in inference}
    return replace(one, settings={**given, **_folders(one, inference), **_of_first(one, inference)})


def of_first_only(inference: Mapping[str, str]) -> set[str]:
    """The settings that only the first model can have, except a draft model that its method does not use."""
    return {key for key in OF_FIRST & inference.keys() if key != MODEL or draft_of(inference)}


def setting_of(one: Served, inference: Mapping[str, str], key: str) -> str:
    """The value of a setting: of the command, else of the workspace, else the default."""
    written = _engine.read_config_ini(one.workspace / WEIGHTS / "config.ini")
    default = next(entry.default_value for entry in _engine.config_fields() if entry.key == key)
    return inference.get(key) or written.get(key) or default


def _ratio(one: Served, inference: Mapping[str, str]) -> float | None:
    """The share of the free memory for the cache; None if the settings give its size."""
    if int(setting_of(one, inference, "cache_users")) > 0 or setting_of(one, inference, "cache_size"):
        return None
    ratio = float(setting_of(one, inference, "cache_max_entry_count"))
    return (ratio or _DEFAULT_RATIO) if ratio < 1 else None


def _of_first(one: Served, inference: Mapping[str, str]) -> dict[str, str]:
    """Settings that only the first model has. Without its draft model, the method of another model is ngram."""
    given = {key: value for key, value in inference.items() if key in {*OF_FIRST, METHOD}}
    if one.label:
        given |= dict.fromkeys(OF_FIRST & given.keys(), "")
        if draft_of(inference):
            given[METHOD] = "ngram"
    return given


def _folders(one: Served, inference: Mapping[str, str]) -> dict[str, str]:
    """Further models have their own folders inside the given folders. Otherwise two models with the same folder name
    would read each other's sessions, and only one engine would store KV."""
    folders = {key: setting_of(one, inference, key) for key in sorted(FOLDERS)}
    return {key: str(Path(folder, one.label)) for key, folder in folders.items() if folder}


def check_folders(served: Sequence[Served], inference: Mapping[str, str]) -> None:
    """Creates the folders in which the engines keep files. Raises ServeError if one cannot be written."""
    for one in served:
        for key, folder in _folders(one, inference).items():
            if key == "session_dir" and float(setting_of(one, inference, "session_ttl_s")) == 0:
                continue  # there are no sessions
            variable = f"CHARONIA_{key.upper()}"
            try:
                Path(folder).mkdir(0o700, parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    continue  # a full disk: the engine replaces old files
                raise ServeError(
                    f"{key} = {folder} is not a folder that this user can create and write ({error.strerror}): name "
                    f"another one with {variable} ({option_of(variable)}), or leave it empty"
                ) from None


def _refusal(
    served: Sequence[Served],
    plans: Sequence[Plan],
    divisors: Sequence[int],
    blocks: Sequence[int],
    free: int,
) -> str:
    parts = [
        f"{one.name} takes {spell_bytes((made.weight_bytes + made.adapter_bytes) // divisor)} of weights"
        f"{' and LoRA adapters' if made.adapter_bytes else ''}, "
        f"{spell_bytes((made.fixed_bytes - made.weight_bytes - made.adapter_bytes) // divisor)} for steps"
        f"{', its draft model' if made.speculative_bytes else ''}"
        f"{', kv_offload_memory' if made.offload_bytes and made.device == 'cpu' else ''} and "
        f"{spell_bytes(max(count, 1) * _block_bytes(made) // divisor)} of keys and values at least"
        for one, made, divisor, count in zip(served, plans, divisors, blocks, strict=True)
    ]
    adapters = "leave out LoRA adapters, " if any(made.adapter_bytes for made in plans) else ""
    return (
        f"the models do not fit together: {'; '.join(parts)}. {spell_bytes(free)} are free. Serve fewer, smaller or "
        f"quantised models, {adapters}lower max_batch_size, token_budget or the size of the cache, or free memory"
    )
