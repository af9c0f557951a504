"""The gateway's settings, from environment, `.env` and command line. definitions/service_settings.toml defines them."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator
from pydantic_settings import SettingsConfigDict

from charonia_gateway.endpoints import discovery
from charonia_gateway.origins import parse_origins
from charonia_gateway.setting_fields import GatewayFields

# Of the shared storage of limits. Valkey speaks Redis' protocol.
STORAGE_SCHEMES = ("redis", "rediss", "redis+unix", "valkey", "valkeys", "valkey+unix")


class Settings(GatewayFields):
    """OpenAI-compatible REST gateway to Charonia on Triton."""

    model_config = SettingsConfigDict(
        env_file=".env",
        extra="ignore",
        populate_by_name=True,
        cli_kebab_case=True,
        cli_prog_name="python -m charonia_gateway",
    )

    @field_validator("triton_endpoints")
    @classmethod
    def _readable(cls, text: str) -> str:
        discovery.entries(text)
        return text

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        parse_origins(text)
        return text

    @field_validator("keys_file", mode="before")
    @classmethod
    def _may_be_empty(cls, path: Any) -> Any:
        return path or None  # as compose hands on a variable that is empty

    @field_validator("limits_storage")
    @classmethod
    def _is_storage(cls, uri: str) -> str:
        scheme, separator, _ = uri.partition("://")
        if uri and not (separator and scheme in STORAGE_SCHEMES):
            # Nothing else of it: it may hold a password.
            raise ValueError(f"{scheme[:20]!r} is none of {', '.join(STORAGE_SCHEMES)}: expected redis://HOST:PORT")
        return uri

    @property
    def origins(self) -> frozenset[str]:
        """The web pages that may use the gateway beside its own."""
        return parse_origins(self.allowed_origins)

    @property
    def endpoints(self) -> str:
        """The list of Triton servers, of one entry at least."""
        host = f"[{self.triton_host}]" if ":" in self.triton_host else self.triton_host
        return self.triton_endpoints.strip(" ,\n") or f"{host}:{self.grpc_port}"
