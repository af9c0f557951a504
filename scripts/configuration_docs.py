"""Writes docs/configuration.md from the engine's settings and the gateway's. Run it after a change of
engine/src/base/config.cpp or gateway/charonia_gateway/settings.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from charonia_gateway.settings import Settings as GatewaySettings

from charonia import _engine
from charonia.settings import SHARED, ServeSettings, env_name

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

HEAD = """# Configuration

*Written by `scripts/configuration_docs.py` from the engine's one table of settings; do not edit.*

Precedence, the last wins: defaults, `config.ini` of the workspace (section `[llama]`), `parameters` of the Triton model
`engine`, the environment (also from a `.env` file in the working folder), options of the command line.

## The stack

| environment | default | meaning |
|---|---|---|
| `MODEL` | the demo model | a Hugging Face folder, a workspace or a hub id |
| `CHARONIA_HOST` | 0.0.0.0 | address that the servers listen on |
| `CHARONIA_HTTP_PORT` | 33336 | Triton, HTTP |
| `CHARONIA_GRPC_PORT` | 33337 | Triton, gRPC |
| `CHARONIA_METRICS_PORT` | 33338 | Triton, metrics |
| `CHARONIA_GATEWAY_PORT` | 23333 | gateway: REST, docs, metrics |
| `CHARONIA_GATEWAY` | 1 | 0: `charonia serve` starts Triton alone (`--no-gateway`) |
| `CHARONIA_LOGS` | files | files in the run folder, or stderr, as in containers |
| `CHARONIA_TRITON_DIR` | nvidia-pytriton's | folder of an installed Triton server, as /opt/tritonserver |
"""

INFERENCE_HEAD = """
## Inference parameters

| key | environment | default | values | meaning |
|---|---|---|---|---|
"""

MODEL_HEAD = """
## The model's own

Written by `charonia convert`; not to be edited.

| key | values | meaning |
|---|---|---|
"""


# The gateway's settings beside its port.
GATEWAY_FIELDS = ("triton_endpoints", "endpoint_check_interval_s", "endpoint_check_timeout_s")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _default(value: object) -> str:
    return "none" if value is None else str(value).lower()


def document() -> str:
    """The text of docs/configuration.md."""
    user, model = [], []
    gateway = [
        f"| `CHARONIA_{name.upper()}` | {field.default} | gateway: {_cell(field.description or '')} |\n"
        for name, field in GatewaySettings.model_fields.items()
        if name in GATEWAY_FIELDS
    ]
    shared = [
        f"| `{env_name(name)}` | {_default(ServeSettings.model_fields[name].default)} | "
        f"{_cell(ServeSettings.model_fields[name].description or '')} |\n"
        for name in SHARED
    ]
    for field in _engine.config_fields():
        if field.model_attribute:
            model.append(f"| `{field.key}` | {_cell(field.range)} | {_cell(field.help)} |\n")
        else:
            name = f"`CHARONIA_{field.key.upper()}`"
            help_text = f"{field.help} (accepted, with a warning)" if field.ignored else field.help
            user.append(
                f"| `{field.key}` | {name} | {field.default_value} | {_cell(field.range)} | {_cell(help_text)} |\n"
            )
    return HEAD + "".join(shared) + "".join(gateway) + INFERENCE_HEAD + "".join(user) + MODEL_HEAD + "".join(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date (exit code)")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif DOCUMENT.read_text(encoding="utf-8") != document():
        raise SystemExit(f"{DOCUMENT.name} is out of date: run python scripts/configuration_docs.py")


if __name__ == "__main__":
    main()
