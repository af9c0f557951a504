"""The command `charonia keys`, which creates, lists and revokes API keys (docs/security.md). Its name is
`charonia_gateway_keys` if only the gateway is installed, as in its image."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from charonia_gateway.keys import Key

app = typer.Typer(
    help="Make, list and revoke the API keys of the gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_WIDTH = 80
_NO_BREAK = "\N{NO-BREAK SPACE}"

FileOption = Annotated[
    Path,
    typer.Option(envvar="CHARONIA_GATEWAY_KEYS_FILE", dir_okay=False, help="The file of keys that the gateway reads."),
]
_COUNT = {"min": 1, "max": 2**31 - 1}


class _ArgumentError(Exception):
    """An argument is wrong."""


@contextlib.contextmanager
def _explained() -> Iterator[Any]:
    """Yield the module of keys, which loads slowly. Print an error as one line, and exit with code 1."""
    from charonia_gateway import keys

    try:
        yield keys
    except (_ArgumentError, keys.KeysError) as error:
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(error, err=True)
        raise typer.Exit(1) from None


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="The key's name in logs and metrics: a user, a team or a program.")],
    file: FileOption,
    expires: Annotated[
        str | None, typer.Option(help="12h, 30d or 8w from now, or a date: 2030-01-31. Default: never.")
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the key may use; can be repeated. Default: all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(**_COUNT)] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompts and responses together.", **_COUNT)
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Concurrent sequences.", **_COUNT)] = None,
    priority: Annotated[
        int | None, typer.Option(help="Default and maximum priority of its requests; higher goes first.")
    ] = None,
    access: Annotated[
        list[str] | None,
        typer.Option(
            help="inference, metrics (GET /metrics, for Prometheus) or admin (load and unload models); can be "
            "repeated. Default: inference."
        ),
    ] = None,
) -> None:
    """Create a key, add it to the file and print it. It is shown only once: the file has only its SHA-256.

    The name of a revoked key may be used again: the new key replaces the old one."""
    from pydantic import ValidationError

    with _explained() as keys:
        try:
            expiry = keys.parse_expiry(expires) if expires is not None else None
        except ValueError as error:
            raise _ArgumentError(f"--expires: {error}") from None
        text, id = keys.new_key()
        try:
            made = keys.Key(
                id=id,
                name=name,
                sha256=keys.hash_of(text),
                created=_now(),
                expires=expiry,
                access=tuple(access) if access else ("inference",),
                models=tuple(model) if model else None,
                requests_per_minute=requests_per_minute,
                tokens_per_minute=tokens_per_minute,
                max_concurrent=max_concurrent,
                priority=priority,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise _ArgumentError(f"{first['loc'][0]} = {first['input']!r}: {first['msg']}") from None
        with keys.changing(file) as held:
            if any(key.name == name and not key.revoked for key in held.keys):
                raise _ArgumentError(f"{file} has a key {name!r} already: revoke it first, or choose another name")
            held.keys = [*(key for key in held.keys if key.name != name), made]
    print(text)
    print(f"The key {name!r} is in {file}. It is not shown again.", file=sys.stderr)


@app.command("list")
def show(
    file: FileOption,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the keys of the file: names, limits, and whether they are valid. The file does not contain the keys
    themselves."""
    with _explained() as keys:
        held = keys.read_keys(file)
    if json_output:
        print(held.model_dump_json(indent=2, exclude={"keys": {"__all__": {"sha256"}}}))
        return
    heads = [("name", "id", "state", "expires")]
    heads += [(key.name, key.id, _state(key), _expiry(key)) for key in held.keys]
    widths = [max(map(len, column)) for column in zip(*heads, strict=True)]
    for place, cells in enumerate(heads):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        if place:
            for line in textwrap.wrap(_details(held.keys[place - 1]), _WIDTH - 2, break_long_words=False):
                print(f"  {line}".replace(_NO_BREAK, " "))


def _state(key: Key) -> str:
    problem = key.why_not_valid(_now())
    return problem.removeprefix("was ").removeprefix("has ") if problem else "valid"


def _expiry(key: Key) -> str:
    return f"{key.expires:%Y-%m-%d %H:%M}" if key.expires else "never"


def _details(key: Key) -> str:
    """The key's permissions and limits."""
    words = [f"access: {', '.join(key.access)}", f"models: {', '.join(key.models) if key.models else 'all'}"]
    for limit, name in (
        (key.requests_per_minute, "requests/min"),
        (key.tokens_per_minute, "tokens/min"),
        (key.max_concurrent, "at once"),
    ):
        if limit is not None:
            words.append(f"{limit} {name}".replace(" ", _NO_BREAK))
    if key.priority is not None:
        words.append(f"priority{_NO_BREAK}{key.priority}")
    return "; ".join(words)


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="The key's name or id.")], file: FileOption) -> None:
    """Revoke a key. Gateways that read the file reject it after at most a second. Running requests continue."""
    with _explained() as keys:
        if not file.exists():
            raise _ArgumentError(f"{file} does not exist: it is created with the first key")
        with keys.changing(file) as held:
            found = [key for key in held.keys if name in (key.name, key.id)]
            if not found:
                raise _ArgumentError(f"{file} has no key {name!r}: charonia keys list --file {file} shows them")
            if found[0].revoked:
                raise _ArgumentError(f"the key {name!r} was revoked at {found[0].revoked:%Y-%m-%d %H:%M}")
            revoked = found[0].model_copy(update={"revoked": _now()})
            held.keys = [revoked if key is found[0] else key for key in held.keys]
    print(f"The key {found[0].name!r} is revoked.", file=sys.stderr)


def _now() -> datetime:
    return datetime.now(timezone.utc)


def main() -> None:
    """Entry point of charonia_gateway_keys."""
    app(prog_name="charonia_gateway_keys")
