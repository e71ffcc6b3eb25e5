"""The tables of an explanation, for text and HTML alike.

The terms of a step, what would help, the rules, the units with their times, and why they are there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.fetches import exposed_fetch_us
from hytrain_fx.cost_model.rules import STREAMED
from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.text import SOURCE_WORDS, UnitGroup, unit_groups
from hytrain_fx.explain.plan.verdict import LITTLE
from hytrain_fx.ir.figures import Table, bytes_text, params_text, time_text
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import TIMES
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import ARRIVALS, FETCHES, GATHERS, TaskKind

# Where each measured figure comes from.
SOURCES = {
    "step": "the host's clock, from step() to step()",
    "forward": "marks on the compute stream",
    "backward": "marks on the compute stream",
    "CPU updates": "the engine's clock in the last step, divided among the workers",
    "device updates": "profiled: the engine's events, or a probe where no unit ran it",
    "gradients to the host": "profiled: the engine's events",
    "weights to the device": "profiled: the engine's events",
    "states to the device": "profiled: the engine's events, or a probe where none went",
    "states to the host": "profiled: the engine's events, or a probe where none went",
    "weights fetched": "profiled: events around the copies",
    "weights gathered": "profiled: events around the gathers, without waits for other ranks",
    "gradients reduce-scattered": "profiled: events around the collectives, without waits for other ranks",
    "weights all-gathered": "profiled: events around the collectives, without waits for other ranks",
    "waiting for fetches": "marks on the compute stream, a part of the line above",
    "waiting for updates": "marks on the compute stream",
    "other micro-batches": "marks on the compute stream: from the first forward to the last backward",
    "other stages": "marks on the compute stream: from a step's last backward to the next forward",
}
_TERMS: dict[str, tuple[TaskKind, ...]] = {
    "forward": (TaskKind.FORWARD,), "backward": (TaskKind.BACKWARD,), "CPU updates": (TaskKind.CPU_UPDATE,),
    "device updates": (TaskKind.GPU_UPDATE,), "gradients to the host": (TaskKind.D2H,), "weights to the device": (TaskKind.H2D,),
    "weights fetched": FETCHES, "weights gathered": GATHERS, "gradients reduce-scattered": (TaskKind.REDUCE_SCATTER,),
    "weights all-gathered": (TaskKind.ALL_GATHER,), "states to the device": (TaskKind.STREAM_IN,),
    "states to the host": (TaskKind.STREAM_OUT,),
}
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
# Where all units of a model are different, only the first and the last lines are shown. The others
# are in the plan.
_MOST_LINES = 24


def step_table(e: Explained) -> Table:
    """The step and its terms, predicted next to measured, with where they come from."""
    return Table("terms of a step", ("", "predicted", "measured", ""), tuple(_terms(e)), words=(0, 3))


def _terms(e: Explained) -> Iterator[tuple[str, str, str, str]]:
    schedule, m = e.schedule, e.measured
    steps = f", median of {m.step_count} steps" if m and m.step_us is not None else ""
    step_us = None if m is None else m.step_us
    yield "step", _time(schedule.makespan_us if schedule else None), _time(step_us), SOURCES["step"] + steps if steps else ""
    measured = {} if m is None else {"forward": sum(m.forward_us), "backward": sum(m.backward_us), "CPU updates": m.cpu_us}
    between_us, bubble_us = (e.profile.between_us, e.profile.bubble_us) if e.profile else (0.0, 0.0)
    for name, kinds in _TERMS.items():
        pieces = [i.duration_us for i in schedule.intervals if i.task.kind in kinds] if schedule else []
        others_us = between_us if name == "forward" else 0.0  # they are played behind the last forward
        if pieces or measured.get(name) is not None:
            yield name, _time(sum(pieces) - others_us if schedule else None), _time(measured.get(name)), SOURCES[name]
    for name, us, found_us in (("other micro-batches", between_us, m.between_us if m else 0.0),
                               ("other stages", bubble_us, m.apart_us if m and bubble_us else 0.0)):
        if us or found_us:
            yield name, _time(us if schedule else None), _time(found_us if m else None), SOURCES[name]
    stalls_us = None if m is None else sum(m.stall_us)
    predicted_us = schedule.stall_us if schedule else None
    yield "waiting for updates", _time(predicted_us), _time(stalls_us), SOURCES["waiting for updates"] if m else ""
    if (m and m.fetch_stall_us) or (schedule and any(i.task.kind in ARRIVALS for i in schedule.intervals)):
        exposed_us = exposed_fetch_us(schedule) if schedule else None
        yield "waiting for fetches", _time(exposed_us), _time(m.fetch_stall_us if m else None), SOURCES["waiting for fetches"]


def helps_table(e: Explained) -> Table | None:
    """What would help most; None before anything is profiled."""
    if not e.helps:
        return None
    most = [of for of in e.helps if of.gain_share >= LITTLE]
    rows = tuple((of.change, time_text(of.gain_us), f"{of.gain_share:.1%}", str(of.k)) for of in most)
    rest = [of.change for of in e.helps if of.gain_share < LITTLE]
    remarks = (f"less than {LITTLE:.1%} of the step: {'; '.join(rest)}",) if rest else ()
    title = "what would help most (predicted, the plan solved again for each):"
    return Table(title, ("change", "less a step", "share", "k"), rows, remarks)


def rules_table(e: Explained) -> Table | None:
    """What each rule would do; None before anything is profiled."""
    if not e.rules:
        return None
    heads, streams = ["rule", "k", "predicted step", "wait", "states on device", ""], STREAMED in e.rules
    rows = [[name, str(plan.k), time_text(plan.predicted["step_us"]), time_text(plan.predicted["stall_us"]),
             bytes_text(plan.predicted["gpu_states_bytes"]), _RULE_WORDS.get(name, "")] for name, plan in e.rules.items()]
    if e.schedule is not None:
        per_param = e.plan.inputs.get("state_bytes_per_param", STATE_BYTES_PER_PARAM)
        rows.append(["in force", str(e.plan.k), time_text(e.schedule.makespan_us), time_text(e.schedule.stall_us),
                     bytes_text(per_param * e.plan.numel(Placement.GPU)), SOURCE_WORDS.get(e.plan.source, e.plan.source)])
    if streams:
        heads.insert(2, "streamed")
        for row, plan in zip(rows, [*e.rules.values(), e.plan], strict=False):
            row.insert(2, f"{streamed_share(plan):.0%}")
    return Table("rules (predicted)", tuple(heads), tuple(map(tuple, rows)), tuple(_rules_remarks(e)), words=(0, len(heads) - 1))


def _rules_remarks(e: Explained) -> Iterator[str]:
    if e.alpha is not None:
        yield f"alpha (profiled): {e.alpha:.3g}, device over CPU update time"
    if (slope := e.k_sensitivity) is None:
        return
    yield (f"HyTrainDNN's k for equal layers moves with 1% more of a term by: CPU updates {slope.t_cpu:+.2f}, "
           f"backward {slope.t_bwd:+.2f}, alpha {slope.alpha:+.2f}" if slope.t_cpu else
           "HyTrainDNN's k for equal layers is 0 and stays so: the backward is longer than all CPU updates")


def units_table(e: Explained) -> Table:
    """One line for each group of units, then the sums, profiled and measured."""
    groups = unit_groups(e.plan)
    shown = _shown(groups)
    many = any(len(group.units) > 1 for group in shown)
    title = "times of each unit: profiled, the wait predicted" + ("; of several the median of one, and the wait of all" if many else "")
    title += f" ({len(groups) - len(shown)} lines more are left out)" if len(shown) < len(groups) else ""
    rows = ((group.number, group.name, params_text(group.params), group.place, *_times(e, group)) for group in shown)
    return Table(title, _UNIT_HEADS, (*rows, *_sums(e)), words=(1, 3))


def reasons_table(plan: Plan) -> Table:
    """Why each group is updated there: by its first and its last unit where they differ."""
    groups = _shown(unit_groups(plan))
    by_reason: dict[str, list[str]] = {}
    for group in groups:
        for number, reason in group.reasons():
            by_reason.setdefault(reason, []).append(number)
    told = {row.unit for group in groups for row in group.rows if row.reason in by_reason}
    left = len({row.unit for row in plan.rows}) - len(told)
    rows = tuple((", ".join(dict.fromkeys(numbers)), reason) for reason, numbers in by_reason.items())
    return Table("reasons, by unit" + (f" ({left} more are in plan.rows)" if left else ""), ("units", "reason"), rows, words=(0, 1))


def _shown(groups: Sequence[UnitGroup]) -> list[UnitGroup]:
    return [*groups[: _MOST_LINES - 4], *groups[-4:]] if len(groups) > _MOST_LINES else list(groups)


def _times(e: Explained, group: UnitGroup) -> Iterator[str]:
    for name in TIMES:
        yield time_text(statistics.median(getattr(e.profile.units[unit], name) for unit in group.units)) if e.profile else _NONE
    yield time_text(sum(e.schedule.stalls_us[unit] for unit in group.units)) if e.schedule else _NONE


def _sums(e: Explained) -> Iterator[tuple[str, ...]]:
    if e.profile is not None:
        sums = [time_text(sum(getattr(unit, name) for unit in e.profile.units)) for name in TIMES]
        yield ("", "all, profiled", params_text(e.profile.params), "", *sums, time_text(e.schedule.stall_us) if e.schedule else _NONE)
    if (m := e.measured) is not None:
        yield ("", "all, measured", "", "", time_text(sum(m.forward_us)), time_text(sum(m.backward_us)),
               _NONE if m.cpu_us is None else time_text(m.cpu_us), _NONE, _NONE, _NONE, time_text(sum(m.stall_us)))


def _time(us: float | None) -> str:
    return _NONE if us is None else time_text(us)
