"""Writes the dashboards' JSON, which is committed: Grafana reads it and needs no Python."""

from __future__ import annotations

from pathlib import Path

import typer

from monitoring.dashboards.catalogue import render

FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def main(folder: Path = FOLDER) -> None:
    """Writes every dashboard to FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
