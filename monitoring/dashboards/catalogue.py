"""All dashboards, as the files that Grafana reads."""

from __future__ import annotations

import json

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.dashboards import engine, gpu, overview, triton


def render() -> dict[str, str]:
    """The JSON of every dashboard by its file's name."""
    boards = {"overview": overview, "engine": engine, "triton": triton, "gpu": gpu}
    return {
        f"{name}.json": json.dumps(board.board().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, board in boards.items()
    }
