"""`charonia keys`, a command of the package charonia-gateway."""

from __future__ import annotations

import sys

import typer

from charonia.errors import CharoniaError


def add_keys(app: typer.Typer) -> None:
    """Add the command; if the package is missing, add one that reports this."""
    try:
        from charonia_gateway.keys_command import app as keys_app
    except ImportError:
        app.command("keys", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_missing)
    else:
        app.add_typer(keys_app, name="keys")


def _missing() -> None:
    """Create, list and revoke the API keys of the gateway."""
    raise CharoniaError(
        f"API keys need the package charonia-gateway, which is not installed: run {sys.executable} -m pip install "
        "charonia-gateway"
    )
