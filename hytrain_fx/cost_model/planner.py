"""From a profile to a plan: how many leading units are updated on the device, within its memory, and why.

    seed      HyTrainDNN's balance of both sides (equation.py)
    cotrain   the same with alpha = 1
    windowed  each layer's own window, from its gradient to its next use (windows.py)

Too small a k costs 1/alpha (15 to 80) times as much as one that is too large by the same amount, so CPU times are
multiplied by a guard before solving. What is predicted is simulated with the times as they are.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, get_args

from hytrain_fx.cost_model.equation import Balance, units_that_fit
from hytrain_fx.cost_model.reasons import balance_reason, capped_reason, fixed_reason, host_full_reason, windows_reason
from hytrain_fx.cost_model.simulate import Discipline, simulate
from hytrain_fx.cost_model.windows import windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlannedUnit, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Resource

Rule = Literal["seed", "cotrain", "windowed"]
STATE_BYTES_PER_PARAM = 12  # fp32 master weight and two fp32 moments
GUARD = 1.05


@dataclass(frozen=True)
class _Solution:
    """The k a rule wants, the reason it gives for a unit once k is settled, and what it notes besides."""

    k: int
    reason: Callable[[int, int], str]
    notes: tuple[str, ...] = ()


def plan(
    profile: Profile,
    *,
    rule: Rule = "windowed",
    budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
    state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    k: int | None = None,
    guard: float = GUARD,
    alpha: float | None = None,
    discipline: Discipline | None = None,
) -> Plan:
    """Solve k by `rule`, or take the `k` given, bring it within both memories, and predict the step.

    budget_bytes           device memory for optimizer states, None = no limit
    host_budget_bytes      host memory for states and slots, None = no limit
    state_bytes_per_param  what rests on the device for each parameter updated there
    alpha                  device over CPU update time, instead of the measured one of each unit
    discipline             how the runtime orders and gates updates; the default is this library's

    Raises PlanError for an unknown rule, a k outside 0..n, a guard < 1 or an alpha that is not positive,
    and when the two memories together do not hold the states.
    """
    _check(profile, rule, k, guard, alpha)
    profile = profile if alpha is None else _with_alpha(profile, alpha)
    discipline = discipline or Discipline()
    solution = _solve(profile, rule, guard, discipline) if k is None else _Solution(k, fixed_reason)
    fit = units_that_fit([u.params for u in profile.units], budget_bytes, state_bytes_per_param)
    least = _least_k(profile, host_budget_bytes, state_bytes_per_param)
    if least > fit:
        raise PlanError(f"no plan fits the memory: the host's {host_budget_bytes} bytes need the states of {least} of {len(profile.units)} "
                        f"units on the device, its {budget_bytes} bytes hold {fit}; allow more memory or train a smaller model")
    settled = max(min(solution.k, fit), least)
    notes = (*_memory_notes(solution.k, fit, least, len(profile.units), "was given" if k is not None else "would be best"), *solution.notes)

    def reason(unit: int) -> str:
        if settled <= unit < solution.k and budget_bytes is not None:
            return capped_reason(state_bytes_per_param * profile.units[unit].params, budget_bytes, fit, solution.k)
        if solution.k <= unit < settled and host_budget_bytes is not None:
            return host_full_reason(host_budget_bytes, least, solution.k)
        return solution.reason(unit, settled)

    if k is None and guard > 1:
        notes = (*notes, f"solved with CPU update times {guard:.3g} times as long as measured")
    inputs = _inputs(profile, guard, state_bytes_per_param, budget_bytes)
    draft = prefix_plan(profile.units, settled, source=rule if k is None else "fixed k", reason=reason)
    return replace(draft, inputs=inputs, notes=notes, predicted=predict(profile, draft, state_bytes_per_param, discipline))


def compare(
    profile: Profile,
    budget_bytes: int | None = None,
    *,
    state_bytes_per_param: float = STATE_BYTES_PER_PARAM,
    guard: float = GUARD,
    alpha: float | None = None,
    discipline: Discipline | None = None,
) -> dict[str, Plan]:
    """The plans of all three rules, of k=0 and of k=n, under one discipline and one budget ("k=n" is capped by it too)."""

    def solved(rule: Rule, k: int | None = None) -> Plan:
        return plan(profile, rule=rule, k=k, budget_bytes=budget_bytes, state_bytes_per_param=state_bytes_per_param,
                    guard=guard, alpha=alpha, discipline=discipline)

    plans = {rule: solved(rule) for rule in get_args(Rule)}
    return {**plans, "k=0": solved("windowed", 0), "k=n": solved("windowed", len(profile.units))}


def prefix_plan(units: Sequence[PlannedUnit], k: int, *, source: str, reason: Callable[[int], str]) -> Plan:
    """A plan with the first `k` units wholly on the device and the others on the CPU, nothing predicted.

    It needs no profile, so it also serves the first steps, before anything is measured.
    """
    if not 0 <= k <= len(units):
        raise PlanError(f"found k={k}, expected 0..{len(units)}: the model has {len(units)} units")
    rows = tuple(PlanRow(u.index, u.name, 0, u.params, Placement.GPU if u.index < k else Placement.CPU, reason(u.index)) for u in units)
    return Plan(rows, k, source)


def predict(
    profile: Profile, plan: Plan, state_bytes_per_param: float = STATE_BYTES_PER_PARAM, discipline: Discipline | None = None
) -> dict[str, float]:
    """What `plan` is expected to cost on `profile`: simulated times, and bytes by tier.

    `host_bytes` counts the states of shares not on the device and a slot for their gradients (in) and new weights (out).
    """
    schedule = simulate(profile, plan, discipline)
    on_host = sum(row.numel / profile.units[row.unit].params * profile.units[row.unit].grad_bytes
                  for row in plan.rows if row.placement != Placement.GPU)
    gpu_update_us = sum(row.numel / profile.units[row.unit].params * profile.units[row.unit].gpu_update_us
                        for row in plan.rows if row.placement == Placement.GPU)
    return {
        "step_us": schedule.makespan_us,
        "compute_us": profile.forward_us + profile.backward_us,
        "stall_us": schedule.stall_us,
        "gpu_update_us": gpu_update_us,
        "cpu_update_us": schedule.busy_us(Resource.CPU),
        "gpu_idle_share": schedule.idle_share(Resource.GPU),
        "cpu_idle_share": schedule.idle_share(Resource.CPU),
        "gpu_states_bytes": state_bytes_per_param * plan.numel(Placement.GPU),
        "host_bytes": state_bytes_per_param * (profile.params - plan.numel(Placement.GPU)) + on_host,
    }


def _solve(profile: Profile, rule: Rule, guard: float, discipline: Discipline) -> _Solution:
    if rule == "windowed":
        windows = windows_of(profile, guard=guard, chunk_params=discipline.chunk_params,
                             updates_in_backward=discipline.commit_at == "backward_start")
        return _Solution(windows.solve(), lambda unit, k: windows_reason(windows, unit, k))
    cpu = tuple(guard * u.cpu_update_us for u in profile.units)
    gpu = cpu if rule == "cotrain" else tuple(u.gpu_update_us for u in profile.units)
    balance = Balance(profile.backward_us, cpu, gpu)
    return _Solution(balance.solve(), lambda unit, k: balance_reason(balance, unit, k), _balance_notes(balance, profile))


def _balance_notes(balance: Balance, profile: Profile) -> tuple[str, ...]:
    notes = []
    if balance.phi_us(0) >= 0:
        notes.append("the backward is at least as long as all CPU updates, so the equation gives k=0; "
                     "the first unit's gradient still comes last and its update is not hidden")
    if profile.alpha >= 1:
        notes.append(f"alpha is {profile.alpha:.3g}: the device updates no faster than the CPU")
    return tuple(notes)


def _least_k(profile: Profile, host_budget_bytes: int | None, state_bytes_per_param: float) -> int:
    """The smallest k whose remaining units fit the host: a suffix of the units fits iff it is at most the longest that does."""
    if host_budget_bytes is None:
        return 0
    on_host = list(accumulate(state_bytes_per_param * u.params + u.grad_bytes for u in reversed(profile.units)))
    return len(on_host) - bisect_right(on_host, host_budget_bytes)


def _memory_notes(wanted: int, fit: int, least: int, units: int, verdict: str) -> tuple[str, ...]:
    if wanted > fit:
        return (f"capped by memory: {fit} of {units} units fit, k={wanted} {verdict}",)
    if wanted < least:
        return (f"raised by host memory: it holds {units - least} of {units} units, k={wanted} {verdict}",)
    return ()


def _with_alpha(profile: Profile, alpha: float) -> Profile:
    return replace(profile, units=tuple(replace(u, gpu_update_us=alpha * u.cpu_update_us) for u in profile.units))


def _inputs(profile: Profile, guard: float, state_bytes_per_param: float, budget_bytes: int | None) -> dict[str, float]:
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
        "state_bytes_per_param": float(state_bytes_per_param),
        "steps_measured": float(profile.steps),
    }
    known = {"alpha": profile.alpha if math.isfinite(profile.alpha) else None, "budget_bytes": budget_bytes, "tokens": profile.tokens}
    return {**inputs, **{name: float(value) for name, value in known.items() if value is not None}}


def _check(profile: Profile, rule: str, k: int | None, guard: float, alpha: float | None) -> None:
    if rule not in get_args(Rule):
        raise PlanError(f"found rule={rule!r}, expected one of {get_args(Rule)}")
    if k is not None and not 0 <= k <= len(profile.units):
        raise PlanError(f"found k={k}, expected 0..{len(profile.units)}: the model has {len(profile.units)} units")
    if not (math.isfinite(guard) and guard >= 1):
        raise PlanError(f"found guard={guard}, expected a factor >= 1 on CPU times")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise PlanError(f"found alpha={alpha}, expected device over CPU update time, > 0")
