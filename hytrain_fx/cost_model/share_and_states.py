"""Where states rest and what the CPU trains of a batch, solved together.

The cores update or train, and host memory serves both: the same rows of `ShareTimes`. So a plan
with more states on the device may be slower by itself, and leaves the CPU more of a batch. For each
plan that is tried the best share is solved (`best_share`). Tried are

    the plan that is solved without a share
    all units updated on the device, none, and numbers of leading units between, within memory
    those around the best of these

The one with the shortest step is the answer, if that is shorter by LEAST_GAIN than the plan alone
has it, with a share or without one. So the answer is never worse than either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, CpuShare, ShareTimes, best_share
from hytrain_fx.cost_model.host_memory import bytes_per_us, cpu_bytes
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile

_SUM_BYTES = 3 * HALF_BYTES  # of host memory a parameter: two gradients read, their sum written
_PASSES = 3  # forward, and two products for each in the backward: each reads the weights or writes their gradients
_FIRST_TRIED = 8  # numbers of units on the device, beside none

PlanAt = Callable[[int], Plan]


@dataclass(frozen=True, slots=True)
class ShareRates:
    """What a share takes that no plan changes.

    sequences         of a batch
    cpu_sequence_us   forward and backward of one of them on the CPU, by all cores that train
    launch_us         until the device's part is launched
    clips             whether the loop takes norms of gradients: sums on the host come to the device
    join_us           of adding the gradients, beside what copies and sums take
    around_us         of a step, beside what is predicted
    """

    sequences: int
    cpu_sequence_us: float
    launch_us: float = 0.0
    clips: bool = False
    join_us: float = 0.0
    around_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Shared:
    """A plan, and the share of a batch that suits it. `times` are those under the plan."""

    plan: Plan
    times: ShareTimes
    share: CpuShare


def times_under(profile: Profile, plan: Plan, rates: ShareRates) -> ShareTimes:
    """What a step takes of each resource with these updates.

    profile   of a whole batch on the device
    plan      with its prediction
    """
    by_cpu = {unit.index: 0 for unit in profile.units}
    for row in plan.rows:
        if row.placement is Placement.CPU:
            by_cpu[row.unit] += row.numel
    parts = [(unit, by_cpu[unit.index] / unit.params) for unit in profile.units]
    params, on_host = profile.params, sum(by_cpu.values())
    up_us, down_us = (sum(us) / params for us in ([u.h2d_us for u in profile.units], [u.d2h_us for u in profile.units]))
    rate = bytes_per_us(profile)

    def moved_us(nbytes: float) -> float:
        return nbytes / rate if rate else 0.0

    sums_us = up_us * (params - on_host) + moved_us(_SUM_BYTES * on_host) + (up_us * on_host if rates.clips else 0.0)
    times = ShareTimes(
        rates.sequences,
        device_us=profile.forward_us + profile.backward_us,
        cpu_sequence_us=rates.cpu_sequence_us,
        begin_us=rates.launch_us + down_us * (params - on_host),
        update_us=sum(part * unit.cpu_update_us for unit, part in parts),
        join_us=rates.join_us + sums_us,
        host_us=moved_us(sum(part * cpu_bytes(unit) for unit, part in parts)),
        share_host_us=moved_us(2 * HALF_BYTES * (params + on_host)),
        sequence_host_us=moved_us(HALF_BYTES * _PASSES * params),
    )
    return replace(times, around_us=rates.around_us + max(0.0, plan.predicted["step_us"] - times.step_us(0)))


def solve_together(profile: Profile, rates: ShareRates, alone: Plan, plan_at: PlanAt) -> Shared:
    """The plan and the share with the shortest step; the plan alone where another gains too little.

    alone     solved without a share
    plan_at   the plan with so many leading units updated on the device, or as many as memory
              allows, with its prediction. It may raise PlanError where none fits

    Raises ConfigError as `best_share` does.
    """
    units = len(profile.units)
    tried: dict[int, Shared] = {-1: _with_share(profile, rates, alone)}  # by k; -1: solved alone

    def try_all(numbers: Iterable[int]) -> None:
        for k in numbers:
            if 0 <= k <= units and k not in tried:
                with suppress(PlanError):
                    tried[k] = _with_share(profile, rates, plan_at(k))

    try_all(sorted({round(units * part / _FIRST_TRIED) for part in range(_FIRST_TRIED + 1)}))
    best = min(tried, key=lambda k: tried[k].share.step_us)
    apart = max(1, units // _FIRST_TRIED)
    around = best if best >= 0 else alone.k
    try_all(range(around - apart, around + apart + 1))
    by_itself = tried[-1]
    sharing = [of for of in tried.values() if of.share.by_cpu]
    found = min(sharing, key=lambda of: of.share.step_us, default=by_itself)
    if found.share.step_us > (1 - LEAST_GAIN) * by_itself.share.step_us:
        return by_itself
    return replace(found, share=replace(found.share, without_us=by_itself.share.without_us))


def _with_share(profile: Profile, rates: ShareRates, plan: Plan) -> Shared:
    times = times_under(profile, plan, rates)
    return Shared(plan, times, best_share(times))
