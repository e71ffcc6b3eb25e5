"""An offline report as one HTML page without other files or network, or as Markdown.

The page has tables, and plots as SVG.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hytrain_fx.errors import UnsupportedError
from hytrain_fx.forecast.plots import plots
from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.systems import OURS
from hytrain_fx.forecast.tables import headline, limits, placement, tables
from hytrain_fx.forecast.verdict import verdict
from hytrain_fx.ir.figures import Table

TEMPLATE = Path(__file__).with_name("templates") / "forecast.html"


def page(report: Report) -> str:
    """The page's text. Raises UnsupportedError where jinja2 or matplotlib is not installed."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise UnsupportedError("a page needs jinja2: pip install jinja2, or ask for Markdown or JSON") from error
    template = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE.read_text())
    return template.render(report=report, verdict=verdict(report), headline=headline(report), ours=OURS, plots=list(plots(report)),
                           tables=list(tables(report)), limits=limits(report), placement=placement(report))


# ---- An offline report as Markdown ----


def markdown(report: Report) -> str:
    """The verdict, all tables, limits, and where each unit is updated."""
    found = "\n".join(f"- {line}" for line in verdict(report))
    parts = [f"# {report.model} on {report.device.name}", found, headline(report), *map(_table, tables(report)),
             "## Limits", *limits(report), f"## Placement, k = {report.plan.k}", "\n".join(f"- {line}" for line in placement(report))]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [f"## {table.title}", "", _line(table.heads), "|---" * len(table.heads) + "|", *map(_line, table.rows)]
    return "\n".join([*lines, *(f"\n{remark}" for remark in table.remarks)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
