"""`triton_client HOST:PORT`: chat with the model that a Triton server serves, in the terminal."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from charonia_client.chat import Chat
from charonia_client.client import Client
from charonia_client.errors import Unavailable
from charonia_client.terminal import make_reader
from charonia_client.tls import Tls
from charonia_client.tools import Tools

DEFAULT_PORT = 33337


_SCHEME = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://[^/]*/", re.IGNORECASE)  # with the authority


def _target(text: str) -> str:
    """Convert HOST, HOST:PORT, [IPv6] or [IPv6]:PORT to gRPC's format. HOST may have a scheme of gRPC: dns:///HOST."""
    address = text[match.end() :] if (match := _SCHEME.match(text)) else text
    host, colon, port = address.rpartition(":")
    if "/" not in address and (not colon or address.endswith("]")):
        return f"{text}:{DEFAULT_PORT}"
    if "/" in address or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT, for example localhost:{DEFAULT_PORT}")
    return text


_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+")  # as `charonia serve` makes labels


async def _ensemble_of(client: Client, name: str) -> str:
    """The ensemble with this name, or of the model that `charonia serve` calls so. Raises Unavailable."""
    labelled = f"ensemble.{_NO_LABEL.sub('_', name).strip('._-')[:60]}"
    if await client.model_ready(name):
        return name
    if not await client.model_ready(labelled):
        raise Unavailable(
            f"the Triton server at {client.target} has no model {name!r} that is ready: leave --model out for its "
            "first model; on the server, charonia models list shows the others. A LoRA adapter is named with --lora"
        )
    if await client.model_ready(f"{labelled}-2"):
        raise Unavailable(
            f"the Triton server at {client.target} has several models whose names are like {name!r}: give --model the "
            "name of the ensemble; on the server, charonia models list shows it"
        )
    return labelled


async def _chat(
    target: str,
    model: str,
    system: str | None,
    sampling: dict[str, int | float],
    enter_sends: bool,
    tools: Tools,
    lora: str | None,
    secure: Tls | None,
) -> int:
    async with Client(target, tls=secure) as client:
        if not await client.server_live():
            typer.echo(
                f"No Triton server answers at {target}. Is it started (make serve), and is that its gRPC port?"
                + (" Does its certificate match --tls-ca and --tls-name?" if secure else ""),
                err=True,
            )
            return 1
        try:
            ensemble = await _ensemble_of(client, model)
        except Unavailable as error:
            typer.echo(f"error: {error}", err=True)
            return 1
    async with Client(target, model=ensemble, tls=secure) as client:
        try:
            reader = make_reader(enter_sends)
            return await Chat(client, reader, system=system, sampling=sampling, tools=tools, lora=lora).run()
        except Unavailable as error:
            typer.echo(f"error: {error}", err=True)
            return 1


def _tools_of(file: Path | None) -> Tools:
    """Load the public functions that a file defines."""
    if file is None:
        return Tools(())
    if file.suffix != ".py":
        raise typer.BadParameter(f"{file} is not a Python file: the name must end with .py")
    try:
        spec = importlib.util.spec_from_file_location("chat_tools", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        functions = [
            value
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == spec.name and not name.startswith("_")
        ]
        tools = Tools(functions)
    except Exception as error:
        raise typer.BadParameter(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    if not functions:
        raise typer.BadParameter(f"{file} defines no function")
    return tools


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("charonia-client"))
        raise typer.Exit


def _adapter(name: str | None) -> str | None:
    if name == "":  # the server would take it as no adapter
        raise typer.BadParameter("the adapter has no name: name one, or leave the option out")
    return name


def _pem(help: str) -> Any:
    return typer.Option(exists=True, dir_okay=False, help=f"PEM file: {help}")


app = typer.Typer()


@app.command()
def chat(
    server: Annotated[
        str, typer.Argument(metavar="HOST:PORT", callback=_target, help="gRPC address of the Triton server")
    ] = f"localhost:{DEFAULT_PORT}",
    system: Annotated[str | None, typer.Option(help="system message at the start of the conversation")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="maximum tokens of a response (default: the rest of the context)")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy (default: the server's)")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="nucleus")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="top tokens to choose from, 0 for all")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(min=0.01, help="values above 1 reduce repetition")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="makes answers repeatable")] = None,
    enter_sends: Annotated[bool, typer.Option("--enter-sends", help="send with one Enter instead of two")] = False,
    model: Annotated[str, typer.Option(help="model on the server: its name or its ensemble")] = "ensemble",
    lora: Annotated[
        str | None, typer.Option(help="LoRA adapter of this model, by its name", metavar="NAME", callback=_adapter)
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="a Python file whose functions the model may call; they run on this machine without confirmation",
        ),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="the server's port uses TLS; implied by the next four options")
    ] = False,
    tls_ca: Annotated[Path | None, _pem("CA certificates for the server's certificate (default: public CAs)")] = None,
    tls_cert: Annotated[Path | None, _pem("this client's certificate, if the server requires one")] = None,
    tls_key: Annotated[Path | None, _pem("its private key")] = None,
    tls_name: Annotated[
        str | None, typer.Option(help="name in the server's certificate, if it is not the host of HOST:PORT")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Chat with the model of a Triton server. Two Enters send, `/help` lists commands, `exit` leaves, Ctrl-C
    interrupts a response."""
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    try:
        secure = Tls(tls_ca, tls_cert, tls_key, tls_name) if tls or tls_ca or tls_cert or tls_key or tls_name else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sampling = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(asyncio.run(_chat(server, model, system, sampling, enter_sends, _tools_of(tools), lora, secure)))


def main() -> None:
    app()
