"""`charonia keys`: the command of the package charonia-gateway."""

from __future__ import annotations

import sys

import typer

from charonia.errors import CharoniaError


def add_keys(app: typer.Typer) -> None:
    """Adds it; where the package is missing, a command that says so."""
    try:
        from charonia_gateway.keys_command import app as keys_app
    except ImportError:
        app.command("keys", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(_missing)
    else:
        app.add_typer(keys_app, name="keys")


def _missing() -> None:
    """Make, list and revoke the API keys of the gateway."""
    raise CharoniaError(
        f"package charonia-gateway is not installed, and keys are its: run {sys.executable} -m pip install "
        "charonia-gateway"
    )
