# Generated from definitions/service_settings.toml by `make generate`; do not edit.
"""The fields of the gateway's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings


class GatewayFields(BaseSettings):
    models_autoload: bool = Field(
        False,
        validation_alias=AliasChoices("charonia_models_autoload", "models_autoload"),
        description="with several models, load a model when a request needs it; if the memory is too small, the least"
        " recently used model without requests is unloaded for it",
    )
    load_timeout_s: float = Field(
        120,
        gt=0,
        validation_alias=AliasChoices("charonia_gateway_load_timeout_s", "load_timeout_s"),
        description="with CHARONIA_MODELS_AUTOLOAD: seconds that a request waits for its model, before it ends with "
        "503",
    )
    model_name: str = Field(
        "charonia",
        min_length=1,
        validation_alias=AliasChoices("charonia_model_name", "model_name"),
        description="name of the model for clients; several names, with commas between them: clients may use each",
    )
    more_models: str = Field(
        "",
        validation_alias=AliasChoices("charonia_gateway_more_models", "more_models"),
        description="further models of the same Triton servers besides CHARONIA_MODEL_NAME, separated by commas: "
        "NAME, or NAME=LABEL if their Triton models are called ensemble.LABEL and so on; default: none; "
        "`charonia serve` sets it",
    )
    models_file: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_models_file", "models_file"),
        description="a file with further models in the format of CHARONIA_GATEWAY_MORE_MODELS; when it changes, new "
        "models are added; default: none; `charonia serve` sets it",
    )
    control_dir: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_control_dir", "control_dir"),
        description="the folder of the `charonia serve` that loads and unloads models for keys with `--access admin`;"
        " default: none; `charonia serve` sets it",
    )
    host: str = Field(
        "127.0.0.1",
        validation_alias=AliasChoices("charonia_host", "host"),
        description="address that the gateway listens on; 0.0.0.0: all addresses, so that other machines can use the "
        "gateway",
    )
    grpc_port: int = Field(
        33337,
        ge=1,
        le=65535,
        validation_alias=AliasChoices("charonia_grpc_port", "grpc_port"),
        description="Triton gRPC",
    )
    port: int = Field(
        23333,
        ge=1,
        le=65535,
        validation_alias=AliasChoices("charonia_gateway_port", "port"),
        description="gateway: REST, documentation, metrics",
    )
    triton_host: str = Field(
        "127.0.0.1",
        validation_alias=AliasChoices("charonia_triton_host", "triton_host"),
        description="host of Triton",
    )
    triton_endpoints: str = Field(
        "",
        validation_alias=AliasChoices("charonia_triton_endpoints", "triton_endpoints"),
        description="Triton servers of the same model, separated by commas: HOST:PORT of gRPC, or dns:///HOST:PORT "
        "for every address of a name; default: CHARONIA_TRITON_HOST and CHARONIA_GRPC_PORT",
    )
    endpoint_check_interval_s: float = Field(
        1,
        gt=0,
        validation_alias=AliasChoices("charonia_endpoint_check_interval_s", "endpoint_check_interval_s"),
        description="seconds between two checks of a Triton server, and between two look-ups of a DNS name",
    )
    endpoint_check_timeout_s: float = Field(
        2,
        gt=0,
        validation_alias=AliasChoices("charonia_endpoint_check_timeout_s", "endpoint_check_timeout_s"),
        description="maximum time in seconds for the response to a check; a server is down after three checks without"
        " a response",
    )
    resume_timeout_s: float = Field(
        30,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_resume_timeout_s", "resume_timeout_s"),
        description="maximum time in seconds for which a response that has begun waits for a server to continue it, "
        "after its own server failed",
    )
    workers: int = Field(
        0,
        ge=0,
        le=64,
        validation_alias=AliasChoices("charonia_gateway_workers", "workers"),
        description="number of processes of the gateway; 0: one, or with CHARONIA_GATEWAY_REDIS_URL one for every "
        "four cores of the machine or of the container's quota, at most 8 (one if `charonia serve` "
        "computes on the CPU)",
    )
    max_body_bytes: int = Field(
        8388608,
        ge=1024,
        validation_alias=AliasChoices("charonia_gateway_max_body_bytes", "max_body_bytes"),
        description="maximum size of a request body in bytes",
    )
    max_choices: int = Field(
        128,
        ge=1,
        validation_alias=AliasChoices("charonia_gateway_max_choices", "max_choices"),
        description="maximum number of completions (prompts times n) of one HTTP request",
    )
    max_responses: int = Field(
        1000,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_max_responses", "max_responses"),
        description="maximum number of stored responses of /v1/responses, for clients that request it; 0: none",
    )
    max_background: int = Field(
        64,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_max_background", "max_background"),
        description="maximum number of responses of /v1/responses that run in the background at the same time; 0: none",
    )
    max_response_bytes: int = Field(
        67108864,
        ge=1024,
        validation_alias=AliasChoices("charonia_gateway_max_response_bytes", "max_response_bytes"),
        description="maximum bytes of all stored responses with their conversations; the oldest are deleted first",
    )
    response_ttl_s: float = Field(
        3600,
        gt=0,
        validation_alias=AliasChoices("charonia_gateway_response_ttl_s", "response_ttl_s"),
        description="seconds after which a stored response is deleted",
    )
    batch_dir: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_batch_dir", "batch_dir"),
        description="folder of uploaded files and batches, which survive a restart; prompts and answers are in these "
        "files; default: none: there are no /v1/files and /v1/batches; with charonia serve: in its run "
        "folder",
    )
    max_batch_bytes: int = Field(
        1073741824,
        ge=65536,
        validation_alias=AliasChoices("charonia_gateway_max_batch_bytes", "max_batch_bytes"),
        description="maximum bytes of all files and batches of one key; each counts at least 65536",
    )
    max_batch_requests: int = Field(
        50000,
        ge=1,
        validation_alias=AliasChoices("charonia_gateway_max_batch_requests", "max_batch_requests"),
        description="maximum requests in all unfinished batches of one key",
    )
    batch_concurrency: int = Field(
        32,
        ge=1,
        validation_alias=AliasChoices("charonia_gateway_batch_concurrency", "batch_concurrency"),
        description="requests of batches that run at the same time; they have a lower priority than other requests",
    )
    batch_ttl_s: float = Field(
        2592000,
        gt=0,
        validation_alias=AliasChoices("charonia_gateway_batch_ttl_s", "batch_ttl_s"),
        description="seconds after which files and ended batches are deleted",
    )
    request_timeout_s: float = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_request_timeout_s", "request_timeout_s"),
        description="maximum time in seconds for one response, which then ends with status 504; 0: no limit",
    )
    heartbeat_s: float = Field(
        15,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_heartbeat_s", "heartbeat_s"),
        description="seconds of silence after which a stream sends a heartbeat; less than the timeout of proxies; 0: "
        "no heartbeat",
    )
    read_timeout_s: float = Field(
        60,
        ge=0,
        le=86400,
        validation_alias=AliasChoices("charonia_gateway_read_timeout_s", "read_timeout_s"),
        description="seconds in which a request with its body must arrive, otherwise its connection ends with 408; 0:"
        " no limit",
    )
    trusted_proxies: str = Field(
        "",
        validation_alias=AliasChoices("charonia_gateway_trusted_proxies", "trusted_proxies"),
        description="addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto count, separated by"
        " commas; *: all; default: none",
    )
    page: bool = Field(
        True,
        validation_alias=AliasChoices("charonia_gateway_page", "page"),
        description="whether to serve the chat page at /",
    )
    allowed_origins: str = Field(
        "",
        validation_alias=AliasChoices("charonia_gateway_allowed_origins", "allowed_origins"),
        description="origins of web pages that may use the gateway, such as https://chat.example.com, separated by "
        "commas; *: all; default: only its own page, at an IP address, localhost or a name of this "
        "machine",
    )
    keys_file: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_keys_file", "keys_file"),
        description="file of API keys, written by `charonia keys`; it is read again when it changes; default: no key "
        "is required",
    )
    cache_by_key: bool = Field(
        True,
        validation_alias=AliasChoices("charonia_gateway_cache_by_key", "cache_by_key"),
        description="each API key uses only its own entries of the prefix cache; false: all keys share the cache, and"
        " can find out which prompts others have sent",
    )
    fit_max_tokens: bool = Field(
        True,
        validation_alias=AliasChoices("charonia_gateway_fit_max_tokens", "fit_max_tokens"),
        description="a max_tokens that is larger than the room in the context counts as unset: the response ends with"
        " `length` when the context is full; false: such a request is rejected",
    )
    redis_url: str = Field(
        "",
        validation_alias=AliasChoices("charonia_gateway_redis_url", "redis_url"),
        description="Redis or Valkey in which several processes or gateways share the limits of keys, stored "
        "responses and the servers of sessions: redis://HOST:PORT; default: in memory, with one process",
    )
    tls_cert: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_tls_cert", "tls_cert"),
        description="TLS of REST: the certificate with its chain, a PEM file; this and the next two files are read "
        "again when they change; default: REST without TLS",
    )
    tls_key: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_tls_key", "tls_key"),
        description="TLS of REST: the certificate's private key, a PEM file without a password; default: none",
    )
    tls_client_ca: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_tls_client_ca", "tls_client_ca"),
        description="TLS of REST: clients need a certificate of one of these authorities, a PEM file; default: no "
        "client certificate is required",
    )
    triton_tls: bool = Field(
        False,
        validation_alias=AliasChoices("charonia_triton_tls", "triton_tls"),
        description="TLS to Triton's gRPC; each of the next four settings implies it",
    )
    triton_tls_ca: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_triton_tls_ca", "triton_tls_ca"),
        description="TLS to Triton's gRPC: authorities of the server's certificate, a PEM file, read at the start; "
        "default: public ones",
    )
    triton_tls_cert: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_triton_tls_cert", "triton_tls_cert"),
        description="TLS to Triton's gRPC: the gateway's own certificate, for a server that requires one; default: "
        "none",
    )
    triton_tls_key: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_triton_tls_key", "triton_tls_key"),
        description="TLS to Triton's gRPC: the private key of the gateway's certificate; default: none",
    )
    triton_tls_name: str = Field(
        "",
        validation_alias=AliasChoices("charonia_triton_tls_name", "triton_tls_name"),
        description="TLS to Triton's gRPC: expected host name in the server's certificate; default: the host of its "
        "address",
    )
    write_timeout_s: float = Field(
        60,
        ge=0,
        le=86400,
        validation_alias=AliasChoices("charonia_gateway_write_timeout_s", "write_timeout_s"),
        description="seconds without progress in sending after which a client's connection is closed; 0: no limit",
    )
    log_requests: Path | None = Field(
        None,
        validation_alias=AliasChoices("charonia_gateway_log_requests", "log_requests"),
        description="file in which each completed request is logged with its body and its tokens, for `charonia "
        "replay`; prompts are then in this file, which only its owner can read; default: none",
    )
    shutdown_timeout_s: float = Field(
        30,
        ge=0,
        validation_alias=AliasChoices(
            "charonia_gateway_shutdown_timeout_s", "charonia_drain_timeout_s", "shutdown_timeout_s"
        ),
        description="seconds that running responses have to end after SIGTERM; new requests are rejected meanwhile",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info",
        validation_alias=AliasChoices("charonia_gateway_log_level", "log_level"),
        description="log level",
    )
    tracing_endpoint: str = Field(
        "",
        pattern="^(https?://.+)?$",
        validation_alias=AliasChoices("charonia_tracing_endpoint", "tracing_endpoint"),
        description="collector that receives traces by OTLP over HTTP, such as http://collector:4318; default: none",
    )
    access_log: bool = Field(
        False,
        validation_alias=AliasChoices("charonia_gateway_access_log", "charonia_access_log", "access_log"),
        description="log every request: one line each in gateway, preprocessing and engine",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        validation_alias=AliasChoices("charonia_log_format", "log_format"),
        description="log format of all processes: lines for people (text), or one JSON object per line (json)",
    )
    log_prompts: bool = Field(
        False,
        validation_alias=AliasChoices("charonia_log_prompts", "log_prompts"),
        description="with access_log, log the text of prompts and responses; otherwise no log contains it",
    )
