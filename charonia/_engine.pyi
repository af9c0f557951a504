"""Types of the binding in engine/python/module.cpp."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

class ConfigField:
    key: str
    kind: str
    default_value: str
    range: str
    help: str
    model_attribute: bool
    ignored: bool

def config_fields() -> list[ConfigField]: ...
def check_settings(settings: dict[str, str]) -> list[str]: ...
def setting_warnings(weights: Path, settings: dict[str, str]) -> list[str]: ...
def draft_logits(
    weights: Path, tokens: list[int], drafted: list[int], settings: dict[str, str]
) -> list[list[float]]: ...
def choose_all_proposals_for_tests(all: bool) -> None: ...
def settings_from_environment() -> dict[str, str]: ...
def read_config_ini(file: Path) -> dict[str, str]: ...
def plan_memory(weights: Path, settings: dict[str, str], memory: str = "") -> dict[str, Any]: ...
def measure_read_bandwidth(threads: int = 0, megabytes: int = 1024) -> float: ...
def free_host_memory() -> int: ...
def num_gpus() -> int: ...
def why_no_gpu() -> str: ...

class KernelBench:
    def __init__(
        self,
        device: str,
        threads: int = 0,
        reproducible: bool = False,
        wgmma_experts: bool | None = None,
    ) -> None: ...
    def report(self) -> list[str]: ...
    def gemm(
        self, n: int, k: int, format: str, rows: list[int], layers: int, rounds: int
    ) -> tuple[int, dict[int, list[float]]]: ...
    def experts(
        self,
        count: int,
        top_k: int,
        hidden: int,
        inter: int,
        format: str,
        rows: list[int],
        layers: int,
        rounds: int,
    ) -> tuple[int, dict[int, list[float]]]: ...
    def attention(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        quant_policy: int,
        batch: int,
        fresh: int,
        context: int,
        layers: int,
        rounds: int,
    ) -> tuple[float, list[float]]: ...

class SamplingParams:
    # generated: sampling parameters, from definitions/ by `make generate`
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop_words: list[str | bytes]
    end_ids: list[int]
    ignore_eos: bool
    thinking_budget: int | None
    thinking_begin_ids: list[int]
    thinking_end_ids: list[int]
    thinking_call_ids: list[list[int]]
    thinking_begun: bool
    bad_words: list[list[int]]
    logit_bias: list[tuple[int, float]]
    logprobs: int
    prompt_logprobs: int
    n: int
    best_of: int
    # end of generated: sampling parameters
    def __init__(self) -> None: ...

class Result:
    token_ids: list[int]
    text_begin: int
    text_end: int
    text: str
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    finish_reason: str
    error: str
    error_class: str  # the name of errors.py's class for it
    index: int
    cumulative_logprob: float
    prompt_logprobs: list[float]
    prompt_top_logprobs: list[list[tuple[int, float]]]
    prompt_logits: NDArray[np.float32]  # [rows, vocab_size], the first at position first_logits of the prompt
    first_logits: int
    pooled: list[float]
    num_session_tokens: int
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_proposed_tokens: int
    num_accepted_tokens: int
    timings: tuple[float, float, float]

class AdapterInfo:
    name: str
    folder: str
    fingerprint: str  # 16 hexadecimal digits: a hash of its files
    max_rank: int
    bytes: int

class SessionInfo:
    id: str
    num_tokens: int  # of its history
    num_turns: int
    num_pinned_blocks: int
    idle_s: float  # since its last turn ended
    busy: bool  # a request of it runs or waits

class EngineInfo:
    model_name: str
    model_family: str
    vocab_size: int
    hidden_units: int
    num_layer: int
    model_task: str  # generate | embed | score
    weight_type: str  # of most of the weights
    data_type: str  # of activations and of the weights that are not quantised: bf16 | fp16 | fp32
    group_size: int  # input features that share a scale; 0: all of an output feature, or not quantised
    start_id: int
    end_ids: list[int]
    session_len: int
    threads: int
    max_batch_size: int  # resolved, as is token_budget
    token_budget: int
    quant_policy: int
    quantization: str
    max_queue_size: int
    cache_block_seq_len: int
    @property
    def default_sampling(self) -> SamplingParams: ...  # a copy: of requests that set none
    device: str  # cpu | cuda
    device_ids: str  # GPUs of the ranks, separated by commas
    device_note: str  # why device = auto is the CPU
    instruction_set: str
    arithmetic: str
    deterministic: bool
    weight_bytes: int
    weight_bytes_per_step: int
    kv_cache_bytes: int
    num_blocks: int
    num_window_blocks: int
    num_states: int
    warnings: list[str]
    kernel_report: list[str]  # which kernels operations go to, as chosen at start; empty on the CPU

class EngineStats:
    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    blocks_pinned: int  # kept for sessions, among cached and active ones
    num_sessions: int
    num_steps: int
    num_preemptions: int
    lora_slot_waits: int  # steps with a place for a request whose LoRA adapter had no slot
    prompt_tokens: int
    generation_tokens: int
    jump_forward_tokens: int  # of those generated: taken without a step of their own
    proposed_tokens: int  # by speculation
    accepted_tokens: int  # of those generated: proposals that were accepted
    prefix_queries_tokens: int
    prefix_hit_tokens: int
    offload_queries_tokens: int
    offload_hit_tokens: int
    offload_bytes: int
    gemms_rejected: int  # GEMMs that built-in kernels computed although cuBLASLt was chosen

class TokenSplit:
    def __init__(self, weights_dir: Path) -> None: ...
    def forced(self, before: Sequence[int], text: str) -> list[int]: ...

def schema_for_llguidance(schema: str) -> str: ...
def regex_for_llguidance(expression: str) -> str: ...

class Engine:
    def __init__(self, weights_dir: Path, overrides: dict[str, str] = ...) -> None: ...
    def submit(
        self,
        *,
        id: str,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        priority: int,
        stream: bool,
        strip_leading_space: bool,
        session_id: str = "",
        continuation_ids: Sequence[int] = (),
        end_session: bool = False,
        timeout_ms: int | None = None,
        prompt_logits: bool = False,
        guide: tuple[str, str] | None = None,  # type and text
        cache_salt: str = "",
        owner: str = "",
        stop_until: Sequence[str] = (),
        fit_max_tokens: bool = False,
        prompt_progress: bool = False,
        lora_name: str = "",
        pooling: str = "",
        dimensions: int = 0,
        callback: Callable[[Result], None],
    ) -> int: ...
    def cancel(self, handle: int) -> bool: ...
    def cancel_id(self, id: str) -> bool: ...
    def stop(self, handle: int) -> bool: ...
    def stop_id(self, id: str) -> bool: ...
    def load_adapter(self, name: str, folder: Path) -> None: ...
    def unload_adapter(self, name: str) -> bool: ...
    def no_adapter(self, name: str) -> str: ...
    def adapters(self) -> list[AdapterInfo]: ...
    def end_session(self, session_id: str) -> bool: ...
    def sessions(self) -> list[SessionInfo]: ...
    def token_bytes(self, id: int) -> bytes: ...
    def shutdown(self, timeout_ms: int = 0) -> None: ...
    def info(self) -> EngineInfo: ...
    def stats(self) -> EngineStats: ...
    def kernel_report(self) -> list[str]: ...
    def check_integrity(self) -> None: ...
