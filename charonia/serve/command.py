"""The commands `charonia serve` and `charonia prepare`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from charonia.api.options import with_engine_options
from charonia.engine_settings import spell_settings
from charonia.errors import InvalidRequestError
from charonia.settings import ServeSettings, env_name, inference_settings, read_settings

app = typer.Typer()
models_app = typer.Typer(no_args_is_help=True, help="Loads and unloads models of a running `charonia serve`.")


def setting_option(field: str, *names: str) -> typer.models.OptionInfo:
    """An option whose help, default and range are the setting's. Its value comes with the environment's, later."""
    info = ServeSettings.model_fields[field]
    default = "" if info.default is None else f"; default {info.default}"
    option: typer.models.OptionInfo = typer.Option(
        *(names or (f"--{field.replace('_', '-')}",)), help=f"{info.description} ({env_name(field)}{default})"
    )
    return option


@app.command("serve")
@with_engine_options(environment=False)  # inference_settings reads it, and .env
def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hugging Face model folder, workspace folder or hub id (MODEL; default: the demo model). Several are "
            "served together, each under its folder's name or as NAME=MODEL (MODEL and CHARONIA_MORE_MODELS)",
            metavar="[MODEL]...",
        ),
    ] = None,
    model_name: Annotated[str | None, setting_option("model_name")] = None,
    model_shares: Annotated[str | None, setting_option("model_shares")] = None,
    host: Annotated[str | None, setting_option("host")] = None,
    triton_address: Annotated[str | None, setting_option("triton_address")] = None,
    http_inference: Annotated[
        bool | None, setting_option("http_inference", "--http-inference/--no-http-inference")
    ] = None,
    http_port: Annotated[int | None, setting_option("http_port")] = None,
    grpc_port: Annotated[int | None, setting_option("grpc_port")] = None,
    metrics_port: Annotated[int | None, setting_option("metrics_port")] = None,
    gateway_port: Annotated[int | None, setting_option("gateway_port")] = None,
    gateway_workers: Annotated[int | None, setting_option("gateway_workers")] = None,
    run_dir: Annotated[Path | None, setting_option("run_dir")] = None,
    gateway: Annotated[bool | None, setting_option("gateway", "--gateway/--no-gateway")] = None,
    logs: Annotated[str | None, setting_option("logs")] = None,
    triton_dir: Annotated[Path | None, setting_option("triton_dir")] = None,
    text_instances: Annotated[int | None, setting_option("text_instances")] = None,
    start_timeout_s: Annotated[float | None, setting_option("start_timeout_s")] = None,
    max_restarts: Annotated[int | None, setting_option("max_restarts")] = None,
    hang_timeout_s: Annotated[float | None, setting_option("hang_timeout_s")] = None,
    tool_call_parser: Annotated[str | None, setting_option("tool_call_parser")] = None,
    reasoning_parser: Annotated[str | None, setting_option("reasoning_parser")] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Serve a model, or several: Triton with its models, and the OpenAI-compatible gateway.

    Environment and `.env` set what no option does: the names above, and CHARONIA_<KEY> for the inference parameters.
    """
    from charonia.serve.launcher import serve
    from charonia.serve.logs import reported

    os.umask(0o077)  # also of Triton and the gateway: their files and shared memory can hold prompts
    chosen = read_settings(
        **model_settings(models),
        model_name=model_name,
        model_shares=model_shares,
        host=host,
        triton_address=triton_address,
        http_inference=http_inference,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        gateway_port=gateway_port,
        gateway_workers=gateway_workers,
        run_dir=run_dir,
        gateway=gateway,
        logs=logs,
        triton_dir=triton_dir,
        text_instances=text_instances,
        start_timeout_s=start_timeout_s,
        max_restarts=max_restarts,
        hang_timeout_s=hang_timeout_s,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
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


RunDir = Annotated[Path | None, setting_option("run_dir")]
GrpcPort = Annotated[int | None, setting_option("grpc_port")]
Name = Annotated[str, typer.Argument(help="the model's name, as /v1/models has it")]


@models_app.command("list")
def list_models(
    run_dir: RunDir = None,
    grpc_port: GrpcPort = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prints each model's name, state and ensemble in Triton; the first is the default one."""
    from charonia.tables import print_table

    found = _ask(run_dir, grpc_port, do="list")
    if json_output:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    columns = ("model", "state", "ensemble")
    print_table(columns, [[model["name"], model["state"], model["ensemble"]] for model in found])


@models_app.command("load")
def load_model(name: Name, run_dir: RunDir = None, grpc_port: GrpcPort = None) -> None:
    """Loads a model that was unloaded, and returns when it is ready."""
    print(_ask(run_dir, grpc_port, do="load", name=name))


@models_app.command("unload")
def unload_model(name: Name, run_dir: RunDir = None, grpc_port: GrpcPort = None) -> None:
    """Unloads a model, which frees its memory. Requests that run come to their end, for drain_timeout_s at most."""
    print(_ask(run_dir, grpc_port, do="unload", name=name))


def _ask(run_dir: Path | None, grpc_port: int | None, **question: str) -> Any:
    from charonia.serve.control import ask

    settings = read_settings(run_dir=run_dir, grpc_port=grpc_port)
    return ask(settings.run_dir.expanduser().absolute(), settings.grpc_port, **question)


@app.command("prepare")
@with_engine_options(environment=False)
def prepare_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="As of `charonia serve` (MODEL; default: the demo model)", metavar="[MODEL]..."),
    ] = None,
    run_dir: Annotated[Path | None, setting_option("run_dir")] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Do what `charonia serve` does before it starts anything: find or download the models, check the settings and make
    the workspaces in the run folder where there are none yet. Prints each workspace.
    """
    from charonia.serve.model import prepare
    from charonia.serve.models import asked_for

    chosen = read_settings(**model_settings(models), run_dir=run_dir)
    for _, model in asked_for(chosen):
        print(
            prepare(
                model,
                chosen.run_dir.expanduser().absolute(),
                inference_settings(spell_settings(settings or {})),
                lambda text: typer.echo(text, err=True),
            )
        )
