"""The gateway's settings, from environment, `.env` and command line. definitions/service_settings.toml defines them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from charonia_gateway.endpoints import discovery
from charonia_gateway.setting_fields import GatewayFields
from charonia_gateway.tls import Certificates, expiry_of

if TYPE_CHECKING:
    from charonia_client import Tls

FILES = (  # fields
    "keys_file",
    "models_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "triton_tls_ca",
    "triton_tls_cert",
    "triton_tls_key",
)
# Valkey speaks the protocol of Redis.
REDIS_SCHEMES = ("redis", "rediss", "unix", "valkey", "valkeys")


# All environment variables of settings begin with it.
_PREFIX = "charonia_"
ANY_ORIGIN = "*"
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_models(text: str) -> dict[str, str]:
    """Label by name, from a list of NAME or NAME=LABEL. Raises ValueError for a wrong or a duplicate entry."""
    found: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        # Labels have no "=", and names may.
        name, _, label = entry.rpartition("=") if "=" in entry else (entry, "", entry)
        label = label or name
        if not name or not _LABEL.fullmatch(label):
            raise ValueError(
                f"{entry!r}: expected NAME or NAME=LABEL; a label has letters, digits, '.', '_' and '-', at most 64"
            )
        if name in found or label in found.values():
            raise ValueError(f"{entry!r}: duplicate name or label")
        found[name] = label
    return found


def parse_origins(text: str) -> frozenset[str]:
    """Origins separated by commas or spaces. Raises ValueError for a wrong one."""
    origins = {part.rstrip("/").lower() for part in re.split(r"[,\s]+", text) if part}
    for origin in origins:
        if origin != ANY_ORIGIN and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise ValueError(
                f"{origin!r} is not an origin: expected * or http://HOST:PORT or https://HOST, without a path"
            )
    return frozenset(origins)


class Settings(GatewayFields):
    """OpenAI-compatible REST gateway to Charonia on Triton."""

    model_config = SettingsConfigDict(
        env_file=".env",
        extra="ignore",
        populate_by_name=True,
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_prog_name="python -m charonia_gateway",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Short names are those of options. HOST and PORT in the environment belong to other programs."""
        for source in (env_settings, dotenv_settings):
            found = vars(source)["env_vars"]
            vars(source)["env_vars"] = {name: found[name] for name in found if name.lower().startswith(_PREFIX)}
        return init_settings, env_settings, dotenv_settings

    @field_validator("triton_endpoints")
    @classmethod
    def _readable(cls, text: str) -> str:
        discovery.entries(text)
        return text

    @field_validator("more_models")
    @classmethod
    def _are_models(cls, text: str) -> str:
        parse_models(text)
        return text

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, text: str) -> str:
        parse_origins(text)
        return text

    @field_validator(*FILES, "log_requests", "control_dir", "batch_dir", mode="before")
    @classmethod
    def _may_be_empty(cls, path: Any) -> Any:
        return Path(path).expanduser() if path else None  # compose passes an unset variable as an empty one

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, url: str) -> str:
        scheme, separator, _ = url.partition("://")
        if url and not (separator and scheme in REDIS_SCHEMES):
            # Only the scheme is shown: the URL may contain a password.
            raise ValueError(f"{scheme[:20]!r} is not one of {', '.join(REDIS_SCHEMES)}: expected redis://HOST:PORT")
        return url

    @model_validator(mode="after")
    def _check_combinations(self) -> Settings:
        if not self.model_names:
            raise ValueError("CHARONIA_MODEL_NAME has no name: write NAME, or NAME,OTHER_NAME")
        if twice := next((name for name in self.model_names if name in parse_models(self.more_models)), None):
            raise ValueError(
                f"CHARONIA_GATEWAY_MORE_MODELS contains the name {twice} of CHARONIA_MODEL_NAME: use each name once"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(
                "CHARONIA_GATEWAY_TLS_CERT and CHARONIA_GATEWAY_TLS_KEY belong together: set both or neither"
            )
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("CHARONIA_GATEWAY_TLS_CLIENT_CA needs CHARONIA_GATEWAY_TLS_CERT")
        shared = {"CHARONIA_GATEWAY_KEYS_FILE": self.keys_file, "CHARONIA_GATEWAY_MAX_RESPONSES": self.max_responses}
        if self.workers > 1 and not self.redis_url and any(shared.values()):
            names = " and ".join(name for name, value in shared.items() if value)
            raise ValueError(
                f"CHARONIA_GATEWAY_WORKERS={self.workers} needs CHARONIA_GATEWAY_REDIS_URL: several processes share "
                f"the limits of keys and stored responses in Redis ({names}). Set it to redis://HOST:PORT, use one "
                "process, or set CHARONIA_GATEWAY_MAX_RESPONSES=0 and no file of keys"
            )
        return self

    def tls_to_triton(self) -> Tls | None:
        """TLS for Triton's gRPC port, None if it has no TLS. Raises ValueError for unusable files."""
        files = (self.triton_tls_ca, self.triton_tls_cert, self.triton_tls_key)
        if not (self.triton_tls or any(files) or self.triton_tls_name):
            return None
        from charonia_client import Tls  # the import of gRPC's client and NumPy takes a quarter of a second

        return Tls(*files, self.triton_tls_name)

    def certificates(self) -> Certificates | None:
        """For the gateway's own port; None without TLS. Raises ValueError for files that cannot be used."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return Certificates(self.tls_cert, self.tls_key, self.tls_client_ca)

    def certificate_expiries(self) -> dict[str, float]:
        """When the gateway's certificates expire, in seconds since 1970, by file. A file that cannot be read is left
        out: its connections report it."""
        found = {}
        for file in (self.tls_cert, self.triton_tls_cert):
            if file:
                with contextlib.suppress(OSError, ValueError):
                    found[str(file)] = expiry_of(file)
        return found

    @property
    def model_names(self) -> list[str]:
        """The names of the default model. Clients may use each; the first is the model's own."""
        return list(dict.fromkeys(filter(None, map(str.strip, self.model_name.split(",")))))

    @property
    def models(self) -> dict[str, str]:
        """The label of each model, by its own name. The label of the default model, which is first, is empty."""
        return {self.model_names[0]: "", **parse_models(self.more_models)}

    @property
    def origins(self) -> frozenset[str]:
        """Origins of web pages that may use the gateway, in addition to its own pages."""
        return parse_origins(self.allowed_origins)

    @property
    def endpoints(self) -> str:
        """The list of Triton servers, of one entry at least."""
        host = f"[{self.triton_host}]" if ":" in self.triton_host else self.triton_host
        return self.triton_endpoints.strip(" ,\n") or f"{host}:{self.grpc_port}"
