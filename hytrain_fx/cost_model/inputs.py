"""What a plan tells of what it was solved from: sums of the profile, and the memory it had to fit in."""

from __future__ import annotations

import math

from hytrain_fx.cost_model.budget import Budget
from hytrain_fx.ir.profile import STREAM_TIMES, Profile


def inputs_of(profile: Profile, guard: float) -> dict[str, float]:
    """What a plan tells of the profile that it was solved from: sums over units in microseconds, sizes, the guard."""
    inputs = {
        "units": float(len(profile.units)),
        "params": float(profile.params),
        "t_fwd_us": profile.forward_us,
        "t_bwd_us": profile.backward_us,
        "t_upd_cpu_us": profile.cpu_update_us,
        "t_upd_gpu_us": profile.gpu_update_us,
        "t_d2h_us": profile.d2h_us,
        "t_h2d_us": profile.h2d_us,
        "guard": guard,
        "steps_measured": float(profile.steps),
    }
    alpha = profile.alpha if math.isfinite(profile.alpha) else None
    known = {"alpha": alpha, "tokens": profile.tokens, "host_memory_gb_per_s": profile.host_memory_gb_per_s}
    if profile.can_stream:
        inputs |= {f"t_{name}": sum(getattr(u, name) for u in profile.units) for name in STREAM_TIMES}
    return inputs | {name: float(value) for name, value in known.items() if value is not None}


def budget_inputs(profile: Profile, budget: Budget) -> dict[str, float]:
    """The device memory for states, where it is limited, and how it is counted; bytes."""
    inputs = {"state_bytes_per_param": float(budget.device_state_bytes)}
    if budget.device_bytes is not None:
        inputs["budget_bytes"] = float(budget.device_bytes)
    if profile.can_stream:
        inputs["budget_counts_streamed"] = float(budget.counts_streamed)
    return inputs
