"""Divides the memory for keys and values among several models.

Each engine alone would take most of the free memory, and the engines load at the same time. So the size of each cache
is computed before, from the plans of the models (charonia plan), and passed to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from charonia import _engine
from charonia.errors import InvalidRequestError, ServeError
from charonia.serve.models import Served
from charonia.settings import env_name
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
)


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
    from charonia.weights.plan import make_plan, spell_bytes

    plans = [(plan or make_plan)(one.workspace, inference) for one in served]
    for one, made in zip(served, plans, strict=True):
        if made.num_blocks == 0:
            raise ServeError(f"{one.name} does not fit: {made.warnings[-1]}")
    # On GPUs: the memory of one rank, and the free memory of the GPU that has least.
    divisors = [made.ranks if made.device == "cuda" else 1 for made in plans]
    free = min(made.free_bytes // divisor for made, divisor in zip(plans, divisors, strict=True))
    fixed = [
        (made.weight_bytes + made.activation_bytes) // divisor for made, divisor in zip(plans, divisors, strict=True)
    ]
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
        replace(
            one,
            settings={
                "cache_size": str(count * _block_bytes(made)),
                "cache_users": "0",
                "max_batch_size": str(made.max_batch_size),
                "token_budget": str(made.token_budget),
                **_session_dir(one, inference),
            },
        )
        for one, made, count in zip(served, plans, blocks, strict=True)
    ]


def _block_bytes(made: Plan) -> int:
    """Bytes of a block of all ranks. With windows the ratio of both kinds of blocks depends on the size of the cache.
    The engine keeps within the size."""
    return made.kv_cache_bytes // made.num_blocks


def as_given(one: Served, inference: Mapping[str, str]) -> Served:
    """Adds the given settings, for a model that is added later: it takes of the memory that is free then."""
    given = {key: inference[key] for key in KEYS if key in inference}
    return replace(one, settings={**given, **_session_dir(one, inference)})


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


def _session_dir(one: Served, inference: Mapping[str, str]) -> dict[str, str]:
    """Further models have their own folders for sessions, inside the given folder. Otherwise two models with the same
    folder name would read each other's sessions."""
    folder = setting_of(one, inference, "session_dir")
    return {"session_dir": str(Path(folder, one.label))} if folder else {}


def _refusal(
    served: Sequence[Served], plans: Sequence[Plan], divisors: Sequence[int], blocks: Sequence[int], free: int
) -> str:
    from charonia.weights.plan import spell_bytes

    parts = [
        f"{one.name} takes {spell_bytes(made.weight_bytes // divisor)} of weights, "
        f"{spell_bytes(made.activation_bytes // divisor)} for steps and "
        f"{spell_bytes(max(count, 1) * _block_bytes(made) // divisor)} of keys and values at least"
        for one, made, divisor, count in zip(served, plans, divisors, blocks, strict=True)
    ]
    return (
        f"the models do not fit together: {'; '.join(parts)}. {spell_bytes(free)} are free. Serve fewer, smaller or "
        "quantised models, lower max_batch_size, token_budget or the size of the cache, or free memory"
    )
