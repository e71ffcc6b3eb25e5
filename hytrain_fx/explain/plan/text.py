"""A plan as a page of text, and its equal neighbours as groups.

Who decided, from which figures, what is predicted, where each unit is updated and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hytrain_fx.ir.figures import bytes_text, count_text, params_text, table, time_text
from hytrain_fx.ir.plan import Placement, Plan, PlanRow

PLACE_WORDS = {Placement.GPU: "device", Placement.CPU: "CPU", Placement.STREAM: "streamed"}
SOURCE_WORDS = {
    "seed": "solved by HyTrainDNN's equation",
    "cotrain": "solved by CoTrain's equation",
    "windowed": "solved by the windows of each layer",
    "fixed k": "k was given",
    "loaded": "the plan was given",
    "first steps": "in force until times are measured",
}


def plan_text(plan: Plan) -> str:
    """All of a plan, with no profile at hand."""
    rows = [
        (str(row.unit), row.unit_name, params_text(row.numel), PLACE_WORDS[row.placement], row.reason)
        for row in sorted(plan.rows, key=lambda row: (row.unit, row.begin))
    ]
    parts = [headline(plan), table(("unit", "name", "parameters", "updated on", "reason"), rows, words=(1, 3, 4))]
    titled = (("solved from", plan.inputs), ("predicted", plan.predicted))
    parts += [f"{title}:\n{figures_text(figures)}" for title, figures in titled if figures]
    parts += ["\n".join(f"note: {text}" for text in plan.notes)] if plan.notes else []
    return "\n\n".join(parts) + "\n"


def headline(plan: Plan) -> str:
    """k, the number of units, and who decided."""
    units = len({row.unit for row in plan.rows})
    streamed, on_host = plan.numel(Placement.STREAM), plan.numel(Placement.CPU) + plan.numel(Placement.STREAM)
    share = f", {streamed / on_host:.0%} of the rest is streamed" if streamed else ""
    next_unit = plan.shares(plan.k) if plan.k < units else ()
    partly = sum(row.numel for row in next_unit if row.placement.rests_on_device) / max(sum(row.numel for row in next_unit), 1)
    first = "the first k" + (f" and {partly:.0%} of the next" if partly else "")
    who = SOURCE_WORDS.get(plan.source, plan.source)
    return f"plan: k = {plan.k} of {units} units ({first} are updated on the device){share}; {who}"


def place_of(plan: Plan, unit: int) -> str:
    """Where a unit is updated, with the shares where they differ."""
    shares = plan.shares(unit)
    numel = sum(share.numel for share in shares)
    if len({share.placement for share in shares}) == 1:
        return PLACE_WORDS[shares[0].placement]
    places = dict.fromkeys(share.placement for share in shares)
    sizes = {place: sum(share.numel for share in shares if share.placement == place) for place in places}
    return " + ".join(f"{size / numel:.0%} {PLACE_WORDS[place]}" for place, size in sizes.items())


def reason_of(plan: Plan, unit: int) -> str:
    """Why a unit is updated there: the reasons of its shares, each once."""
    return "; ".join(dict.fromkeys(share.reason for share in plan.shares(unit)))


def figures_text(figures: Mapping[str, float]) -> str:
    """Named figures one to a line, in the unit that their name ends in."""
    width = max(map(len, figures), default=0)
    return "\n".join(f"  {name.ljust(width)}  {figure_text(name, value)}" for name, value in figures.items())


def figure_text(name: str, value: float) -> str:
    """A figure by the unit in its name: `_us` a time, `_bytes` memory, `_share` per cent."""
    if name.endswith("_us"):
        return time_text(value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_share"):
        return f"{value:.1%}"
    return count_text(value)


# ---- Equal neighbours among a plan's units as one line, so that a table holds any depth ----
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
