"""Options that several benchmarks have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures here, a line of JSON each.")]
