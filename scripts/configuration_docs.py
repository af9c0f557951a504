"""Writes docs/configuration.md from the engine's settings. Run it after a change of engine/src/base/config.cpp."""

from __future__ import annotations

import argparse
from pathlib import Path

from charonia import _engine

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
| `CHARONIA_TRITON_ENDPOINTS` | the one server | gateway: Triton servers of the same model, separated by commas: `HOST:PORT` of gRPC, \
`dns:///HOST:PORT` (every address of the name), `file:///PATH` (a file of such entries, one a line) |
| `CHARONIA_ENDPOINT_CHECK_INTERVAL_S` | 1 | gateway: seconds between two checks of a server, and two looks at where they are |
| `CHARONIA_ENDPOINT_CHECK_TIMEOUT_S` | 2 | gateway: seconds for an answer to a check; a server that misses three in a row is down |

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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def document() -> str:
    """The text of docs/configuration.md."""
    user, model = [], []
    for field in _engine.config_fields():
        if field.model_attribute:
            model.append(f"| `{field.key}` | {_cell(field.range)} | {_cell(field.help)} |\n")
        else:
            name = f"`CHARONIA_{field.key.upper()}`"
            help_text = f"{field.help} (accepted, with a warning)" if field.ignored else field.help
            user.append(
                f"| `{field.key}` | {name} | {field.default_value} | {_cell(field.range)} | {_cell(help_text)} |\n"
            )
    return HEAD + "".join(user) + MODEL_HEAD + "".join(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the file is up to date (exit code)")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document(), encoding="utf-8")
    elif DOCUMENT.read_text(encoding="utf-8") != document():
        raise SystemExit(f"{DOCUMENT.name} is out of date: run python scripts/configuration_docs.py")


if __name__ == "__main__":
    main()
