"""The gateway's settings: one definition for environment, `.env` and command line."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from charonia_gateway.endpoints import discovery


def _named(name: str) -> AliasChoices:
    """The environment's name (CHARONIA_...) and the command line's."""
    return AliasChoices(f"charonia_{name}", name)


class Settings(BaseSettings):
    """OpenAI-compatible REST gateway to Charonia on Triton."""

    model_config = SettingsConfigDict(
        env_file=".env",
        extra="ignore",
        populate_by_name=True,
        cli_kebab_case=True,
        cli_prog_name="python -m charonia_gateway",
    )

    host: str = Field("127.0.0.1", validation_alias=_named("host"), description="address to listen on")
    port: int = Field(
        23333, ge=1, le=65535, validation_alias=AliasChoices("charonia_gateway_port", "port"), description="port"
    )
    triton_host: str = Field("127.0.0.1", validation_alias=_named("triton_host"), description="host of Triton")
    grpc_port: int = Field(33337, ge=1, le=65535, validation_alias=_named("grpc_port"), description="its gRPC port")
    triton_endpoints: str = Field(
        "",
        validation_alias=_named("triton_endpoints"),
        description="Triton servers of the same model, separated by commas: HOST:PORT of gRPC, dns:///HOST:PORT for "
        "every address of a name, file:///PATH for a file of such entries; default: the one of triton_host, grpc_port",
    )
    endpoint_check_interval_s: float = Field(
        1,
        gt=0,
        validation_alias=_named("endpoint_check_interval_s"),
        description="seconds between two checks of a Triton server, and between two reads of names and files",
    )
    endpoint_check_timeout_s: float = Field(
        2,
        gt=0,
        validation_alias=_named("endpoint_check_timeout_s"),
        description="maximum time for an answer to a check, in seconds; a server that misses three in a row is down",
    )
    model_name: str = Field(
        "charonia", min_length=1, validation_alias=_named("model_name"), description="name under which clients ask"
    )
    max_body_bytes: int = Field(
        8 << 20,
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
    request_timeout_s: float = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_request_timeout_s", "request_timeout_s"),
        description="maximum time for one answer in seconds, after which it ends with status 504; 0 for no limit",
    )
    heartbeat_s: float = Field(
        15,
        ge=0,
        validation_alias=AliasChoices("charonia_gateway_heartbeat_s", "heartbeat_s"),
        description="seconds of silence after which a stream sends a heartbeat, below what proxies wait; 0 for none",
    )
    write_timeout_s: float = Field(
        60,
        ge=0,
        le=86400,
        validation_alias=AliasChoices("charonia_gateway_write_timeout_s", "write_timeout_s"),
        description="seconds for which a client may take nothing of what is sent before its connection ends, 0 for any",
    )
    shutdown_timeout_s: float = Field(
        30,
        ge=0,
        validation_alias=AliasChoices(
            "charonia_gateway_shutdown_timeout_s", "charonia_drain_timeout_s", "shutdown_timeout_s"
        ),
        description="seconds that running answers have to end after SIGTERM; no new request is taken meanwhile",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", validation_alias=AliasChoices("charonia_gateway_log_level", "log_level"), description="log level"
    )
    log_format: Literal["text", "json"] = Field(
        "text", validation_alias=_named("log_format"), description="lines for people, or one JSON object a line"
    )
    log_prompts: bool = Field(
        False, validation_alias=_named("log_prompts"), description="with access_log, log what requests ask"
    )
    access_log: bool = Field(
        False,
        validation_alias=AliasChoices("charonia_gateway_access_log", "charonia_access_log", "access_log"),
        description="log every request",
    )
    tracing_endpoint: str = Field(
        "",
        pattern="^(https?://.+)?$",
        validation_alias=_named("tracing_endpoint"),
        description="collector to which traces are sent by OTLP over HTTP, such as http://collector:4318; empty: none",
    )

    @field_validator("triton_endpoints")
    @classmethod
    def _readable(cls, text: str) -> str:
        discovery.entries(text)
        return text

    @property
    def endpoints(self) -> str:
        """The list of Triton servers, of one entry at least."""
        host = f"[{self.triton_host}]" if ":" in self.triton_host else self.triton_host
        return self.triton_endpoints.strip(" ,\n") or f"{host}:{self.grpc_port}"
