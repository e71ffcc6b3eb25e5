"""An offline report as one HTML page without other files or network, or as Markdown.

The page has tables, and figures that plotly.js, which is part of the page, draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hytrain_fx.forecast.plots import Plot, plotly, plots
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.systems import OURS
from hytrain_fx.forecast.tables import headline, limits, placement, tables
from hytrain_fx.forecast.verdict import verdict
from hytrain_fx.ir.figures import Table

TEMPLATE = Path(__file__).with_name("templates") / "forecast.html"


def page(report: Report) -> str:
    """The page's text. Raises UnsupportedError where plotly is not installed."""
    from jinja2 import Environment, StrictUndefined

    drawing = plotly().offline.get_plotlyjs()
    figures = [Plot(plot.title, plot.json.replace("<", "\\u003c")) for plot in plots(report)]  # no text of it ends the script
    template = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(report=report, verdict=verdict(report), headline=headline(report), ours=OURS, plots=figures,
                           plotly_js=drawing, tables=list(tables(report)), limits=limits(report), placement=placement(report))


# ---- An offline report as Markdown ----


def markdown(report: Report) -> str:
    """The verdict, all tables, limits, and where each unit is updated."""
    found = "\n".join(f"- {line}" for line in verdict(report))
    parts = [f"# {report.model} on {report.machine}", found, headline(report), *map(section, tables(report)),
             "## Limits", *limits(report), f"## Placement, k = {report.plan.k}", "\n".join(f"- {line}" for line in placement(report))]
    return "\n\n".join(parts) + "\n"


def section(table: Table) -> str:
    """A table under its title, as Markdown."""
    lines = [f"## {table.title}", "", _line(table.heads), "|---" * len(table.heads) + "|", *map(_line, table.rows)]
    return "\n".join([*lines, *(f"\n{remark}" for remark in table.remarks)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
