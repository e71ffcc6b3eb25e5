"""What hytrain_fx tells of the steps it ran.

The plan in force, what was predicted, what it holds, how it started.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from hytrain_fx import explain
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.ir.plan import Placement


def about(model: nn.Module) -> dict[str, Any]:
    """Plan, prediction, memory in use, engine and start-up of a compiled model, as JSON."""
    session, explanation = session_of(model), explain(model)
    plan = explanation.plan
    params = sum(plan.numel(placement) for placement in Placement)
    told = {
        "plan": {
            "k": plan.k,
            "units": len(session.units),
            "source": plan.source,
            "share": {str(placement): round(plan.numel(placement) / params, 4) for placement in Placement},
            "predicted": dict(plan.predicted),
            "plans_made": len(explanation.history),
            "shares_by_plan": [round(streamed_share(plan), 3) for plan in explanation.history],
            "binds": explanation.binds,
            "notes": list(plan.notes),
            "planning": str(session.planning.controller.standing),
            "read_s": round(session.planning.read_us / 1e6, 3),
            "solve_s": round(session.planning.solve_us / 1e6, 3),
        },
        "predicted_step_s": round(plan.predicted["step_us"] / 1e6, 4) if "step_us" in plan.predicted else None,
        "engine": {"name": explanation.engine, "workers": explanation.workers},
        "memory_in_use": asdict(explanation.memory),
        "guesses": asdict(session.engine.guess_counts()),
        "early": asdict(session.engine.early_counts()),
        "early_tried": session.foresight.tried,
        "ends": asdict(session.engine.finish_times()),
        "not_offloaded": len(explanation.not_offloaded),
    }
    if explanation.startup is not None:
        startup = explanation.startup
        told["startup"] = {**asdict(startup), "own_us": startup.own_us, "total_us": startup.total_us}
    return told
