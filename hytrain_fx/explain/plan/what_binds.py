"""What sets the length of the predicted step, in one sentence with its figures."""

from __future__ import annotations

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.reasons import RESOURCE_WORDS, STREAMED_WORDS
from hytrain_fx.cost_model.windows import windows_under
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule

# Waits and device updates below this share of the step are not worth a word.
_NOTHING = 0.01


def binding_constraint(profile: Profile, plan: Plan, schedule: Schedule, discipline: Discipline) -> str:
    """What sets the length of the step: computing, updates on the device, CPU updates, or one direction of the link."""
    gpu_update_us = sum(row.numel / profile.units[row.unit].params * profile.units[row.unit].gpu_update_us
                        for row in plan.rows if row.placement != Placement.CPU)
    compute = f"forward and backward on the device ({time_text(profile.forward_us + profile.backward_us)})"
    exposed_us = schedule.makespan_us - profile.forward_us - profile.backward_us
    if exposed_us <= _NOTHING * schedule.makespan_us:
        return f"{compute}: updates add {time_text(max(exposed_us, 0.0))} to a step"
    streamed, by_cpu = plan.numel(Placement.STREAM), plan.numel(Placement.CPU)
    windows = windows_under(discipline, profile, guard=1.0).streaming(streamed / max(streamed + by_cpu, 1))
    tightest = windows.tightest(plan.k)
    if tightest is None or schedule.stall_us <= gpu_update_us:
        return f"updates on the device: they take {time_text(gpu_update_us)} of the step"
    units = range(plan.k, tightest.last + 1)
    demands_us = {resource: sum(costs[unit] for unit in units) for resource, costs in windows.costs_us.items()}
    longest = max(demands_us, key=demands_us.__getitem__)  # all three stages share the window of the tightest units
    span = f"units {plan.k}..{tightest.last}" if len(units) > 1 else f"unit {plan.k}"
    waits = f"the forward waits {time_text(schedule.stall_us)}"
    words = STREAMED_WORDS if streamed else RESOURCE_WORDS
    return f"{words[longest]} of {span}: they take {time_text(demands_us[longest])}, {waits}"
