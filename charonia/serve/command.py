"""The commands `charonia serve` and `charonia prepare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from charonia.api.engine import spell_settings
from charonia.api.options import with_engine_options
from charonia.settings import ServeSettings, env_name, inference_settings, read_settings

app = typer.Typer()


def _option(field: str, *names: str) -> typer.models.OptionInfo:
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
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face model folder, workspace folder or hub id (MODEL; default: the demo model)"),
    ] = None,
    model_name: Annotated[str | None, _option("model_name")] = None,
    host: Annotated[str | None, _option("host")] = None,
    triton_address: Annotated[str | None, _option("triton_address")] = None,
    http_inference: Annotated[bool | None, _option("http_inference", "--http-inference/--no-http-inference")] = None,
    http_port: Annotated[int | None, _option("http_port")] = None,
    grpc_port: Annotated[int | None, _option("grpc_port")] = None,
    metrics_port: Annotated[int | None, _option("metrics_port")] = None,
    gateway_port: Annotated[int | None, _option("gateway_port")] = None,
    run_dir: Annotated[Path | None, _option("run_dir")] = None,
    gateway: Annotated[bool | None, _option("gateway", "--gateway/--no-gateway")] = None,
    logs: Annotated[str | None, _option("logs")] = None,
    triton_dir: Annotated[Path | None, _option("triton_dir")] = None,
    text_instances: Annotated[int | None, _option("text_instances")] = None,
    start_timeout_s: Annotated[float | None, _option("start_timeout_s")] = None,
    max_restarts: Annotated[int | None, _option("max_restarts")] = None,
    hang_timeout_s: Annotated[float | None, _option("hang_timeout_s")] = None,
    tool_call_parser: Annotated[str | None, _option("tool_call_parser")] = None,
    reasoning_parser: Annotated[str | None, _option("reasoning_parser")] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Serve a model: Triton with its models, and the OpenAI-compatible gateway.

    Environment and `.env` set what no option does: the names above, and CHARONIA_<KEY> for the inference parameters.
    """
    from charonia.serve.launcher import serve
    from charonia.serve.logs import reported

    chosen = read_settings(
        model=model,
        model_name=model_name,
        host=host,
        triton_address=triton_address,
        http_inference=http_inference,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        gateway_port=gateway_port,
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


@app.command("prepare")
@with_engine_options(environment=False)
def prepare_command(
    model: Annotated[
        str | None,
        typer.Argument(help="Hugging Face model folder, workspace folder or hub id (MODEL; default: the demo model)"),
    ] = None,
    run_dir: Annotated[Path | None, _option("run_dir")] = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Do what `charonia serve` does before it starts anything: find or download the model, check the settings and make
    the workspace in the run folder where there is none yet. Prints the workspace.
    """
    from charonia.serve.model import prepare

    chosen = read_settings(model=model, run_dir=run_dir)
    print(
        prepare(
            chosen.model,
            chosen.run_dir.expanduser().absolute(),
            inference_settings(spell_settings(settings or {})),
            lambda text: typer.echo(text, err=True),
        )
    )
