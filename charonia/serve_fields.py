# Generated from definitions/service_settings.toml and definitions/environment.toml by `make generate`; do not edit.
"""The fields of the launcher's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from charonia.setting_types import off_or_at_least


class ServeFields(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="CHARONIA_")

    model: str | None = Field(
        None,
        validation_alias="MODEL",
        description="Hugging Face model folder, workspace folder, GGUF file or hub id; `smollm2` and `demo` are the "
        "models of a checkout and of the image. The demo model is the default if SmolLM2 was not "
        "downloaded, with `CHARONIA_QUANTIZATION`, and on several ranks; default: smollm2",
    )
    more_models: str = Field(
        "",
        description="models that are served in addition to MODEL, separated by commas, each in the form of MODEL or "
        "as NAME=MODEL, where NAME is the name for clients; same as further arguments of `charonia "
        "serve`; default: none",
    )
    model_shares: str = Field(
        "",
        description="with several models, the share of each in the memory for keys and values, in their order: 3,1 "
        "gives the first model three quarters; default: equal shares",
    )
    models_autoload: bool = Field(
        False,
        description="with several models, load a model when a request needs it; if the memory is too small, the least"
        " recently used model without requests is unloaded for it",
    )
    models_idle_s: float = Field(
        0,
        ge=0,
        description="with CHARONIA_MODELS_AUTOLOAD: seconds without a request after which a model is unloaded; 0: "
        "never",
    )
    model_name: str | None = Field(
        None,
        description="name of the model for clients; several names, with commas between them: clients may use each; "
        "default: the name of its folder",
    )
    host: str = Field(
        "127.0.0.1",
        description="address that the gateway listens on; 0.0.0.0: all addresses, so that other machines can use the "
        "gateway",
    )
    triton_address: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address that Triton's ports listen on; they need no keys, so only trusted clients may reach it "
        "(docs/security.md)",
    )
    http_inference: bool = Field(
        False,
        description="enables inference (`generate`, `generate_stream`, `infer`) on Triton's HTTP port; then one "
        "deeply nested body can crash Triton",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="how often in a row a Triton that ended is started again, until one has been ready for ten "
        "minutes; one more ends the service. 0: the service ends when Triton does, and a supervisor "
        "starts it again",
    )
    hang_timeout_s: Annotated[float, off_or_at_least(5)] = Field(
        60,
        description="seconds after which a Triton that does not respond is killed and restarted; 0: never",
    )
    http_port: int = Field(
        33336,
        ge=1,
        le=65535,
        description="Triton HTTP",
    )
    grpc_port: int = Field(
        33337,
        ge=1,
        le=65535,
        description="Triton gRPC",
    )
    metrics_port: int = Field(
        33338,
        ge=1,
        le=65535,
        description="Triton metrics",
    )
    gateway_port: int = Field(
        23333,
        ge=1,
        le=65535,
        description="gateway: REST, documentation, metrics",
    )
    run_dir: Path = Field(
        Path("~/.cache/charonia"),
        description="folder for logs and linked workspaces",
    )
    gateway: bool = Field(
        True,
        description="start the gateway too; false: only Triton, for a gateway that runs elsewhere",
    )
    logs: Literal["files", "stderr"] = Field(
        "files",
        description="destination of Triton's and the gateway's logs: files in the run folder, or stderr, as in "
        "containers",
    )
    triton_dir: Path | None = Field(
        None,
        description="folder of an installed Triton server, /opt/tritonserver in NVIDIA's images; default: the folder "
        "of the package nvidia-pytriton",
    )
    jemalloc: bool = Field(
        True,
        description="Triton uses jemalloc if it is installed (Debian's package libjemalloc2) and LD_PRELOAD names no "
        "other allocator: streamed responses need less CPU time (docs/scaling.md)",
    )
    text_instances: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processes of preprocessing; default: the value in the workspace, 2",
    )
    start_timeout_s: float = Field(
        600,
        gt=0,
        description="seconds until all models must be ready",
    )
    gateway_workers: int = Field(
        0,
        ge=0,
        le=64,
        description="number of processes of the gateway; 0: one, or with CHARONIA_GATEWAY_REDIS_URL one for every "
        "four cores of the machine or of the container's quota, at most 8 (one if `charonia serve` "
        "computes on the CPU)",
    )
    gateway_keys_file: Path | None = Field(
        None,
        description="file of API keys, written by `charonia keys`; it is read again when it changes; default: no key "
        "is required",
    )
    gateway_tls_cert: Path | None = Field(
        None,
        description="TLS of REST: the certificate with its chain, a PEM file; this and the next two files are read "
        "again when they change; default: REST without TLS",
    )
    gateway_tls_client_ca: Path | None = Field(
        None,
        description="TLS of REST: clients need a certificate of one of these authorities, a PEM file; default: no "
        "client certificate is required",
    )
    grpc_tls_cert: Path | None = Field(
        None,
        description="TLS of Triton's gRPC: the certificate with its chain, a PEM file; Triton reads it and the next "
        "two when it starts; default: gRPC without TLS",
    )
    grpc_tls_key: Path | None = Field(
        None,
        description="TLS of Triton's gRPC: the certificate's private key, a PEM file; default: none",
    )
    grpc_tls_client_ca: Path | None = Field(
        None,
        description="TLS of Triton's gRPC: clients (gateways) need a certificate of one of these authorities, a PEM "
        "file; default: no client certificate is required",
    )
    triton_tls: bool = Field(
        False,
        description="TLS to Triton's gRPC; each of the next four settings implies it",
    )
    triton_tls_ca: Path | None = Field(
        None,
        description="TLS to Triton's gRPC: authorities of the server's certificate, a PEM file, read at the start; "
        "default: public ones",
    )
    triton_tls_cert: Path | None = Field(
        None,
        description="TLS to Triton's gRPC: the gateway's own certificate, for a server that requires one; default: "
        "none",
    )
    triton_tls_key: Path | None = Field(
        None,
        description="TLS to Triton's gRPC: the private key of the gateway's certificate; default: none",
    )
    triton_tls_name: str = Field(
        "",
        description="TLS to Triton's gRPC: expected host name in the server's certificate; default: the host of its "
        "address",
    )
    tracing_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="collector that receives traces by OTLP over HTTP, such as http://collector:4318; default: none",
    )
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "qwen3_coder",
        "glm45",
        "llama3_json",
        "mistral",
        "mistral_named",
        "internlm2",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "llama4_json",
        "pythonic",
        "lfm2",
        "olmo3",
        "nemotron",
        "seed_oss",
        "granite3",
        "hunyuan_a13b",
        "hunyuan",
        "hunyuan_v3",
        "hunyuan_v3_open",
        "phi4_mini",
        "functiongemma",
        "gemma4",
        "harmony",
    ] = Field(
        "auto",
        description="the model's format of tool calls; auto: derived from its chat template (docs/tools.md)",
    )
    chat_template: Path | None = Field(
        None,
        description="file with a chat template in Jinja that replaces the model's; for one model; default: the "
        "model's own",
    )
    generic_tools: bool = Field(
        True,
        description="describes the tools in the system message if the model's chat template does not show them; then "
        "calls have the format hermes, unless the template or CHARONIA_TOOL_CALL_PARSER has another. "
        "false: such requests are rejected",
    )
    reasoning_parser: Literal[
        "auto",
        "none",
        "think",
        "think_response",
        "think_answer",
        "hunyuan_v3_open",
        "granite32",
        "mistral",
        "gemma4",
        "thought",
        "thinking",
        "reasoning",
        "seed",
        "harmony",
    ] = Field(
        "auto",
        description="the model's format of reasoning; auto: derived from its chat template (docs/tools.md)",
    )
    access_log: bool = Field(
        False,
        description="log every request: one line each in gateway, preprocessing and engine",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        description="log format of all processes: lines for people (text), or one JSON object per line (json)",
    )
    log_prompts: bool = Field(
        False,
        description="with access_log, log the text of prompts and responses; otherwise no log contains it",
    )


# Settings that every process of the stack reads.
SHARED = (
    "tracing_endpoint",
    "tool_call_parser",
    "chat_template",
    "generic_tools",
    "reasoning_parser",
    "access_log",
    "log_format",
    "log_prompts",
)

# Variables of other processes and scripts with similar names.
SIMILAR = (
    "CHARONIA_CACHE_DIR",
    "CHARONIA_GATEWAY_MODELS_FILE",
    "CHARONIA_GATEWAY_PAGE",
    "CHARONIA_GATEWAY_REQUEST_TIMEOUT_S",
    "CHARONIA_GATEWAY_TLS_KEY",
    "CHARONIA_MODELS",
    "CHARONIA_TAG",
    "CHARONIA_TRITON_ENDPOINTS",
    "CHARONIA_TRITON_HOST",
)
