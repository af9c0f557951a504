"""Computes a hash of everything on which the tokens of a server's responses depend, except what the engine reports
itself (EngineInfo::arithmetic in engine.h). The client library joins both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from context_length import config_section, setting

# generated: settings that change tokens, from definitions/ by `make generate`
SETTINGS: dict[str, str | None] = {
    "tensor_para_size": "1",
    "session_len": None,
    "task": None,
    "max_batch_size": None,
    "cache_max_entry_count": None,
    "cache_block_seq_len": None,
    "cache_chunk_size": None,
    "cache_size": None,
    "cache_users": None,
    "cache_user_tokens": None,
    "enable_prefix_caching": None,
    "quant_policy": "0",
    "quantization": "none",
    "rope_scaling_factor": "0",
    "use_logn_attn": "0",
    "generation_config": "auto",
    "device": None,
    "null_step_ms": None,
    "device_ids": None,
    "reproducible": None,
    "cuda_graphs": None,
    "threads": None,
    "token_budget": None,
    "step_time_ms": None,
    "max_queue_size": None,
    "max_queue_tokens": None,
    "max_queue_time_s": None,
    "request_timeout_s": None,
    "drain_timeout_s": None,
    "guide_max_bytes": None,
    "jump_forward": "False",
    "speculative_method": None,
    "speculative_model": None,
    "speculative_tokens": None,
    "session_ttl_s": None,
    "session_quota": None,
    "max_sessions": None,
    "session_dir": None,
    "lora_adapters": None,
    "lora_device_adapters": None,
    "lora_max_rank": None,
    "kv_offload_path": None,
    "kv_offload_size": None,
    "kv_offload_memory": None,
    "stream_interval_ms": None,
    "stream_interval_per_stream_ms": None,
    "stream_interval_max_ms": None,
    "max_context_token_num": None,
    "step_length": None,
    "use_context_fmha": None,
}
VARIABLES = {
    "CHARONIA_TOOL_CALL_PARSER": "auto",
    "CHARONIA_GENERIC_TOOLS": "True",
    "CHARONIA_REASONING_PARSER": "auto",
}
# end of generated: settings that change tokens
# charonia serve sets this variable to a hash of the engine's library, which changes with each version and build.
ENGINE_BUILD = "CHARONIA_ENGINE_BUILD"
# The file of a chat template that replaces the model's.
TEMPLATE_VARIABLE = "CHARONIA_CHAT_TEMPLATE"
# charonia/weights/fingerprint.py begins with it. Without it, other scales may have the same fingerprint.
WEIGHTS_VERSION = "2-"
# They make the tokens of a prompt, and the masks of structured output.
_PACKAGES = ("tokenizers", "transformers", "jinja2", "llguidance")


def fingerprint(weights: Path, engine_config: Path, environment: Mapping[str, str], tokenizer: Path) -> str:
    """16 hex digits that change with the weights, the model's attributes, the tokenizer, the chat template, settings
    that change tokens, the engine's build and the code and packages of preprocessing. Arguments as of
    context_length(); `tokenizer` is a folder."""
    digest = hashlib.sha256()
    for name, value in _parts(weights, engine_config, environment, tokenizer):
        digest.update(f"{name} {len(value)}\n".encode() + value)
    return digest.hexdigest()[:16]


def _parts(
    weights: Path, engine_config: Path, environment: Mapping[str, str], tokenizer: Path
) -> Iterator[tuple[str, bytes]]:
    manifest = json.loads(_read(weights / "manifest.json") or "{}")
    known = str(manifest.get("weights"))
    if not known.startswith(WEIGHTS_VERSION):
        files = manifest.get("files", {}).items()
        sums = sorted(str(file.get("sha256") or f"{name} {file.get('bytes')}") for name, file in files)
        known = " ".join([known, *sums])
    yield "weights", known.encode()
    tensors = manifest.get("tensors", {}).items()
    quantised = {name: [one.get("dtype"), one["quantization"]] for name, one in tensors if "quantization" in one}
    yield "quantization", json.dumps(quantised, sort_keys=True).encode()
    yield "layers", json.dumps(manifest.get("layers"), sort_keys=True).encode()
    for name, value in sorted(config_section(weights / "config.ini").items()):
        if name not in SETTINGS and name != "model_name":
            yield name, value.encode()
    for name, default in SETTINGS.items():
        if default is not None:
            yield name, _plain(setting(name, weights, engine_config, environment) or default)
    for name, default in VARIABLES.items():
        yield name, _plain(environment.get(name) or default)
    if template := environment.get(TEMPLATE_VARIABLE):
        yield TEMPLATE_VARIABLE, _read(Path(template))
    own = Path(__file__).resolve().parent
    for folder, files in ((tokenizer, tokenizer.iterdir()), (own, own.rglob("*.py"))):
        for file in sorted(files):
            if file.is_file() and not file.is_symlink():
                yield str(file.relative_to(folder)), _read(file)
    for name in _PACKAGES:
        yield name, _version(name).encode()
    yield ENGINE_BUILD, environment.get(ENGINE_BUILD, "").encode()


def _plain(value: str) -> bytes:
    """The same bytes for equal values: 0, 0.0 and false; 1 and true; auto and Auto."""
    text = value.strip().lower()
    text = {"true": "1", "yes": "1", "on": "1", "false": "0", "no": "0", "off": "0"}.get(text, text)
    try:
        return repr(float(text)).encode()
    except ValueError:
        return text.encode()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # a missing file of the model: the engine reports it
        return b""
