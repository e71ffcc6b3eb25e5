"""What `explain` knows as a page of text.

Head, step by terms, what binds, what would help, rules, units, reasons, memory, the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.planner import STREAMED
from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.text import SOURCE_WORDS, headline
from hytrain_fx.explain.plan.unit_table import reasons_text, units_text
from hytrain_fx.ir.figures import bytes_text, count_text, shortened, table, time_text
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import STATE_BYTES_PER_PARAM
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.session.startup_text import memory_text, startup_line

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
    "waiting for updates": "marks on the compute stream",
}
_TERMS = {
    "forward": TaskKind.FORWARD, "backward": TaskKind.BACKWARD, "CPU updates": TaskKind.CPU_UPDATE, "device updates": TaskKind.GPU_UPDATE,
    "gradients to the host": TaskKind.D2H, "weights to the device": TaskKind.H2D, "states to the device": TaskKind.STREAM_IN,
    "states to the host": TaskKind.STREAM_OUT,
}
_RULE_WORDS = {
    "seed": "HyTrainDNN's equation",
    "cotrain": "CoTrain's equation (alpha = 1)",
    "windowed": "windows of each layer",
    STREAMED: "windows of each layer, states streamed too where that is faster",
    "k=0": "all on the CPU",
    "k=n": "all on the device, as far as it fits",
}
_NONE = "-"
_LITTLE = 0.005  # share of the step: what gains less is only named
_USUAL_QUEUE = "the queue of launches has its usual length: import hytrain_fx before CUDA is first used"


def explanation_text(e: Explained) -> str:
    """The page.

    Figures say whether they were profiled (before the plan was solved), predicted, measured (under
    it) or given.
    """
    parts: tuple[Callable[[], str], ...] = (
        partial(_head, e), partial(_step, e), partial(_helps, e), partial(_rules, e), partial(units_text, e),
        partial(reasons_text, e.plan), partial(memory_text, e.memory), partial(_closing, e))
    return "\n\n".join(text for text in map(_told, parts) if text) + "\n"


def _told(part: Callable[[], str]) -> str:
    """A part of the page.

    A part that fails leaves the others: to explain never ends a run.
    """
    try:
        return part()
    except Exception as error:
        return f"(a part of this page could not be told: {type(error).__name__}: {error})"


def _head(e: Explained) -> str:
    params = sum(row.numel for row in e.plan.rows)
    lines = [headline(e.plan), f"{count_text(params)} parameters on {e.device}; {e.engine} engine, CPU workers: {e.workers}; "
             f"steps done: {e.steps_done}"]
    if e.profile is None:
        lines.append("No times have been profiled: this is where the updates run now, nothing is predicted.")
    else:
        how = f"profiled in {e.profile.steps} steps" if e.profile.steps else f"estimated (data sheets) for {e.profile.device}"
        lines.append(f"{how} on {e.profile.host}; predicted: simulated from the {'profiled' if e.profile.steps else 'estimated'} times")
    lines += [f"planning: {e.planning}"] if e.planning else []
    notes = (*e.outside, *e.troubles, *(said for said in (e.nonfinite, e.copies) if said), *e.optimizer, *e.plan.notes)
    return "\n".join([*lines, *(f"note: {text}" for text in notes)])


def _step(e: Explained) -> str:
    """The step and its terms, predicted next to measured.

    Also where they come from, what binds, and idle shares as its evidence.
    """
    lines = [table(("", "predicted", "measured", ""), [*_terms(e)], words=(0, 3))]
    lines += [f"what binds (predicted): {e.binds}"] if e.binds else []
    for kind, idle in (("predicted", e.idle), ("measured", e.measured.idle if e.measured else {})):
        lines += [f"idle share of the step ({kind}): " + ", ".join(f"{name} {share:.0%}" for name, share in idle.items())] if idle else []
    return "\n".join([*lines, *_ends(e)])


def _terms(e: Explained) -> Iterator[tuple[str, str, str, str]]:
    schedule, m = e.schedule, e.measured
    steps = f", median of {m.step_count} steps" if m and m.step_us is not None else ""
    step_us = None if m is None else m.step_us
    yield "step", _time(schedule.makespan_us if schedule else None), _time(step_us), SOURCES["step"] + steps if steps else ""
    measured = {} if m is None else {"forward": sum(m.forward_us), "backward": sum(m.backward_us), "CPU updates": m.cpu_us}
    for name, kind in _TERMS.items():
        pieces = [i.duration_us for i in schedule.intervals if i.task.kind == kind] if schedule else []
        if pieces or measured.get(name) is not None:
            yield name, _time(sum(pieces) if schedule else None), _time(measured.get(name)), SOURCES[name]
    stalls_us = None if m is None else sum(m.stall_us)
    predicted_us = schedule.stall_us if schedule else None
    yield "waiting for updates", _time(predicted_us), _time(stalls_us), SOURCES["waiting for updates"] if m else ""


def _ends(e: Explained) -> Iterator[str]:
    finish = e.measured.finish if e.measured else None
    ends = {"by the CPU": finish.cpu_us, "streamed": finish.streamed_us} if finish else {}
    if finish and any(ends.values()):
        words = ", ".join(f"{name} {time_text(us)}" for name, us in ends.items() if us)
        if finish.streamed_held_us:
            words += f" ({time_text(finish.streamed_held_us)} of it after new weights that the CPU had not updated)"
        rest = f"; those of the last {count_text(finish.at_once)} parameters were put on the lane at once" if finish.at_once else ""
        yield f"updates of a step end after its commit (measured, the last): {words}{rest}"
    if e.profile and e.profile.commit_us > 0 and e.profile.backward_us > 0:
        share = e.profile.commit_us / e.profile.backward_us
        longer = "" if e.launch_queue else f"; {_USUAL_QUEUE}"
        yield f"step() returns {time_text(e.profile.commit_us)} after the device begins the backward (profiled): {share:.0%} of it{longer}"
    if e.guesses and e.guesses.commits:
        g = e.guesses
        yield (f"guesses: in {g.commits} steps updates began before clipping's or the loss scale's factor was known; "
               f"missed in {g.missed}, {count_text(g.redone)} of {count_text(g.params)} parameters updated again; "
               f"weights of {count_text(g.sent)} were on the device before it came")
    if e.early and e.early.commits:
        of = e.early
        yield (f"early: in {of.commits} steps updates began before step(); "
               f"missed in {of.missed}, {count_text(of.redone)} of {count_text(of.params)} parameters put back or updated again")


def _helps(e: Explained) -> str:
    if not e.helps:
        return ""
    most = [of for of in e.helps if of.gain_share >= _LITTLE]
    lines = [f"  {of.change}: {time_text(of.gain_us)} less a step ({of.gain_share:.1%}), k = {of.k}" for of in most]
    rest = [of.change for of in e.helps if of.gain_share < _LITTLE]
    lines += [f"  less than {_LITTLE:.1%} of the step: {'; '.join(rest)}"] if rest else []
    return "\n".join(["what would help most (predicted, the plan solved again for each):", *lines])


def _rules(e: Explained) -> str:
    if not e.rules:
        return ""
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
    lines = [table(heads, rows, words=(0, len(heads) - 1))]
    lines += [f"alpha (profiled): {e.alpha:.3g}, device over CPU update time"] if e.alpha is not None else []
    if (slope := e.k_sensitivity) is not None:
        lines.append(f"HyTrainDNN's k for equal layers moves with 1% more of a term by: CPU updates {slope.t_cpu:+.2f}, "
                     f"backward {slope.t_bwd:+.2f}, alpha {slope.alpha:+.2f}" if slope.t_cpu else
                     "HyTrainDNN's k for equal layers is 0 and stays so: the backward is longer than all CPU updates")
    return "\n".join(lines)


def _closing(e: Explained) -> str:
    lines = [startup_line(e.startup)] if e.startup else []
    lines.append("plans so far: " + " -> ".join(f"k={plan.k} ({plan.source})" for plan in e.history))
    if e.node_runs:
        lines.append("nodes run, in parameters: " + ", ".join(f"{name} {count}" for name, count in sorted(e.node_runs.items())))
    if e.spent_us:
        lines.append("spent once, measured: " + ", ".join(f"{name} {time_text(us)}" for name, us in e.spent_us.items()))
    return "\n".join([*lines, *_not_offloaded(e)])


def _not_offloaded(e: Explained) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, why in e.not_offloaded.items():
        names.setdefault(why, []).append(name)
    for why, found in names.items():
        yield f"updated without overlap: {shortened(found)}: {why}"


def _time(us: float | None) -> str:
    return _NONE if us is None else time_text(us)
