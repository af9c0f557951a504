"""The sources of the Triton models: preprocessing/*.py, postprocessing/*.py, model_repository/*/config.pbtxt, and the
package charonia_answers, which client/ has.

A checkout has them at its root, an installed package in this folder.
"""

from __future__ import annotations

from pathlib import Path

from charonia.errors import ModelError


def source_dir() -> Path:
    """The folder that holds preprocessing, postprocessing and model_repository."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent.parent, package):
        if (folder / "model_repository" / "ensemble" / "config.pbtxt").is_file():
            return folder
    raise ModelError(f"the Triton models are missing from {package}: install charonia again")


def answers_dir() -> Path:
    """The folder of the package charonia_answers."""
    found = source_dir()
    return next(
        folder / "charonia_answers" for folder in (found / "client", found) if (folder / "charonia_answers").is_dir()
    )
