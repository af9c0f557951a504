"""Generates docs/configuration.md, and the tables of variables in other pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from definitions.engine import default_text, range_text
from definitions.services import PREFIX, ServiceSetting, service_settings, variables
from definitions.settings import engine_settings, layer_attributes, model_attributes
from definitions.text import cell, with_region

_HEAD = """# Configuration

*Generated from `definitions/` by `make generate`; do not edit.*

A setting can be set in several places. Later places in this list override earlier ones:

1. the default
2. `config.ini` of the workspace (section `[llama]`)
3. `parameters` of the Triton model `engine`
4. the environment, also from a `.env` file in the working folder
5. an option of the command line

## The stack

Column "of" says who reads a setting: `charonia serve`, the gateway, or both. The gateway that `charonia serve` starts
gets its address, its ports and the model's name from it.

"""

_INFERENCE = """
## Inference parameters

| key | environment | default | values | meaning |
|---|---|---|---|---|
"""

_MODEL = """
## Attributes of the model

`charonia convert` writes them. Do not edit them.

| key | values | meaning |
|---|---|---|
"""

_LAYERS = """
## Attributes of a layer

`layers` in `manifest.json` has them for each layer. `charonia convert` writes them. Do not edit them.

| key | values | meaning |
|---|---|---|
"""

_GROUPS = {
    "device": "The engine reads these variables only from its environment. Most of them are for debugging.",
    "compose": "docker-compose.yml reads these variables, also from `.env`.",
    "script": "`service_docker_up.sh` reads these variables.",
    "quantize": "`charonia quantize` reads this variable, and CHARONIA_RUN_DIR.",
    "hub": "Commands that download models read these variables, and the others of huggingface_hub. "
    "docker-compose.yml does not pass them on; there HF_TOKEN_FILE names a file with the token.",
    "client": "`charonia benchmark` reads this variable.",
    "build": "`make` and the Dockerfiles read these variables.",
    "tests": "`make test`, `make test-all` and `.ci/run` read these variables. The last ones are for tests of "
    "the emulated CUDA device.",
}
_TITLES = {
    "device": "The engine's environment",
    "compose": "Docker compose",
    "script": "A workspace in a container",
    "quantize": "Quantising weights",
    "hub": "The Hugging Face hub",
    "client": "Clients",
    "build": "Building",
    "tests": "Tests",
}


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(columns)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _default(one: ServiceSetting) -> str:
    text = _shown(one.default) if one.default not in (None, "") else one.unset
    own = one.gateway_default
    return f"{text}; gateway: {own}" if own not in (None, "") else text


def _service(one: ServiceSetting) -> tuple[str, ...]:
    readers = ", ".join(reader for reader in one.of if reader != "processes")
    names = [name for name in one.gateway_names if name != one.name]
    more = f" (the gateway also reads {', '.join(f'`{name}`' for name in names)})" if names else ""
    return f"`{one.name}`", readers, cell(_default(one)), cell(one.range), cell(one.help) + more


def _variables(*groups: str) -> str:
    rows = [(f"`{one.name}`", cell(one.default), cell(one.help)) for one in variables() if one.group in groups]
    return _table(("variable", "default", "meaning"), rows)


def configuration() -> str:
    text = _HEAD + _table(("environment", "of", "default", "values", "meaning"), map(_service, service_settings()))
    text += _INFERENCE
    for one in engine_settings():
        default, allowed = default_text(one, "engine"), range_text(one, "engine")
        more = " (accepted, with a warning)" if one.ignored else ""
        name = f"`{PREFIX}{one.name.upper()}`"
        text += f"| `{one.name}` | {name} | {default} | {cell(allowed)} | {cell(one.help)}{more} |\n"
    text += _MODEL
    for one in model_attributes():
        text += f"| `{one.name}` | {cell(range_text(one, 'model'))} | {cell(one.help)} |\n"
    text += _LAYERS
    for one in layer_attributes():
        text += f"| `{one.name}` | {cell(one.range)} | {cell(one.help)} |\n"
    for group, title in _TITLES.items():
        text += f"\n## {title}\n\n{_GROUPS[group]}\n\n{_variables(group)}"
    return text


def testing() -> str:
    table = "\n" + _variables("tests", "build") + "\n"
    return with_region("docs/testing.md", "variables of tests", table)


FILES: dict[str, Callable[[], str]] = {
    "docs/configuration.md": configuration,
    "docs/testing.md": testing,
}
