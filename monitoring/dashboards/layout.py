"""A dashboard from rows of panels: numbers its panels, places them, and adds what all dashboards have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.models import dashboard as models

from monitoring.dashboards.panels import DATASOURCE

TAG = "charonia"
_GRID = 24  # columns
_FIGURE_HEIGHT, _GRAPH_HEIGHT = 4, 8
_MOST_GRAPHS = 3  # beside each other

Panel = timeseries.Panel | stat.Panel


def label_variable(name: str, title: str, metric: str, label: str) -> builders.QueryVariable:
    """A choice of some or all values of a label."""
    return (
        builders.QueryVariable(name)
        .label(title)
        .datasource(DATASOURCE)
        .query({"query": f"label_values({metric}, {label})", "refId": "StandardVariableQuery"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Mapping[str, Sequence[Panel]],
    variables: Sequence[builders.QueryVariable] = (),
) -> builders.Dashboard:
    """`rows`: panels under the title of their row."""
    board = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .readonly()
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            builders.DatasourceVariable("datasource")
            .label("Data source")
            .type("prometheus")
            .current(models.VariableOption(selected=True, text="Prometheus", value="prometheus"))
        )
        .link(builders.DashboardLink("Charonia").type(models.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True))
        .annotation(
            builders.AnnotationQuery()
            .name("Alerts")
            .datasource(DATASOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Charonia.*",alertstate="firing"}')
        )
    )
    for variable in variables:
        board.with_variable(variable)
    _place(board, rows)
    return board


def _place(board: builders.Dashboard, rows: Mapping[str, Sequence[Panel]]) -> None:
    number, y = 1, 0
    for title, panels in rows.items():
        board.with_row(builders.Row(title).id(number).grid_pos(models.GridPos(h=1, w=_GRID, x=0, y=y)))
        number, y = number + 1, y + 1
        figures = all(isinstance(panel, stat.Panel) for panel in panels)
        beside = len(panels) if figures else _columns(len(panels))
        height = _FIGURE_HEIGHT if figures else _GRAPH_HEIGHT
        width = _GRID // beside
        for index, panel in enumerate(panels):
            position = models.GridPos(h=height, w=width, x=index % beside * width, y=y + index // beside * height)
            board.with_panel(panel.id(number).grid_pos(position))
            number += 1
        y += -(-len(panels) // beside) * height


def _columns(graphs: int) -> int:
    """So many graphs beside each other that the last line of them is as full as can be."""
    return next((columns for columns in (_MOST_GRAPHS, 2) if graphs % columns == 0), min(graphs, _MOST_GRAPHS))
