"""Creates command-line options from the engine's configuration table, so that each key is defined once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from charonia import _engine

ModelArgument = Annotated[
    str, typer.Argument(help="A workspace, a Hugging Face folder, a GGUF file or a hub id.", metavar="MODEL")
]


def _dtypes() -> list[str]:
    from charonia.weights.checkpoint import WEIGHT_TYPES

    return ["auto", *WEIGHT_TYPES]


DtypeOption = Annotated[
    str,
    typer.Option(
        autocompletion=_dtypes,
        help="Type of the weights, or of the unquantised part of a quantised model: auto (own type), bf16, fp16, fp32.",
    ),
]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="CHARONIA_API_KEY", show_envvar=True, help="API key of the gateway.")
]
TlsCaOption = Annotated[
    Path | None, typer.Option(help="PEM file: the authorities of the gateway's certificate [public ones].")
]
_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "string": str}
_SHORT = {"tensor_para_size": "--tp"}
# The first key of each group of inference parameters, in the order of config.ini.
_GROUPS = {
    "tensor_para_size": "Model and KV cache",
    "device": "Device",
    "token_budget": "Scheduling and limits",
    "session_ttl_s": "Sessions",
    "stream_interval_ms": "Streams",
}


def completes(values: Sequence[str]) -> Callable[[], list[str]] | None:
    """Return the completion by the shell of an option with these values; None if there are none. The command line takes
    other values too: the engine and the settings check them, with the remedy."""
    return (lambda: list(values)) if values else None


class GroupedCommand(TyperCommand):
    """A command whose help has the options in groups: `rich_help_panel` of each option, in the order of the groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                group = getattr(parameter, "rich_help_panel", None) or default
                groups.setdefault(group, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def with_options(added: Sequence[inspect.Parameter], into: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options to a command. The command receives those that are given as a dictionary, its argument `into`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in added}
            command(**given, **{into: {name: value for name, value in values.items() if value is not None}})

        # Keyword-only, so that the order of parameters with and without defaults does not matter.
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own if one.name != into] + [*added]
        signature: Any = run
        signature.__signature__ = inspect.Signature(parameters)
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def with_engine_options(*, environment: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for every inference parameter to a command. The command receives the given ones as `settings`.

    environment: whether CHARONIA_<KEY> counts as given.
    """
    fields = [entry for entry in _engine.config_fields() if not entry.model_attribute and not entry.ignored]
    made: list[inspect.Parameter] = []
    group = ""
    for entry in fields:
        group = _GROUPS.get(entry.key, group)
        made.append(_parameter(entry, group, environment))
    return with_options(made, "settings")


def _integer_or_text(value: str | None) -> int | str | None:
    return int(value) if value and value.isdecimal() else value


def _parameter(entry: _engine.ConfigField, group: str, environment: bool) -> inspect.Parameter:
    flag = "--" + entry.key.replace("_", "-")
    choices = entry.range.split(" | ") if " | " in entry.range and entry.kind != "bool" else []
    # Without Typer's range checks: the engine checks ranges. Its error about an integer with a list of values has their
    # meaning, so text that is no integer is passed to it.
    listed = choices and entry.kind == "int"
    kind = "string" if choices else entry.kind
    default = f"; default {entry.default_value}" if entry.default_value else ""
    option = typer.Option(
        *([f"{flag}/--no-{flag[2:]}"] if entry.kind == "bool" else [flag]),
        *([_SHORT[entry.key]] if entry.key in _SHORT else []),
        help=f"{entry.help} ({entry.range}{default})",
        autocompletion=completes(choices),
        callback=_integer_or_text if listed else None,
        metavar="<int>" if listed else None,
        envvar=f"CHARONIA_{entry.key.upper()}" if environment else None,
        show_default=False,
        rich_help_panel=group,
    )
    optional: Any = _TYPES[kind] | None
    annotation: Any = Annotated[optional, option]
    return inspect.Parameter(entry.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
