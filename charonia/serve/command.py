"""The commands `charonia serve` and `charonia prepare`."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from charonia.api.options import with_engine_options, with_options
from charonia.engine_settings import spell_settings
from charonia.errors import InvalidRequestError
from charonia.settings import OF_ANSWERS, ServeSettings, env_name, inference_settings, read_settings

app = typer.Typer()
models_app = typer.Typer(no_args_is_help=True, help="Loads and unloads models of a running `charonia serve`.")


def setting_parameter(field: str) -> inspect.Parameter:
    """An option whose help, default and range are the setting's. Its value comes with the environment's, later."""
    info = ServeSettings.model_fields[field]
    default = "" if info.default in (None, "") else f"; default {info.default}"
    flag = f"--{field.replace('_', '-')}"
    types = get_args(info.annotation) or (info.annotation,)
    kind = next((one for one in (bool, int, float, Path) if one in types), str)
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
        help=f"{info.description} ({env_name(field)}{default})",
        rich_help_panel="Service",
    )
    optional: Any = kind | None
    annotation: Any = Annotated[optional, option]
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_setting_options(*fields: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options for these settings to a command, which receives the given ones as `given`."""
    return with_options([setting_parameter(field) for field in fields], "given")


@app.command("serve")
@with_engine_options(environment=False)  # inference_settings reads it, and .env
@with_setting_options(
    "model_name",
    "model_shares",
    "host",
    "triton_address",
    "http_inference",
    "http_port",
    "grpc_port",
    "metrics_port",
    "gateway_port",
    "gateway_workers",
    "run_dir",
    "gateway",
    "logs",
    "triton_dir",
    "text_instances",
    "start_timeout_s",
    "max_restarts",
    "hang_timeout_s",
    *OF_ANSWERS,
)
def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hugging Face model folder, workspace folder or hub id (MODEL; default: the demo model). Several are "
            "served together, each under its folder's name or as NAME=MODEL (MODEL and CHARONIA_MORE_MODELS)",
            metavar="[MODEL]...",
        ),
    ] = None,
    given: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Serve a model, or several: Triton with its models, and the OpenAI-compatible gateway.

    Environment and `.env` set what no option does: the names above, and CHARONIA_<KEY> for the inference parameters.
    """
    from charonia.serve.launcher import serve
    from charonia.serve.logs import reported

    os.umask(0o077)  # also of Triton and the gateway: their files and shared memory can hold prompts
    chosen = read_settings(**model_settings(models), **(given or {}))
    with reported(chosen.log_format):
        serve(chosen, spell_settings(settings or {}), exits=True)


def model_settings(given: list[str] | None) -> dict[str, str]:
    """The settings that the MODEL arguments of `charonia serve` and `charonia web` stand for."""
    if not given:
        return {}
    first, *more = given
    if found := [model for model in more if "," in model]:
        raise InvalidRequestError(
            f"{found[0]!r} has a comma, which only the first of several models may have: rename it"
        )
    # The models of the command replace all models of the environment.
    return {"model": first, "more_models": ",".join(more)}


@models_app.callback()
def _models_group() -> None:
    """Loads and unloads models of a `charonia serve` that runs on this machine, as the same user."""


Name = Annotated[str, typer.Argument(help="the model's name, as /v1/models has it")]
Loaded = Annotated[
    str,
    typer.Argument(
        help="the model's name, as /v1/models has it; NAME=MODEL adds a model: a folder, a workspace or a hub id"
    ),
]


_server = with_setting_options("run_dir", "grpc_port")  # which charonia serve


@models_app.command("list")
@_server
def list_models(
    given: dict[str, Any] | None = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints each model's name, state and ensemble in Triton; the first is the default one."""
    from charonia.tables import print_table

    found = _ask(given, do="list")
    if json_output:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    columns = ("model", "state", "ensemble")
    print_table(columns, [[model["name"], model["state"], model["ensemble"]] for model in found])


@models_app.command("load")
@_server
def load_model(name: Loaded, given: dict[str, Any] | None = None) -> None:
    """Loads a model that was unloaded, or adds a model, and returns when it is ready."""
    from charonia.serve.models import added

    new, location = added(name)
    print(_ask(given, do="load", name=f"{new}={location}" if new else name))


@models_app.command("unload")
@_server
def unload_model(name: Name, given: dict[str, Any] | None = None) -> None:
    """Unloads a model, which frees its memory. Requests that run come to their end, for drain_timeout_s at most."""
    print(_ask(given, do="unload", name=name))


def _ask(given: dict[str, Any] | None, **question: str) -> Any:
    from charonia.serve.control import ask

    settings = read_settings(**(given or {}))
    return ask(settings.run_dir.expanduser().absolute(), settings.grpc_port, **question)


@app.command("prepare")
@with_engine_options(environment=False)
@with_setting_options("run_dir")
def prepare_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="As of `charonia serve` (MODEL; default: the demo model)", metavar="[MODEL]..."),
    ] = None,
    given: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Do what `charonia serve` does before it starts anything: find or download the models, check the settings and make
    the workspaces in the run folder where there are none yet. Prints each workspace.
    """
    from charonia.serve.model import prepare
    from charonia.serve.models import asked_for

    chosen = read_settings(**model_settings(models), **(given or {}))
    for _, model in asked_for(chosen):
        print(
            prepare(
                model,
                chosen.run_dir.expanduser().absolute(),
                inference_settings(spell_settings(settings or {})),
                lambda text: typer.echo(text, err=True),
            )
        )
