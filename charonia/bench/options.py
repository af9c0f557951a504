"""Options that several benchmarks have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from charonia.errors import InvalidRequestError


def writable(file: Path | None) -> Path | None:
    """A file that a command will write: refused before anything is measured where that cannot be."""
    if file is None:
        return None
    if file.is_dir():
        raise InvalidRequestError(f"{file} cannot be written: it is a folder")
    if not file.parent.is_dir():
        raise InvalidRequestError(f"{file} cannot be written: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"{file} cannot be written: {file.parent} may not be written to")
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Also write the figures here, a line of JSON each.", callback=writable),
]
