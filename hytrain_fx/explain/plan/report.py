"""What `hytrain_fx.explain` returns: a compiled model as a screen, text, values, JSON and HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from hytrain_fx.explain.plan.details import details_text, sections
from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.screen import screen_text
from hytrain_fx.explain.plan.step_memory import step_memory
from hytrain_fx.explain.plan.tables import SOURCES
from hytrain_fx.explain.plan.text import headline, place_of, reason_of
from hytrain_fx.explain.plan.verdict import Verdict, verdict_of
from hytrain_fx.explain.template import render
from hytrain_fx.ir.profile import TIMES


@dataclass(frozen=True)
class Explanation(Explained):
    """One compiled model at one moment.

    `print` it for the first screen: a verdict, the plan in force, predicted next to measured times.
    A notebook shows it as tables.
    """

    @property
    def verdict(self) -> Verdict:
        """The figures of the first lines, and these lines (`verdict.lines()`)."""
        return verdict_of(self)

    def details(self) -> str:
        """All the rest as text.

        Every note in full, sources of figures, idle shares, what would help, the rules, times of
        each unit, reasons, memory by tier, start-up, the plans so far.
        """
        return details_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: dict, list, str, int, float, bool, None.

        The unit of a figure is the end of its name: `_us` microseconds, `_bytes`, `_share` 0..1 of
        the whole, `_params` and `params` a number of parameters. What it was taken from is the name
        of what it is in: profiled, predicted, measured, estimated. What is not known is None.

        verdict            the figures of the first lines (`Verdict`), and `lines`
        plan, history      the plan in force; all so far, oldest first
        device, engine     names, where the engine's library comes from, and the CPU workers
        optimizer, copies, streamed, nonfinite, attention, outside, troubles, launch_queue    notes
        weights_choice     where weights="auto" has weights rest, and the bytes that say so
        planning           what planning does now, since which step, and why
        steps_done         steps so far
        step               the step: predicted, measured
        binds              what sets its length, in a sentence
        idle_share         shares of the step by resource: predicted, measured
        helps              changes and what each saves: predicted
        k_sensitivity      layers by which HyTrainDNN's k moves for 1% more of a term
        profiled           the profile: times of each unit
        units              each unit: size, place, reason, and times by source
        rules              k and predictions of each rule
        memory             bytes by tier: estimated, measured
        step_memory        the device's bytes after each unit's forward and backward: known sizes
        startup            time until full speed by phase: measured
        node_runs          parameters that each kind of inserted node was run for
        not_offloaded      parameter -> why its gradient does not go to the host inside a graph
        guesses, early     updates that began before factors, or step(), were known
        finish             when the updates of a step had ended, from its commit on: measured
        spent              what was done once: measured
        sources            where each measured figure comes from
        """
        found = _plain(_values(self, self.verdict))
        assert isinstance(found, dict)
        return found

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return screen_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, a fold for each section. No other file is needed."""
        return render("explanation.html", verdict=self.verdict.lines(), headline=headline(self.plan), sections=list(sections(self)))


def _plain(value: Any) -> Any:
    """The value in JSON's types; a number that is not finite is not known."""
    if isinstance(value, Mapping):
        return {str(name): _plain(of) for name, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _values(e: Explained, verdict: Verdict) -> dict[str, Any]:
    schedule, measured = e.schedule, e.measured
    return {
        "verdict": {"lines": verdict.lines(), **asdict(verdict), "above_compute_share": verdict.above_compute_share},
        "plan": asdict(e.plan),
        "history": [{"source": plan.source, "k": plan.k, "predicted": plan.predicted} for plan in e.history],
        "device": e.device,
        "engine": {"name": e.engine, "library": e.library, "workers": e.workers},
        "optimizer": e.optimizer,
        "copies": e.copies,
        "streamed": e.streamed,
        "weights_choice": {"place": e.weights_choice.place, **asdict(e.weights_choice)} if e.weights_choice else None,
        "nonfinite": e.nonfinite,
        "outside": e.outside,
        "attention": e.attention,
        "troubles": e.troubles,
        "launch_queue": e.launch_queue,
        "steps_done": e.steps_done,
        "planning": asdict(e.planning) if e.planning else None,
        "step": {
            "predicted": {"step_us": schedule.makespan_us, "stall_us": schedule.stall_us} if schedule else None,
            "measured": {"step_us": measured.step_us, "steps": measured.step_count, "cpu_update_us": measured.cpu_us,
                         "stall_us": sum(measured.stall_us), "held_us": measured.held_us} if measured else None,
        },
        "binds": e.binds,
        "idle_share": {"predicted": e.idle, "measured": measured.idle if measured else {}},
        "helps": {"predicted": [asdict(help) for help in e.helps]},
        "k_sensitivity": asdict(e.k_sensitivity) if e.k_sensitivity else None,
        "profiled": asdict(e.profile) | {"alpha": e.profile.alpha} if e.profile else None,
        "units": [_unit_values(e, unit) for unit in sorted({row.unit for row in e.plan.rows})],
        "rules": {name: {"k": plan.k, "predicted": plan.predicted} for name, plan in e.rules.items()},
        "memory": _memory_values(e),
        "step_memory": [asdict(point) for point in step_memory(e)],
        "startup": {"measured": asdict(e.startup)} if e.startup else None,
        "node_runs": e.node_runs,
        "not_offloaded": e.not_offloaded,
        "guesses": asdict(e.guesses) if e.guesses else None,
        "early": asdict(e.early) | {"tried": e.early_tried} if e.early else None,
        "finish": {"measured": asdict(measured.finish)} if measured and measured.finish else None,
        "spent": {"measured": e.spent_us},
        "sources": SOURCES,
    }


def _memory_values(e: Explained) -> dict[str, Any]:
    measured = asdict(e.memory)
    return {"estimated": measured.pop("estimate"), "measured": measured}


def _unit_values(e: Explained, unit: int) -> dict[str, Any]:
    shares = e.plan.shares(unit)
    profiled = e.profile.units[unit] if e.profile else None
    return {
        "index": unit,
        "name": shares[0].unit_name,
        "params": sum(share.numel for share in shares),
        "placement": place_of(e.plan, unit),
        "reason": reason_of(e.plan, unit),
        "profiled": {name: getattr(profiled, name) for name in TIMES} if profiled else None,
        "predicted": {"stall_us": e.schedule.stalls_us[unit]} if e.schedule else None,
        "measured": _unit_measured(e, unit),
    }


def _unit_measured(e: Explained, unit: int) -> dict[str, float | None] | None:
    if e.measured is None:
        return None
    return {name: getattr(e.measured, name)[unit] for name in ("forward_us", "backward_us", "stall_us", "cpu_update_us")}
