"""The commands `charonia web` and `charonia generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from charonia.api.options import with_engine_options
from charonia.engine_settings import spell_settings
from charonia.errors import InvalidRequestError
from charonia.serve.command import LoraOption, model_settings, with_adapters, with_setting_options
from charonia.settings import OF_ANSWERS, read_settings


@with_engine_options(environment=False)  # inference_settings reads the environment and .env
@with_setting_options("host", "gateway_port", "model_name", "model_shares", "run_dir", *OF_ANSWERS)
def web_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Hugging Face folder, workspace folder, GGUF file or hub id (MODEL; default: SmolLM2). "
            "With several models the page offers a choice; their names are the folder names, or NAME in NAME=MODEL "
            "(MODEL and CHARONIA_MORE_MODELS)",
            metavar="[MODEL]...",
        ),
    ] = None,
    triton: Annotated[
        str | None,
        typer.Option("--triton", help="Load no model: use the Triton server with this gRPC port.", metavar="HOST:PORT"),
    ] = None,
    more_models: Annotated[
        str | None,
        typer.Option(
            help="With --triton: further models of that server, separated by commas, as NAME, or as NAME=LABEL if "
            "their Triton models are called ensemble.LABEL and so on (CHARONIA_GATEWAY_MORE_MODELS)"
        ),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser of this machine.")] = False,
    lora: LoraOption = None,
    given: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Chat with one or more models in a browser. Starts the gateway with its page and REST API, with an engine in this
    process, or with --triton as a gateway of a Triton server elsewhere. Ctrl-C ends it immediately, unless
    --drain-timeout-s gives running responses time.

    The environment and `.env` set everything that no option sets: the variables above, the gateway's, and
    CHARONIA_<KEY> for inference parameters (docs/configuration.md).
    """
    from charonia.web.serve import serve_elsewhere, serve_engine

    given = given or {}
    chosen = read_settings(
        **model_settings(models),
        **given,
        # Ignore Triton settings in .env, which are for `charonia serve`.
        triton_address="127.0.0.1",
        http_inference=False,
        gateway=True,
    )
    if triton is None:
        if more_models is not None:
            raise InvalidRequestError(
                f"--more-models {more_models} requires --triton: otherwise list the models, charonia web A B"
            )
        serve_engine(chosen, with_adapters(spell_settings(settings or {}), lora), open_browser=open_browser)
        return
    of_model = ("model_shares", *OF_ANSWERS)
    of_engine = [name for name in (*given, *(settings or {})) if name in of_model or name not in given]
    if models or lora or of_engine:
        what = f"MODEL {models[0]}" if models else "--lora" if lora else f"--{of_engine[0].replace('_', '-')}"
        raise InvalidRequestError(f"{what} and --triton: the server has its own models and settings; remove one")
    serve_elsewhere(chosen, triton, more_models, open_browser=open_browser)


@with_engine_options(environment=False)  # inference_settings reads the environment and .env
@with_setting_options("run_dir", *OF_ANSWERS)
def generate_command(
    source: Annotated[
        Path,
        typer.Option(
            "--in",
            help="The requests, one JSON object per line: a body of /v1/chat/completions, /v1/completions or "
            "/v1/responses, or a line of OpenAI's batch files. `model` is ignored, except with lora_adapters",
            metavar="FILE",
        ),
    ],
    target: Annotated[
        Path,
        typer.Option("--out", help="The answers, in OpenAI's format of batches, as they end", metavar="FILE"),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Hugging Face folder, workspace folder, GGUF file or hub id (MODEL; default: SmolLM2)",
            metavar="[MODEL]",
        ),
    ] = None,
    given: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> None:
    """Answer all requests of a file with a model in this process. If the command is interrupted, the same command
    continues: it skips the requests that have an answer.

    See docs/python.md."""
    from charonia.web.generate import generate

    chosen = read_settings(
        **model_settings([model] if model else None),
        **(given or {}),
        triton_address="127.0.0.1",
        http_inference=False,
        gateway=True,
    )
    generate(chosen, spell_settings(settings or {}), source, target)
