"""The commands `charonia serve` and `charonia prepare`."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from charonia.api.options import completes, with_engine_options, with_options
from charonia.engine_settings import spell_settings
from charonia.errors import InvalidRequestError
from charonia.settings import OF_ANSWERS, ServeSettings, env_name, inference_settings, read_settings

app = typer.Typer()
models_app = typer.Typer(no_args_is_help=True, help="Loads and unloads models of a running `charonia serve`.")


LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="A LoRA adapter of the first model: a folder of PEFT or a hub id. Requests with `model: NAME` use it. May "
        "be repeated",
        metavar="NAME=ADAPTER",
    ),
]


def with_adapters(settings: dict[str, str], adapters: list[str] | None) -> dict[str, str]:
    """Return the settings with the adapters of --lora. Raises CharoniaError."""
    if not adapters:
        return settings
    from charonia.weights.adapters import lora_setting

    given = [settings["lora_adapters"]] if settings.get("lora_adapters") else []
    return {**settings, "lora_adapters": ",".join([*given, lora_setting(adapters)])}


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
        autocompletion=completes([value for value in types if isinstance(value, str)]),
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
    "models_autoload",
    "models_idle_s",
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
            help="Hugging Face folder, workspace folder, GGUF file or hub id (MODEL; default: SmolLM2). "
            "Several are served together, each under its folder's name or as NAME=MODEL (MODEL and "
            "CHARONIA_MORE_MODELS)",
            metavar="[MODEL]...",
        ),
    ] = None,
    lora: LoraOption = None,
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
        exit_code = serve(chosen, with_adapters(spell_settings(settings or {}), lora), exits=True)
    raise typer.Exit(exit_code)


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
        help="the model's name, as /v1/models has it; NAME=MODEL adds a model: a folder, a workspace, a GGUF file or a "
        "hub id"
    ),
]


_server = with_setting_options("run_dir", "grpc_port")  # which charonia serve


@models_app.command("list")
@_server
def list_models(
    given: dict[str, Any] | None = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints each model's name, state and ensemble in Triton; the first is the default one. Then the LoRA adapters of
    the loaded models, with the model as parent."""
    from charonia.serve.adapters import of_models
    from charonia.tables import print_table

    found = _ask(given, do="list")
    found += of_models(read_settings(**(given or {})), found, lambda text: print(f"warning: {text}", file=sys.stderr))
    if json_output:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    columns = ("name", "state", "ensemble", "parent")
    print_table(columns, [[str(one.get(column, "")) for column in columns] for one in found])


@models_app.command("load")
@_server
def load_model(name: Loaded, given: dict[str, Any] | None = None) -> None:
    """Loads a model that was unloaded, or adds a model, and returns when it is ready."""
    from charonia.serve.models import added

    new, location = added(name)
    said, *warnings = _ask(given, do="load", name=f"{new}={location}" if new else name).splitlines()
    print(said)
    print(*warnings, sep="\n", end="\n" if warnings else "", file=sys.stderr)


@models_app.command("unload")
@_server
def unload_model(name: Name, given: dict[str, Any] | None = None) -> None:
    """Unloads a model, which frees its memory. Requests that run come to their end, for drain_timeout_s at most."""
    print(_ask(given, do="unload", name=name))


Model = Annotated[str | None, typer.Option(help="the adapter's model, as /v1/models has it [the first one]")]


@models_app.command("load-adapter")
@_server
def load_adapter(
    adapter: Annotated[str, typer.Argument(help="a folder of PEFT or a hub id", metavar="NAME=ADAPTER")],
    model: Model = None,
    given: dict[str, Any] | None = None,
) -> None:
    """Loads a LoRA adapter, which requests then use with `model: NAME`. Other requests go on."""
    from charonia.weights.adapters import locate_adapter, split_adapter

    name, place = split_adapter(adapter)
    _change_adapters(model, given, name, str(locate_adapter(place)))
    print(f"{name} is loaded")


@models_app.command("unload-adapter")
@_server
def unload_adapter(
    name: Annotated[str, typer.Argument(help="the adapter's name")],
    model: Model = None,
    given: dict[str, Any] | None = None,
) -> None:
    """Unloads a LoRA adapter. Requests that run end with it."""
    _change_adapters(model, given, name, "")
    print(f"{name} is unloaded")


def _change_adapters(model: str | None, given: dict[str, Any] | None, name: str, folder: str) -> None:
    from charonia.serve.adapters import change

    found = _ask(given, do="list")
    wanted = [one for one in found if model in (None, one["name"])]
    if not wanted:
        raise InvalidRequestError(
            f"there is no model {model!r}: this server has {', '.join(one['name'] for one in found)}"
        )
    if folder and name in (one["name"] for one in found):
        raise InvalidRequestError(f"a model is called {name!r}: choose another name for the adapter")
    change(read_settings(**(given or {})), wanted[0]["ensemble"], name, folder)


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
        typer.Argument(help="As of `charonia serve` (MODEL; default: SmolLM2)", metavar="[MODEL]..."),
    ] = None,
    given: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Do what `charonia serve` does before it starts anything: find or download the models, check the settings and make
    the workspaces in the run folder where there are none yet. Prints each workspace.
    """
    from charonia.serve.model import prepare, prepare_draft
    from charonia.serve.models import asked_for
    from charonia.weights.draft_model import MODEL, draft_of

    chosen = read_settings(**model_settings(models), **(given or {}))
    run_dir = chosen.run_dir.expanduser().absolute()
    inference = inference_settings(spell_settings(settings or {}))

    def say(text: str) -> None:
        typer.echo(text, err=True)

    for _, model in asked_for(chosen):
        print(prepare(model, run_dir, inference, say))
    if draft_of(inference):
        with ExitStack() as held:
            print(prepare_draft(inference, run_dir, say, held)[MODEL])
