"""The first screen of `explain`: at most 40 lines of 100 columns, for a model of any depth.

The verdict, the plan, the step, where units are updated and why around k, the most urgent notes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial

from hytrain_fx.explain.plan.details import notes, told
from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.tables import step_table
from hytrain_fx.explain.plan.text import UnitGroup, headline, unit_groups
from hytrain_fx.explain.plan.verdict import verdict_of
from hytrain_fx.ir.figures import Table, params_text, time_text

LINES, COLUMNS = 40, 100
_GROUPS = 6  # lines for units: more of them are cut in the middle
_NAME, _PLACE = 26, 24  # columns of a unit's name and of where it is updated
_CUT = "..."
_NONE = "-"
_LAST = "more: .details() as text, .to_dict() as values"


def screen_text(e: Explained) -> str:
    """The screen; notes have the lines that the rest leaves."""
    parts = [part for part in (_part(partial(_verdict, e)), _part(partial(_plan, e)), _part(partial(_step, e)), _part(partial(_units, e)))
             if part]
    taken = sum(len(part) + 1 for part in parts) + 1  # each with an empty line, and the last line
    noted = _notes(e, LINES - 1 - taken)
    blocks = [*parts, *([noted] if noted else []), [_LAST]]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _part(lines: Callable[[], list[str]]) -> list[str]:
    """The lines of a part of the screen, or why it could not be told."""

    def section() -> Table | None:
        found = lines()
        return Table(found[0], (), (), tuple(found[1:])) if found else None

    section_told = told(section)
    return [_clipped(line, COLUMNS) for line in (section_told.title, *section_told.remarks)] if section_told else []


def _verdict(e: Explained) -> list[str]:
    return verdict_of(e).lines()


def _plan(e: Explained) -> list[str]:
    standing = f"; planning: {e.planning.state} since step {e.planning.since}" if e.planning else ""
    engine = f"{e.engine} engine" + (f" ({e.library})" if e.library else "")
    runs = f"on {e.device}; {engine}, CPU workers: {e.workers}; steps done: {e.steps_done}{standing}"
    return [*_wrapped(headline(e.plan), 2), *_wrapped(runs, 2)]


def _step(e: Explained) -> list[str]:
    if e.profile is None and e.measured is None:
        return []
    rows = tuple(row[:3] for row in step_table(e).rows)
    return Table("", ("", "predicted", "measured"), rows).text().splitlines()


def _units(e: Explained) -> list[str]:
    """Where groups of units are updated, and the reasons on both sides of k."""
    groups = unit_groups(e.plan)
    first = groups if len(groups) <= _GROUPS else groups[: _GROUPS - 3]
    last = [] if len(groups) <= _GROUPS else groups[-2:]
    left = len(groups) - len(first) - len(last)
    cut = [("", f"({left} more)", "", "", "", "")] if left else []
    rows = (*(_row(e, group) for group in first), *cut, *(_row(e, group) for group in last))
    heads = ("unit", "name", "parameters", "updated on", "CPU update", "wait (predicted)")
    return [*Table("", heads, rows, words=(1, 3)).text().splitlines(), *_reasons(e, groups)]


def _row(e: Explained, group: UnitGroup) -> tuple[str, ...]:
    """The group's line: figures of all its units together."""
    update_us = sum(e.profile.units[unit].cpu_update_us for unit in group.units) if e.profile else None
    wait_us = sum(e.schedule.stalls_us[unit] for unit in group.units) if e.schedule else None
    params = group.params * len(group.units)
    return group.number, _middle(group.name, _NAME), params_text(params), _clipped(group.place, _PLACE), _time(update_us), _time(wait_us)


def _reasons(e: Explained, groups: list[UnitGroup]) -> list[str]:
    """Why the last unit before k and the first from k on are where they are."""
    lines = []
    for unit in (e.plan.k - 1, e.plan.k):
        reason = next((row.reason for row in e.plan.shares(unit)), None) if unit >= 0 else None
        if reason is not None and reason not in lines:
            lines += _wrapped(f"unit {unit}: {reason}", 2)
    return lines


def _notes(e: Explained, most: int) -> list[str]:
    """Notes of three lines each at most, as many as there is room for, and how many are left."""
    found = [_wrapped(f"note: {text}", 3) for text in notes(e)]
    shown: list[str] = []
    for at, lines in enumerate(found):
        room = most - len(shown) - (1 if at < len(found) - 1 else 0)
        if len(lines) > room:
            return [*shown, f"({len(found) - at} notes more)"]
        shown += lines
    return shown


def _wrapped(text: str, most: int) -> list[str]:
    """The text in lines of the screen's width, cut where it has more than `most`."""
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", max_lines=most, placeholder=f" {_CUT}")


def _clipped(text: str, columns: int) -> str:
    return text if len(text) <= columns else text[: columns - len(_CUT)] + _CUT


def _middle(text: str, columns: int) -> str:
    """The text without what is in its middle: both ends of a name tell most."""
    if len(text) <= columns:
        return text
    end = (columns - len(_CUT)) // 2
    return text[: columns - len(_CUT) - end] + _CUT + text[-end:]


def _time(us: float | None) -> str:
    return _NONE if us is None else time_text(us)
