"""Everything `explain` knows as JSON.

The unit of a figure is the end of its name, its source the name of what it is in.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hytrain_fx.explain.plan.explained import Explained
from hytrain_fx.explain.plan.report_text import SOURCES
from hytrain_fx.explain.plan.text import place_of, reason_of
from hytrain_fx.ir.profile import TIMES


def explanation_json(e: Explained) -> str:
    """The whole explanation as JSON text."""
    return json.dumps(_values(e), indent=1)


def _values(e: Explained) -> dict[str, Any]:
    schedule, measured = e.schedule, e.measured
    return {
        "plan": asdict(e.plan),
        "history": [{"source": plan.source, "k": plan.k, "predicted": plan.predicted} for plan in e.history],
        "device": e.device,
        "engine": {"name": e.engine, "workers": e.workers},
        "optimizer": list(e.optimizer),
        "copies": e.copies,
        "nonfinite": e.nonfinite,
        "outside": list(e.outside),
        "troubles": list(e.troubles),
        "launch_queue": e.launch_queue,
        "steps_done": e.steps_done,
        "planning": asdict(e.planning) if e.planning else None,
        "step": {
            "predicted": {"step_us": schedule.makespan_us, "stall_us": schedule.stall_us} if schedule else None,
            "measured": {"step_us": measured.step_us, "steps": measured.step_count, "cpu_update_us": measured.cpu_us,
                         "stall_us": sum(measured.stall_us)} if measured else None,
        },
        "binds": e.binds,
        "idle_share": {"predicted": e.idle, "measured": measured.idle if measured else {}},
        "helps": {"predicted": [asdict(help) for help in e.helps]},
        "k_sensitivity": asdict(e.k_sensitivity) if e.k_sensitivity else None,
        "profiled": asdict(e.profile) | {"alpha": e.profile.alpha} if e.profile else None,
        "units": [_unit_values(e, unit) for unit in sorted({row.unit for row in e.plan.rows})],
        "rules": {name: {"k": plan.k, "predicted": plan.predicted} for name, plan in e.rules.items()},
        "memory": _memory_values(e),
        "startup": {"measured": asdict(e.startup)} if e.startup else None,
        "node_runs": dict(e.node_runs),
        "not_offloaded": dict(e.not_offloaded),
        "guesses": asdict(e.guesses) if e.guesses else None,
        "early": asdict(e.early) if e.early else None,
        "spent": {"measured": dict(e.spent_us)},
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
