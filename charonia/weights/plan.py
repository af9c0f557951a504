"""Computes, before anything is loaded, how much memory a model needs and how many users with how much context fit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from charonia import _engine
from charonia.engine_settings import Setting, spell_settings
from charonia.errors import InvalidRequestError, UnsupportedError, named_as_given
from charonia.families import ModelSpec
from charonia.json_files import read_json
from charonia.units import spell_bytes
from charonia.weights import hub, workspace
from charonia.weights.cache_warnings import cache_warnings
from charonia.weights.checkpoint import WEIGHT_TYPES
from charonia.weights.convert import (
    BIN_REFUSAL,
    check_spec,
    promised_type,
    read_config,
    read_source,
    write_description,
)
from charonia.weights.draft_model import draft_of, draft_settings, reads_head
from charonia.weights.mtp import mtp_of
from charonia.weights.quality_record import parse_records, quality_table, records_of_weights
from charonia.weights.task import setting_of
from charonia.weights.tensor_parallel import ranks_of

LEAST_CONTEXT = 2048  # shortest context in the default list; each next one is four times as long


@dataclass(frozen=True)
class Plan:
    """Sizes are sums over all ranks. num_blocks follows from the cache settings; 0 if the model does not fit."""

    model_name: str
    weight_type: str
    data_type: str  # type of activations and of weights that are not quantised
    group_size: int  # of quantised weights; 0: one scale for each output feature, or not quantised
    ranks: int
    device: str  # cpu | cuda
    device_note: str  # why device = auto chose the CPU
    weight_bytes: int
    activation_bytes: int  # includes other memory that steps need
    kv_token_bytes: int
    kv_block_bytes: int  # of the layers without a window
    free_bytes: int  # measured, or as given by the user
    num_blocks: int
    cache_block_seq_len: int
    session_len: int
    max_batch_size: int  # the value used for the plan; token_budget too
    token_budget: int
    window: int = 0  # tokens that the layers with a window read; 0: there are none, and no window blocks
    kv_window_block_bytes: int = 0
    num_window_blocks: int = 0
    state_bytes: int = 0  # of one state of the recurrent layers; 0: there are none, and no states
    num_states: int = 0  # of running sequences and of snapshots
    adapter_bytes: int = 0  # of the LoRA adapters in the settings; on a GPU of the slots for them
    host_bytes: int = 0  # of weights that GPUs read from host memory, and of LoRA adapters on a GPU
    quantization: str = "none"  # the setting: how weights are rounded while they are loaded
    speculative_bytes: int = 0  # of the draft model, MTP layer or head: weights, steps and KV cache; 0: none
    offload_bytes: int = 0  # kv_offload_memory: KV that was evicted, in host memory
    warnings: list[str] = field(default_factory=list)
    quality: list[dict[str, Any]] = field(default_factory=list)  # measured records, see quality_record.py

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks of a sequence with `tokens` tokens."""
        return -(-tokens // self.cache_block_seq_len)

    def window_blocks(self, tokens: int) -> int:
        """Return how many window blocks a sequence with `tokens` tokens needs while it generates; 0 without windows."""
        return min(self.blocks(tokens), self.blocks(self.window - 1) + 1) if self.window else 0

    def spell_blocks(self, full: int, window: int) -> str:
        """Format numbers of blocks with their size."""
        size = spell_bytes(full * self.kv_block_bytes + window * self.kv_window_block_bytes)
        return f"{full} KV blocks and {window} window blocks ({size})" if self.window else f"{full} KV blocks ({size})"

    @property
    def model_fits(self) -> bool:
        """Whether the model fits. If not, the last warning says why."""
        return self.num_blocks > 0

    @property
    def kv_cache_bytes(self) -> int:
        """Return the size of all blocks and states."""
        blocks = self.num_blocks * self.kv_block_bytes + self.num_window_blocks * self.kv_window_block_bytes
        return blocks + self.num_states * self.state_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the size of everything in the same memory as the KV cache."""
        offload = self.offload_bytes if self.device == "cpu" else 0
        return self.weight_bytes + self.adapter_bytes + self.activation_bytes + self.speculative_bytes + offload

    def most_users(self, context: int) -> int:
        """Return how many sequences of `context` tokens fit together; 0 for a context beyond session_len."""
        if context > self.session_len:
            return 0
        users = self.num_blocks // self.blocks(context)
        return min(users, self.num_window_blocks // self.window_blocks(context)) if self.window else users

    def longest_context(self, users: int) -> int:
        """Return how many tokens each of `users` sequences may have if all run together."""
        blocks = self.num_blocks // users
        windows = self.num_window_blocks // users
        if self.window and windows < self.window_blocks(self.session_len):
            blocks = min(blocks, windows)
        return min(self.session_len, blocks * self.cache_block_seq_len)

    def contexts(self) -> list[int]:
        """Return 2k, 8k, 32k ... up to session_len."""
        return _fourfold(LEAST_CONTEXT, self.session_len)

    def user_counts(self) -> list[int]:
        """Return 1, 4, 16 ... up to max_batch_size."""
        return _fourfold(1, self.max_batch_size)

    def refusal(self, users: int | None, context: int | None) -> str | None:
        """Return why this many users with this much context do not fit, with numbers and advice; None if they fit.

        A missing argument counts as 1.
        """
        if not self.model_fits:
            return self.warnings[-1]
        users, context = users or 1, context or 1
        if context > self.session_len:
            return (
                f"a context of {context} tokens is more than session_len = {self.session_len}: raise it with "
                f"--session-len {context} if the model supports it"
            )
        if users > self.max_batch_size:
            return (
                f"{users} users are more than max_batch_size = {self.max_batch_size} sequences at once: raise it with "
                f"--max-batch-size {users}"
            )
        if users <= self.most_users(context):
            return None
        needed = self.spell_blocks(users * self.blocks(context), users * self.window_blocks(context))
        return (
            f"{users} users with {context} tokens each need {needed}, but there are "
            f"{self.spell_blocks(self.num_blocks, self.num_window_blocks)}: {self.most_users(context)} users with "
            f"{context} tokens fit, or {users} with {self.longest_context(users)}"
        )

    def answers(self, users: int | None, context: int | None) -> dict[str, Any]:
        """Return the JSON object that `--json` prints."""
        contexts = [context] if context else self.contexts()
        counts = [users] if users else self.user_counts()
        refusal = self.refusal(users, context)
        return {
            **asdict(self),
            "kv_cache_bytes": self.kv_cache_bytes,
            "most_users": [{"context": length, "users": self.most_users(length)} for length in contexts],
            "longest_context": [{"users": count, "context": self.longest_context(count)} for count in counts],
            "fits": refusal is None,
            "refusal": refusal,
        }


def _fourfold(first: int, last: int) -> list[int]:
    """Return first, 4 * first, 16 * first ... below `last`, and `last`."""
    return [*(value for power in range(32) if (value := first * 4**power) < last), last]


def make_plan(
    model: str | os.PathLike[str],
    settings: Mapping[str, Setting] | None = None,
    *,
    dtype: str = "auto",
    memory: str = "",
) -> Plan:
    """Return the plan of a workspace, a Hugging Face folder, a GGUF file or a hub id. Downloads no
    weights except a GGUF file.

    settings: keys of config.ini; they override CHARONIA_<KEY> of the environment. memory: memory of each GPU, or of the
    machine for the CPU ("80GiB"), instead of the free memory of this machine; device = cuda then needs no GPU. Raises
    InvalidRequestError, ModelError or UnsupportedError with advice for the user.
    """
    overrides = {**_engine.settings_from_environment(), **spell_settings(settings or {})}
    notes: list[str] = []
    with ExitStack() as described:
        if draft := draft_of(overrides):
            weights = described.enter_context(_weights(draft, "auto", {}, notes, head=reads_head(overrides)))
            described.enter_context(named_as_given(weights, draft))
            overrides |= draft_settings(overrides, weights)
        folder = described.enter_context(_weights(model, dtype, overrides, notes))
        notes.extend(cache_warnings(folder, overrides))
        if draft and not reads_head(overrides):
            sizes = [_engine.read_config_ini(one / "config.ini")["vocab_size"] for one in (weights, folder)]
            if sizes[0] != sizes[1]:
                notes.append(
                    f"{draft} has vocab_size = {sizes[0]}, and the model has {sizes[1]}: the engine uses it only "
                    "if the other tokens are padding. Otherwise choose a draft model of the same family"
                )
        made = Plan(**_engine.plan_memory(folder, overrides, memory))
        records = [one for one in records_of_weights(folder) if one.rounding == made.quantization]
        quality = [record.content() for record in records]
    return replace(made, warnings=[*notes, *made.warnings], quality=quality)


@contextmanager
def _weights(
    model: str | os.PathLike[str], dtype: str, settings: Mapping[str, str], notes: list[str], *, head: bool = False
) -> Iterator[Path]:
    """Yield a weights folder with config.ini and a manifest. For a Hugging Face model it has no other files, and its
    tensors are split for the number of ranks in the settings.

    notes: receives the assumptions of the plan. head: `model` must be an EAGLE-3 head.
    """
    if workspace.existing(model) is not None or hub.is_gguf_id(str(model)):
        with workspace.located(model) as location:
            if location.weights is not None:
                if dtype != "auto":
                    raise InvalidRequestError(f"dtype {dtype!r}: a workspace has its own weight type")
                yield location.weights
                return
            source = read_source(location.path, dtype, setting_of(settings), mtp=mtp_of(settings), head=head)
        spec, here, adaptable = source.spec, location.path, source.adaptable
    else:
        spec, here, adaptable = _spec_on_hub(str(model), dtype, settings, notes, head=head), None, not head
    notes.extend(spec.notes)
    with tempfile.TemporaryDirectory(prefix="charonia-") as folder:
        weights = Path(folder)
        write_description(spec, weights, ranks_of(settings), here, adaptable=adaptable)
        yield weights


def _spec_on_hub(
    model: str, dtype: str, settings: Mapping[str, str], notes: list[str], *, head: bool = False
) -> ModelSpec:
    """Describe a model on the hub from config.json and the headers of its weights, without downloading the weights."""
    task = setting_of(settings)
    folder = hub.download_config(model, tokenizer=task == "score")  # which has the tokens no and yes
    spec = read_config(folder, dtype, task, mtp=mtp_of(settings), head=head)
    tensors = hub.read_headers(model, folder)
    if tensors is not None:
        return check_spec(folder, spec, tensors, dtype)
    if spec.quantization is not None:
        raise UnsupportedError(BIN_REFUSAL.format(model=model, method=spec.quantization.method))
    weight_type = promised_type(read_json(folder / "config.json")) if dtype == "auto" else dtype
    if not weight_type:
        raise InvalidRequestError(
            f"{model} has .bin weights, and its config.json does not name their type (torch_dtype): name it with "
            f"--dtype {' | '.join(WEIGHT_TYPES)}"
        )
    notes.append(
        f"{model} has .bin weights, which can be checked only after their download: the plan follows config.json, "
        f"with weights in {weight_type}{' and an embedding of its own' if head else ''}"
    )
    return replace(spec, config=replace(spec.config, weight_type=weight_type, data_type=weight_type))


def show(plan: Plan, users: int | None, context: int | None, console: Console) -> None:
    """Print the plan as tables."""
    ranks = f", {plan.ranks} ranks" if plan.ranks > 1 else ""
    memory = Table(title=f"{plan.model_name} ({plan.weight_type}) on {plan.device}{ranks}", title_justify="left")
    memory.add_column("memory")
    memory.add_column("size", justify="right")
    blocks = (
        f"{plan.num_blocks} and {plan.num_window_blocks} window blocks" if plan.window else f"{plan.num_blocks} blocks"
    )
    states = f" and {plan.num_states} states" if plan.num_states else ""
    window_block = f"window block: {plan.cache_block_seq_len} of the last {plan.window} tokens"
    rows = [
        ("weights", plan.weight_bytes),
        *([("in host memory", plan.host_bytes)] if plan.host_bytes else []),
        *([("LoRA adapters", plan.adapter_bytes)] if plan.adapter_bytes else []),
        ("activations and steps", plan.activation_bytes),
        *(
            [("draft model, MTP layer or EAGLE-3 head, with KV cache", plan.speculative_bytes)]
            if plan.speculative_bytes
            else []
        ),
        *([("KV in host memory (kv_offload_memory)", plan.offload_bytes)] if plan.offload_bytes else []),
        ("KV of one token", plan.kv_token_bytes),
        (f"KV block of {plan.cache_block_seq_len} tokens", plan.kv_block_bytes),
        *([(window_block, plan.kv_window_block_bytes)] if plan.window else []),
        *([("state of a sequence (recurrent layers)", plan.state_bytes)] if plan.num_states else []),
        ("free", plan.free_bytes),
        *([(f"KV cache of {blocks}{states}", plan.kv_cache_bytes)] if plan.model_fits else []),
    ]
    for name, size in rows:
        memory.add_row(name, spell_bytes(size))
    console.print(memory)
    console.print(
        f"Steps of at most {plan.token_budget} tokens (token_budget) and {plan.max_batch_size} sequences "
        "(max_batch_size).",
        highlight=False,
    )
    if plan.device_note:
        console.print(f"The device is the CPU: {plan.device_note}.", highlight=False, markup=False)
    if plan.quality:
        console.print(quality_table(parse_records(plan.quality)))
    for warning in plan.warnings if plan.model_fits else plan.warnings[:-1]:
        console.print(f"warning: {warning}", highlight=False, markup=False)
    if not plan.model_fits:
        return
    if not (users and context):
        fits = Table(title="Maximum number of users", title_justify="left")
        fits.add_column("context", justify="right")
        fits.add_column("users that fit", justify="right")
        fits.add_column("computed together", justify="right")
        for length in [context] if context else plan.contexts():
            count = plan.most_users(length)
            fits.add_row(str(length), str(count), str(min(count, plan.max_batch_size)))
        longest = Table(title="Longest context", title_justify="left")
        longest.add_column("users", justify="right")
        longest.add_column("tokens each", justify="right")
        for count in [users] if users else plan.user_counts():
            longest.add_row(str(count), str(plan.longest_context(count)))
        for table in ([fits] if not users else []) + ([longest] if not context else []):
            console.print(table)
    elif plan.refusal(users, context) is None:
        full, windows = users * plan.blocks(context), users * plan.window_blocks(context)
        of_windows = f" and {windows} of {plan.num_window_blocks} window blocks" if plan.window else ""
        needed = spell_bytes(full * plan.kv_block_bytes + windows * plan.kv_window_block_bytes)
        console.print(
            f"{users} users with {context} tokens each fit: they need {full} of {plan.num_blocks} blocks{of_windows} "
            f"({needed}).",
            highlight=False,
        )
