"""An `Explanation` as one page of plain text: head, step, rules, units, reasons, memory, start-up, nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hytrain_fx.cost_model.figures import bytes_text, count_text, time_text
from hytrain_fx.cost_model.planner import STREAMED
from hytrain_fx.explain.plan_text import headline, place_of, reason_of
from hytrain_fx.explain.startup_text import memory_text, startup_text
from hytrain_fx.explain.tables import shortened, table
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import TIMES

if TYPE_CHECKING:
    from hytrain_fx.explain.report import Explanation

# Reasons of more units than these are shown for the first, the last and those around k.
_ALL_REASONS = 12
_RULE_WORDS = {
    "seed": "HyTrainDNN's equation",
    "cotrain": "CoTrain's equation (alpha = 1)",
    "windowed": "windows of each layer",
    STREAMED: "windows of each layer, states streamed too where that is faster",
    "k=0": "all on the CPU",
    "k=n": "all on the device, as far as it fits",
}
_UNIT_HEADS = ("unit", "name", "parameters", "updated on", "forward", "backward", "CPU update", "device update", "D2H", "H2D", "wait")
_NONE = "-"


def explanation_text(e: Explanation) -> str:
    """The page. Figures say whether they were profiled (before the plan was solved), predicted, measured (under it) or given."""
    startup = startup_text(e.startup) if e.startup else ""
    parts = (_head(e), _step(e), _rules(e), _units(e), _reasons(e.plan), memory_text(e.memory), startup, _closing(e))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(e: Explanation) -> str:
    params = sum(row.numel for row in e.plan.rows)
    lines = [headline(e.plan), f"{count_text(params)} parameters on {e.device}; {e.engine} engine, CPU workers: {e.workers}; "
             f"steps done: {e.steps_done}"]
    if e.profile is None:
        lines.append("No times have been profiled: this is where the updates run now, nothing is predicted.")
    else:
        lines.append(f"profiled in {e.profile.steps} steps on {e.profile.host}")
    return "\n".join([*lines, *(f"note: {text}" for text in (*e.optimizer, *e.plan.notes))])


def _step(e: Explanation) -> str:
    rows = []
    predicted = time_text(e.schedule.makespan_us) if e.schedule else _NONE
    measured, count = _NONE, ""
    if e.measured is not None and e.measured.step_us is not None:
        measured, count = time_text(e.measured.step_us), f"median of the last {e.measured.step_count} steps under this plan"
    rows.append(("step", predicted, measured, count))
    stall = time_text(sum(e.measured.stall_us)) if e.measured else _NONE
    rows.append(("of it waiting for updates", time_text(e.schedule.stall_us) if e.schedule else _NONE, stall, ""))
    text = table(("", "predicted", "measured", ""), rows, words=(0, 3))
    text += f"\nwhat binds (predicted): {e.binds}" if e.binds else ""
    return text + (f"\nalpha (profiled): {e.alpha:.3g}, device over CPU update time" if e.alpha is not None else "")


def _rules(e: Explanation) -> str:
    rows = [(name, str(plan.k), time_text(plan.predicted["step_us"]), time_text(plan.predicted["stall_us"]),
             bytes_text(plan.predicted["gpu_states_bytes"]), _RULE_WORDS.get(name, "")) for name, plan in e.rules.items()]
    return table(("rule", "k", "predicted step", "wait", "states on device", ""), rows, words=(0, 5)) if rows else ""


def _units(e: Explanation) -> str:
    plan, profile = e.plan, e.profile
    rows = []
    for unit in sorted({row.unit for row in plan.rows}):
        shares = plan.shares(unit)
        times = [time_text(getattr(profile.units[unit], name)) if profile else _NONE for name in TIMES]
        wait = time_text(e.schedule.stalls_us[unit]) if e.schedule else _NONE
        rows.append((str(unit), shares[0].unit_name, count_text(sum(s.numel for s in shares)), place_of(plan, unit), *times, wait))
    rows += list(_sums(e))
    return "times of each unit: profiled, the wait predicted\n" + table(_UNIT_HEADS, rows, words=(1, 3))


def _sums(e: Explanation) -> Iterator[tuple[str, ...]]:
    if e.profile is not None:
        sums = [time_text(sum(getattr(unit, name) for unit in e.profile.units)) for name in TIMES]
        yield ("", "all, profiled", count_text(e.profile.params), "", *sums, time_text(e.schedule.stall_us) if e.schedule else _NONE)
    if e.measured is not None:
        m = e.measured
        cpu = [us for us in m.cpu_update_us if us is not None]
        yield ("", "all, measured", "", "", time_text(sum(m.forward_us)), time_text(sum(m.backward_us)),
               time_text(sum(cpu)) if cpu else _NONE, _NONE, _NONE, _NONE, time_text(sum(m.stall_us)))


def _reasons(plan: Plan) -> str:
    units = sorted({row.unit for row in plan.rows})
    shown = units if len(units) <= _ALL_REASONS else sorted({units[0], *units[max(0, plan.k - 3) : plan.k + 3], units[-1]})
    reasons: dict[str, list[int]] = {}
    for unit in shown:
        reasons.setdefault(reason_of(plan, unit), []).append(unit)
    lines = [f"  {', '.join(map(str, numbers))}: {reason}" for reason, numbers in reasons.items()]
    left = len(units) - len(shown)
    return "\n".join(["reasons, by unit" + (f" ({left} more are in plan.rows)" if left else ""), *lines])


def _closing(e: Explanation) -> str:
    lines = ["plans so far: " + " -> ".join(f"k={plan.k} ({plan.source})" for plan in e.history)]
    if e.node_runs:
        lines.append("nodes run, in parameters: " + ", ".join(f"{name} {count}" for name, count in sorted(e.node_runs.items())))
    if e.spent_us:
        lines.append("spent once, measured: " + ", ".join(f"{name} {time_text(us)}" for name, us in e.spent_us.items()))
    return "\n".join([*lines, *_not_offloaded(e)])


def _not_offloaded(e: Explanation) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, why in e.not_offloaded.items():
        names.setdefault(why, []).append(name)
    for why, found in names.items():
        yield f"updated without overlap: {shortened(found)}: {why}"
