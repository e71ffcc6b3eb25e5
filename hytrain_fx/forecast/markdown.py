"""An offline report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from hytrain_fx.forecast.report import Report
from hytrain_fx.forecast.tables import Table, headline, limits, placement, tables


def markdown(report: Report) -> str:
    """All tables, limits, and where each unit is updated."""
    parts = [f"# {report.model} on {report.device.name}", headline(report), *map(_table, tables(report)), "## Limits", *limits(report),
             f"## Placement, k = {report.plan.k}", "\n".join(f"- {line}" for line in placement(report))]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [f"## {table.title}", "", _line(table.heads), "|---" * len(table.heads) + "|", *map(_line, table.rows)]
    return "\n".join([*lines, *(f"\n{remark}" for remark in table.remarks)])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
