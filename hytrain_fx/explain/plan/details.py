"""All that `explain` knows, as sections: what the first screen says in short is here in full.

Head, step by terms, what binds, what would help, rules, units, reasons, memory, memory over a step,
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.step_memory import step_memory_table
from hytrain_fx.explain.plan.tables import helps_table, reasons_table, rules_table, step_table, units_table
from hytrain_fx.ir.figures import Table, count_text, shortened, time_text
from hytrain_fx.session.startup_text import memory_table, startup_line

_USUAL_QUEUE = "the queue of launches has its usual length: import hytrain_fx before CUDA is first used"


def details_text(e: Explained) -> str:
    """The sections as text.

    Figures say whether they were profiled (before the plan was solved), predicted, measured (under
    it) or given.
    """
    return "\n\n".join(section.text() for section in sections(e)) + "\n"


def sections(e: Explained) -> Iterator[Table]:
    """The sections in reading order; those that have nothing to say are left out."""
    parts: tuple[Callable[[], Table | None], ...] = (
        partial(_head, e), partial(_step, e), partial(helps_table, e), partial(rules_table, e), partial(units_table, e),
        partial(reasons_table, e.plan), partial(memory_table, e.memory), partial(step_memory_table, e), partial(_closing, e))
    for part in parts:
        if (section := told(part)) is not None:
            yield section


def told(part: Callable[[], Table | None]) -> Table | None:
    """A part of the page.

    A part that fails leaves the others: to explain never ends a run.
    """
    try:
        return part()
    except Exception as error:
        return _lines([f"(a part of this page could not be told: {type(error).__name__}: {error})"])


def notes(e: Explained) -> list[str]:
    """What is to be said besides figures, the most urgent first."""
    named: dict[str, list[str]] = {}
    for name, why in e.not_offloaded.items():
        named.setdefault(why, []).append(name)
    slower = [f"updated without overlap: {shortened(names)}: {why}" for why, names in named.items()]
    weights = [str(said) for said in (e.weights_choice, e.copies, e.streamed) if said]
    said = [text for text in (e.nonfinite, e.attention) if text]
    return [*e.troubles, *e.outside, *said, *slower, *weights, *e.optimizer, *e.plan.notes]


def _head(e: Explained) -> Table:
    if e.profile is None:
        lines = ["No times have been profiled: this is where the updates run now, nothing is predicted."]
    else:
        how = f"profiled in {e.profile.steps} steps" if e.profile.steps else f"estimated (data sheets) for {e.profile.device}"
        lines = [f"{how} on {e.profile.host}; predicted: simulated from the {'profiled' if e.profile.steps else 'estimated'} times"]
    lines += [f"planning: {e.planning}"] if e.planning else []
    return _lines([*lines, *(f"note: {text}" for text in notes(e))])


def _step(e: Explained) -> Table:
    table = step_table(e)
    return Table(table.title, table.heads, table.rows, tuple(_remarks(e)), table.words)


def _remarks(e: Explained) -> Iterator[str]:
    """What binds, idle shares as its evidence, when updates end and how they begin."""
    yield from [f"what binds (predicted): {e.binds}"] if e.binds else []
    for kind, idle in (("predicted", e.idle), ("measured", e.measured.idle if e.measured else {})):
        yield from [f"idle share of the step ({kind}): " + ", ".join(f"{name} {share:.0%}" for name, share in idle.items())] if idle else []
    yield from _ends(e)


def _ends(e: Explained) -> Iterator[str]:
    finish = e.measured.finish if e.measured else None
    ends = {"by the CPU": finish.cpu_us, "streamed": finish.streamed_us} if finish else {}
    if finish and any(ends.values()):
        words = ", ".join(f"{name} {time_text(us)}" for name, us in ends.items() if us)
        if finish.streamed_held_us:
            words += f" ({time_text(finish.streamed_held_us)} of it after new weights that the CPU had not updated)"
        soon = f", of {count_text(finish.promised)} before their gradients had come" if finish.promised else ""
        rest = f"; those of the last {count_text(finish.at_once)} parameters were put on the lane at once{soon}" if finish.at_once else ""
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
    if e.early_tried:
        yield e.early_tried


def _closing(e: Explained) -> Table:
    lines = startup_line(e.startup).splitlines() if e.startup else []
    lines.append("plans so far: " + " -> ".join(f"k={plan.k} ({plan.source})" for plan in e.history))
    if e.node_runs:
        lines.append("nodes run, in parameters: " + ", ".join(f"{name} {count}" for name, count in sorted(e.node_runs.items())))
    if e.spent_us:
        lines.append("spent once, measured: " + ", ".join(f"{name} {time_text(us)}" for name, us in e.spent_us.items()))
    return _lines(lines)


def _lines(lines: list[str]) -> Table:
    return Table(lines[0], (), (), tuple(lines[1:]))
