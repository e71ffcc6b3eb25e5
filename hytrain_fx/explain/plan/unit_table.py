"""The units of a plan as a table of where each is updated and what it costs, and why it is updated there; equal neighbours are one line."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hytrain_fx.explain.plan.unit_groups import UnitGroup, unit_groups
from hytrain_fx.ir.figures import count_text, time_text
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import TIMES
from hytrain_fx.ir.tables import table

if TYPE_CHECKING:
    from hytrain_fx.explain.plan.report import Explanation

_HEADS = ("unit", "name", "parameters", "updated on", "forward", "backward", "CPU update", "device update", "D2H", "H2D", "wait")
_NONE = "-"
# Of a model whose units are all different, the first lines and the last; the others are in the plan.
_MOST_LINES = 24


def units_text(e: Explanation) -> str:
    """One line for each group of units, then the sums, profiled and measured."""
    groups = unit_groups(e.plan)
    shown = _shown(groups)
    many = any(len(group.units) > 1 for group in shown)
    title = "times of each unit: profiled, the wait predicted" + ("; of several the median of one, and the wait of all" if many else "")
    title += f" ({len(groups) - len(shown)} lines more are left out)" if len(shown) < len(groups) else ""
    rows = [(group.number, group.name, count_text(group.params), group.place, *_times(e, group)) for group in shown]
    return f"{title}\n" + table(_HEADS, [*rows, *_sums(e)], words=(1, 3))


def reasons_text(plan: Plan) -> str:
    """Why each group is updated there: by its first and its last unit where they differ."""
    groups = _shown(unit_groups(plan))
    by_reason: dict[str, list[str]] = {}
    for group in groups:
        for number, reason in group.reasons():
            by_reason.setdefault(reason, []).append(number)
    told = {row.unit for group in groups for row in group.rows if row.reason in by_reason}
    left = len({row.unit for row in plan.rows}) - len(told)
    lines = [f"  {', '.join(dict.fromkeys(numbers))}: {reason}" for reason, numbers in by_reason.items()]
    return "\n".join(["reasons, by unit" + (f" ({left} more are in plan.rows)" if left else ""), *lines])


def _shown(groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    return [*groups[: _MOST_LINES - 4], *groups[-4:]] if len(groups) > _MOST_LINES else list(groups)


def _times(e: Explanation, group: UnitGroup) -> Iterator[str]:
    for name in TIMES:
        yield time_text(statistics.median(getattr(e.profile.units[unit], name) for unit in group.units)) if e.profile else _NONE
    yield time_text(sum(e.schedule.stalls_us[unit] for unit in group.units)) if e.schedule else _NONE


def _sums(e: Explanation) -> Iterator[tuple[str, ...]]:
    if e.profile is not None:
        sums = [time_text(sum(getattr(unit, name) for unit in e.profile.units)) for name in TIMES]
        yield ("", "all, profiled", count_text(e.profile.params), "", *sums, time_text(e.schedule.stall_us) if e.schedule else _NONE)
    if (m := e.measured) is not None:
        yield ("", "all, measured", "", "", time_text(sum(m.forward_us)), time_text(sum(m.backward_us)),
               _NONE if m.cpu_us is None else time_text(m.cpu_us), _NONE, _NONE, _NONE, time_text(sum(m.stall_us)))
