"""The units of a plan as a table of where each is updated, what it costs, and why there.

Equal neighbours are one line.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.text import PLACE_WORDS
from hytrain_fx.ir.figures import count_text, table, time_text
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import TIMES

_HEADS = ("unit", "name", "parameters", "updated on", "forward", "backward", "CPU update", "device update", "D2H", "H2D", "wait")
_NONE = "-"
# Where all units of a model are different, only the first and the last lines are shown. The others
# are in the plan.
_MOST_LINES = 24


def units_text(e: Explained) -> str:
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


def _times(e: Explained, group: UnitGroup) -> Iterator[str]:
    for name in TIMES:
        yield time_text(statistics.median(getattr(e.profile.units[unit], name) for unit in group.units)) if e.profile else _NONE
    yield time_text(sum(e.schedule.stalls_us[unit] for unit in group.units)) if e.schedule else _NONE


def _sums(e: Explained) -> Iterator[tuple[str, ...]]:
    if e.profile is not None:
        sums = [time_text(sum(getattr(unit, name) for unit in e.profile.units)) for name in TIMES]
        yield ("", "all, profiled", count_text(e.profile.params), "", *sums, time_text(e.schedule.stall_us) if e.schedule else _NONE)
    if (m := e.measured) is not None:
        yield ("", "all, measured", "", "", time_text(sum(m.forward_us)), time_text(sum(m.backward_us)),
               _NONE if m.cpu_us is None else time_text(m.cpu_us), _NONE, _NONE, _NONE, time_text(sum(m.stall_us)))


# ---- Equal neighbours among a plan's units as one line, so that a page holds any depth ----
#
#     0          token              device
#     1..2       layers.0..1        device
#     3..27      layers.2..26       CPU


@dataclass(frozen=True)
class UnitGroup:
    """Units `first` to `last` of a plan with their rows.

    They have one size, similar names, and states on the same side.
    """

    first: int
    last: int
    rows: tuple[PlanRow, ...]

    @property
    def units(self) -> range:
        """Their numbers."""
        return range(self.first, self.last + 1)

    @property
    def number(self) -> str:
        """`3..27`, or `3`."""
        return f"{self.first}..{self.last}" if self.last > self.first else str(self.first)

    @property
    def name(self) -> str:
        """`layers.2..26`, or the one name."""
        first, last = self.rows[0].unit_name, self.rows[-1].unit_name
        parts = list(zip(first.split("."), last.split("."), strict=True)) if first.count(".") == last.count(".") else []
        differs = next((at for at, (one, other) in enumerate(parts) if one != other), 0)
        return first if first == last else f"{first}..{'.'.join(last.split('.')[differs:])}"

    @property
    def params(self) -> int:
        """Parameters of one of them."""
        return sum(row.numel for row in self.rows) // len(self.units)

    @property
    def place(self) -> str:
        """Where they are updated.

        With the shares of all together where that is in several places.
        """
        sizes = {place: sum(row.numel for row in self.rows if row.placement is place) for place in Placement}
        found = {place: size for place, size in sizes.items() if size}
        if len(found) == 1:
            return PLACE_WORDS[next(iter(found))]
        return " + ".join(f"{size / sum(found.values()):.0%} {PLACE_WORDS[place]}" for place, size in found.items())

    def reasons(self) -> list[tuple[str, str]]:
        """Units and why.

        One line where all have one reason; else the first's and the last's, or the first of each
        place.
        """
        why = {(row.unit, row.placement): row.reason for row in reversed(self.rows)}
        if len(set(why.values())) == 1:
            return [(self.number, self.rows[0].reason)]
        places = list(dict.fromkeys(row.placement for row in self.rows))
        if len(places) == 1:
            return [(str(unit), why[unit, places[0]]) for unit in (self.first, self.last)]
        firsts = [min(unit for unit, at in why if at is place) for place in places]
        return [(str(unit), why[unit, place]) for unit, place in zip(firsts, places, strict=True)]


def unit_groups(plan: Plan) -> list[UnitGroup]:
    """The units of a plan in groups, in order."""
    by_unit: dict[int, list[PlanRow]] = {}
    for row in sorted(plan.rows, key=lambda row: (row.unit, row.begin)):
        by_unit.setdefault(row.unit, []).append(row)
    groups: list[list[list[PlanRow]]] = []
    for rows in by_unit.values():
        if groups and _looks(groups[-1][-1]) == _looks(rows) and rows[0].unit == groups[-1][-1][0].unit + 1:
            groups[-1].append(rows)
        else:
            groups.append([rows])
    return [UnitGroup(group[0][0].unit, group[-1][0].unit, tuple(row for rows in group for row in rows)) for group in groups]


def _looks(rows: Sequence[PlanRow]) -> tuple[str, int, frozenset[bool]]:
    """What equal units agree in.

    The streamed part differs between neighbours, since whole parameters are streamed.
    """
    return re.sub(r"\d+", "#", rows[0].unit_name), sum(row.numel for row in rows), frozenset(row.placement.rests_on_device for row in rows)
