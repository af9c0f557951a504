"""The models that settings name, ready to be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from charonia import _engine
from charonia.serve import shares
from charonia.serve.model import prepare
from charonia.serve.models import Served, asked_for, with_labels
from charonia.settings import ServeSettings
from charonia.weights.workspace import WEIGHTS


def prepare_all(
    settings: ServeSettings,
    run_dir: Path,
    inference: Mapping[str, str],
    say: Callable[[str], None],
    held: ExitStack,
) -> list[Served]:
    """The models to serve, in the order of the settings, with their workspaces, which count as served until `held` is
    closed. Of several each has its share of the memory. Raises CharoniaError for what is not there or not supported,
    and for models that do not fit."""
    found = []
    for name, model in asked_for(settings):
        workspace = prepare(model, run_dir, inference, say, held)
        found.append((name or model_name(workspace), workspace))
    given = shares.parse_shares(settings.model_shares, len(found))
    served = with_labels(found)
    return shares.divide(served, inference, given) if len(served) > 1 else served


def model_name(workspace: Path) -> str:
    """The name that config.ini gives the model."""
    config = workspace / WEIGHTS / "config.ini"
    return str(_engine.read_config_ini(config).get("model_name") or workspace.name)
