"""What `charonia serve` can be told by options, environment and `.env` (docs/configuration.md).

The inference parameters (CHARONIA_<KEY>) are defined by the engine's own table and are only passed on here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dotenv import dotenv_values
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from charonia.errors import InvalidRequestError

ENV_FILE = Path(".env")
PREFIX = "CHARONIA_"


def _port(default: int, name: str, use: str) -> Any:
    return Field(default, ge=1, le=65535, validation_alias=f"{PREFIX}{name}", description=use)


class ServeSettings(BaseSettings):
    """Precedence: what is given here by name, environment, `.env`, defaults."""

    model_config = SettingsConfigDict(
        env_file=ENV_FILE, env_file_encoding="utf-8", env_ignore_empty=True, extra="ignore", populate_by_name=True
    )

    model: str | None = Field(
        None, validation_alias="MODEL", description="Hugging Face model folder, workspace folder or hub id"
    )
    model_name: str | None = Field(
        None,
        validation_alias=f"{PREFIX}MODEL_NAME",
        description="name under which clients ask for the model; default: its folder's",
    )
    host: str = Field("0.0.0.0", validation_alias=f"{PREFIX}HOST", description="address to listen on")
    http_port: int = _port(33336, "HTTP_PORT", "Triton HTTP")
    grpc_port: int = _port(33337, "GRPC_PORT", "Triton gRPC")
    metrics_port: int = _port(33338, "METRICS_PORT", "Triton metrics")
    gateway_port: int = _port(23333, "GATEWAY_PORT", "gateway")
    run_dir: Path = Field(
        Path("~/.cache/charonia"),
        validation_alias=f"{PREFIX}RUN_DIR",
        description="folder for logs and linked workspaces",
    )
    gateway: bool = Field(
        True,
        validation_alias=f"{PREFIX}GATEWAY",
        description="serve the gateway too; without it Triton alone is served, for a gateway that runs elsewhere",
    )
    logs: Literal["files", "stderr"] = Field(
        "files",
        validation_alias=f"{PREFIX}LOGS",
        description="where the logs of Triton and the gateway go: files in the run folder, or stderr, as in containers",
    )
    triton_dir: Path | None = Field(
        None,
        validation_alias=f"{PREFIX}TRITON_DIR",
        description="folder of an installed Triton server, /opt/tritonserver in NVIDIA's images; default: that of "
        "the package nvidia-pytriton",
    )
    text_instances: int | None = Field(
        None,
        ge=1,
        le=64,
        validation_alias=f"{PREFIX}TEXT_INSTANCES",
        description="processes each for preprocessing and postprocessing; default: as the workspace says, 2",
    )
    tracing_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        validation_alias=f"{PREFIX}TRACING_ENDPOINT",
        description="collector that gets traces by OTLP over HTTP, such as http://collector:4318; default: none",
    )
    access_log: bool = Field(
        False,
        validation_alias=f"{PREFIX}ACCESS_LOG",
        description="log every request: one line each in gateway, preprocessing and engine",
    )
    log_format: Literal["text", "json"] = Field(
        "text",
        validation_alias=f"{PREFIX}LOG_FORMAT",
        description="log format of all processes: lines for people (text), or one JSON object per line (json)",
    )
    log_prompts: bool = Field(
        False,
        validation_alias=f"{PREFIX}LOG_PROMPTS",
        description="with access_log, log the text of prompts and answers; otherwise no log has such text",
    )
    start_timeout_s: float = Field(
        600, gt=0, validation_alias=f"{PREFIX}START_TIMEOUT_S", description="seconds until all models must be ready"
    )

    @property
    def ports(self) -> dict[str, int]:
        """By the environment variable that sets it."""
        names = ["http_port", "grpc_port", "metrics_port", *(["gateway_port"] if self.gateway else [])]
        return {env_name(name): getattr(self, name) for name in names}


# What every process of the stack reads.
SHARED = ("tracing_endpoint", "access_log", "log_format", "log_prompts")


def shared_environment(settings: ServeSettings) -> dict[str, str]:
    """For the processes: the settings that all of them read."""
    values = {env_name(name): getattr(settings, name) for name in SHARED}
    return {
        name: str(int(value)) if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }


def env_name(field: str) -> str:
    """The environment variable of a field."""
    return str(ServeSettings.model_fields[field].validation_alias)


def read_settings(**given: Any) -> ServeSettings:
    """The settings; `given` wins, its None entries are not given. Raises InvalidRequestError naming the variable, its
    value and what would be right."""
    try:
        return ServeSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0])
        name = env_name(place) if place in ServeSettings.model_fields else place
        raise InvalidRequestError(f"{name}={first['input']!r}: {first['msg']}") from None


def environment() -> dict[str, str]:
    """The process's environment over `.env`; empty values count as not set."""
    dotenv = {name: value for name, value in dotenv_values(ENV_FILE).items() if value}
    return {**dotenv, **{name: value for name, value in os.environ.items() if value}}


def inference_settings(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The inference parameters that are set, by key: `given` over environment over `.env`.

    Raises InvalidRequestError for a value that the engine's table does not allow, or for a key that it does not have.
    """
    from charonia import _engine

    keys = {entry.key for entry in _engine.config_fields() if not entry.model_attribute}
    values = environment()
    settings = {key: values[PREFIX + key.upper()] for key in sorted(keys) if PREFIX + key.upper() in values}
    settings.update(given or {})
    _engine.check_settings(settings)
    return settings


def misspelled() -> list[str]:
    """Warnings for CHARONIA_ variables that nothing reads but that look like one that is read."""
    from charonia import _engine

    known = {PREFIX + entry.key.upper() for entry in _engine.config_fields()}
    known |= {env_name(field) for field in ServeSettings.model_fields}
    warnings = []
    for name in sorted(environment()):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            if near:
                warnings.append(f"{name} is not known and ignored; did you mean {near[0]}?")
    return warnings
