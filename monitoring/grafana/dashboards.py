"""Write the dashboards as the JSON that Grafana reads, from the TOML files in the folder dashboards.

    python monitoring/grafana/dashboards.py FOLDER

A file has a title, a description, `variables` (label values to choose from) and rows of panels. A panel has
- `title`, `unit` (Grafana's name of it) and `advice`, which Grafana shows behind the (i) beside the title;
- type "stat", one number: `query`, and `yellow` and `red`, the lowest values with that colour; or
- lines over time: `queries`, with legends that may name labels as {{label}}; `histogram`, whose quantiles are drawn
  for each model; `limit`, a dashed line that is also the limit of an alert; `max` of the axis; `stacked`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from string import ascii_uppercase
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_GRID = 24  # columns
_STAT_HEIGHT, _GRAPH_HEIGHT = 4, 8
_MOST_GRAPHS = 3  # side by side

Json = dict[str, Any]


def render() -> dict[str, Json]:
    """Every dashboard by its name."""
    files = sorted((Path(__file__).parent / "dashboards").glob("*.toml"))
    return {file.stem: _dashboard(file.stem, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files}


def _dashboard(name: str, spec: Json) -> Json:
    source = {
        "current": {"selected": True, "text": "Prometheus", "value": "prometheus"},
        "label": "Data source",
        "name": "datasource",
        "query": "prometheus",
        "type": "datasource",
    }
    alerts = 'ALERTS{alertname=~"Charonia.*",alertstate="firing"}'
    return {
        "annotations": {
            "list": [{"name": "Alerts", "datasource": _SOURCE, "enable": True, "expr": alerts, "iconColor": "red"}]
        },
        "description": spec["description"],
        "editable": False,
        "graphTooltip": 1,  # a crosshair in all panels
        "links": [{"title": "Charonia", "type": "dashboards", "tags": ["charonia"], "keepTime": True}],
        "panels": _placed(spec["rows"]),
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["charonia"],
        "templating": {"list": [source, *(_variable(**variable) for variable in spec.get("variables", ()))]},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "title": spec["title"],
        "uid": f"charonia-{name}",
    }


def _variable(name: str, label: str, metric: str) -> Json:
    """A choice of some or all values of the label `name` of a metric."""
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _SOURCE,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "query": {"query": f"label_values({metric}, {name})", "refId": "StandardVariableQuery"},
        "refresh": 2,  # when the time range changes
        "sort": 1,  # alphabetically
        "type": "query",
    }


def _placed(rows: list[Json]) -> list[Json]:
    """All panels with their numbers and places. A row has only stats or only graphs."""
    result: list[Json] = []
    y = 0
    for row in rows:
        panels = row["panels"]
        result.append({"type": "row", "title": row["title"], "collapsed": False, "panels": []})
        result[-1]["gridPos"] = {"h": 1, "w": _GRID, "x": 0, "y": y}
        stats = panels[0].get("type") == "stat"
        beside = len(panels) if stats else _columns(len(panels))
        width, height = _GRID // beside, _STAT_HEIGHT if stats else _GRAPH_HEIGHT
        for index, panel in enumerate(panels):
            line, column = divmod(index, beside)
            place = {"h": height, "w": width, "x": column * width, "y": y + 1 + line * height}
            result.append({**(_stat if stats else _graph)(panel), "gridPos": place})
        y += 1 + -(-len(panels) // beside) * height
    return [{**panel, "id": number} for number, panel in enumerate(result, 1)]


def _columns(graphs: int) -> int:
    """How many graphs stand side by side, so that the last line has few gaps."""
    return next((columns for columns in (_MOST_GRAPHS, 2) if graphs % columns == 0), min(graphs, _MOST_GRAPHS))


def _panel(spec: Json, kind: str, queries: list[tuple[str, str]], defaults: Json, options: Json) -> Json:
    targets = [
        {"datasource": _SOURCE, "expr": query, "legendFormat": legend, "instant": False, "range": True, "refId": letter}
        for letter, (legend, query) in zip(ascii_uppercase, queries, strict=False)
    ]
    return {
        "datasource": _SOURCE,
        "description": spec["advice"],
        "fieldConfig": {"defaults": {"unit": spec["unit"], **defaults}, "overrides": []},
        "options": options,
        "targets": targets,
        "title": spec["title"],
        "type": kind,
    }


def _stat(spec: Json) -> Json:
    colours = [(colour, spec[colour]) for colour in ("yellow", "red") if colour in spec]
    options = {
        "colorMode": "background" if colours else "none",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"]},
    }
    queries = [(spec["title"], spec["query"])]
    return _panel(spec, "stat", queries, {"thresholds": _thresholds(("green", None), *colours)}, options)


def _graph(spec: Json) -> Json:
    queries = [
        (
            f"{{{{model}}}}: p{quantile * 100:g}",
            f"histogram_quantile({quantile}, sum by (model, le) "
            f'(rate({spec["histogram"]}_bucket{{instance=~"$instance",model=~"$model"}}[$__rate_interval])))',
        )
        for quantile in (spec.get("quantiles", (0.5, 0.95, 0.99)) if "histogram" in spec else ())
    ]
    queries += [(query["legend"], query["query"]) for query in spec.get("queries", ())]
    stacked = spec.get("stacked", False)
    custom: Json = {"fillOpacity": 20 if stacked else 5, "lineWidth": 1, "showPoints": "never"}
    defaults: Json = {"custom": custom, "min": 0}
    if "max" in spec:
        defaults["max"] = spec["max"]
    if stacked:
        custom["stacking"] = {"mode": "normal"}
    if "limit" in spec:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds(("transparent", None), ("red", spec["limit"]))
    options = {
        "legend": {"calcs": ["lastNotNull", "max"], "displayMode": "table", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel(spec, "timeseries", queries, defaults, options)


def _thresholds(*steps: tuple[str, float | None]) -> Json:
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for colour, value in steps]}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, dashboard in render().items():
        (folder / f"{name}.json").write_text(json.dumps(dashboard, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python monitoring/grafana/dashboards.py FOLDER")
    main(Path(sys.argv[1]))
