"""The two kinds of panel. Each has a unit, and a line of advice that Grafana shows behind the (i) beside its title."""

from __future__ import annotations

from dataclasses import dataclass
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

# Grafana's names of units.
SECONDS = "s"
BYTES = "bytes"
RATIO = "percentunit"  # 0 to 1
PERCENT = "percent"  # 0 to 100
PER_SECOND = "ops"
REQUESTS_PER_SECOND = "reqps"
BYTES_PER_SECOND = "Bps"
CELSIUS = "celsius"
WATTS = "watt"
HERTZ = "hertz"
COUNT = "short"
TOKENS = "suffix: tokens"
TOKENS_PER_SECOND = "suffix: tokens/s"

_QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Query:
    """`legend` may name labels as {{label}}."""

    expr: str
    legend: str


def quantiles(histogram: str, matchers: str = "", quantiles: tuple[float, ...] = _QUANTILES) -> list[Query]:
    """Of a histogram over all that `matchers` picks: the quantiles of what was observed."""
    rate = f"sum by (le) (rate({histogram}_bucket{{{matchers}}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({q}, {rate})", f"p{q * 100:g}") for q in quantiles]


def mean(histogram: str, matchers: str, by: str) -> str:
    """Of a histogram: the mean of what was observed, for each value of the label `by`."""
    total, count = (
        f"sum by ({by}) (rate({histogram}_{part}{{{matchers}}}[$__rate_interval]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def graph(
    title: str,
    unit: str,
    advice: str,
    queries: list[Query],
    *,
    limit: float | None = None,
    top: float | None = None,
    stacked: bool = False,
) -> timeseries.Panel:
    """Lines over time. `limit` is drawn as a dashed line: from there on it is bad. `top` is the axis's upper end."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(advice)
        .unit(unit)
        .datasource(DATASOURCE)
        .min(0)
        .line_width(1)
        .fill_opacity(20 if stacked else 5)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.TABLE)
            .placement(common_models.LegendPlacement.BOTTOM)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for letter, query in zip(ascii_uppercase, queries, strict=False):
        panel.with_target(_target(query, letter).range())
    if top is not None:
        panel.max(top)
    if stacked:
        panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if limit is not None:
        panel.thresholds(_thresholds([(None, "transparent"), (limit, "red")]))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED))
    return panel


def figure(
    title: str, unit: str, advice: str, expr: str, *, colours: list[tuple[float | None, str]] | None = None
) -> stat.Panel:
    """One number, as of now. `colours`: from which value on it has which colour, the first from None on."""
    return (
        stat.Panel()
        .title(title)
        .description(advice)
        .unit(unit)
        .datasource(DATASOURCE)
        .color_mode(common_models.BigValueColorMode.BACKGROUND if colours else common_models.BigValueColorMode.NONE)
        .graph_mode(common_models.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(colours or [(None, "green")]))
        .with_target(_target(Query(expr, title), "A").range())
    )


def _target(query: Query, ref_id: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).datasource(DATASOURCE)


def _thresholds(steps: list[tuple[float | None, str]]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=colour) for value, colour in steps])
    )
