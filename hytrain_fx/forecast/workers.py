"""With how many of a host's workers a step is predicted to be shortest.

Updates and copies that together want more than the host's memory gives are all slower by the same
factor (cost_model/play.py). So workers take bandwidth from copies: from states that visit the
device, and from weights that are fetched. With fewer workers the step may be shorter. Cores that
are not used cost nothing, so a plan is solved for several numbers of workers:

    all        what a run takes where the option `workers` is left out
    filling    as many as fill the host's memory alone: more update no faster, and take from copies
    fewer      each number below that, as long as one of them may gain. So a host with more workers
               tries all that another does

With too few to fill the memory, it also gives less to all together: updates and copies get in each
other's way before it is full. Measured on an H200's host, beside copies both ways that take 99 GB/s
alone (docs/measurements.md, "What limits each case"):

    workers           14    11     9          14    12     8  (torch's kernel)
    GB/s, together   199   186   177         215   211   176
    as here                186   176               205   182

Fewer are taken only where they gain 1% (LEAST_GAIN_SHARE), as with streaming.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, combinations
from typing import Final, NamedTuple

from hytrain_fx.cost_model.host_memory import bytes_per_us, traffic_bytes
from hytrain_fx.errors import PlanError
from hytrain_fx.forecast.device import DeviceSpec
from hytrain_fx.forecast.ranks import Ranks
from hytrain_fx.ir.figures import time_text
from hytrain_fx.ir.limits import LEAST_GAIN_SHARE
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import TaskKind

UPDATES_PER_WORKER: Final = 5.9e9 / 14
"""Parameters a second of one worker where their number is not known: as on the H200's host."""
_ENOUGH = 1 / (1 - LEAST_GAIN_SHARE)
_SHARED_EXPONENT: Final = 0.6  # fits the measured rates above

Solve = Callable[[Profile], Plan]


def workers_of_rank(device: DeviceSpec, ranks: Ranks) -> int:
    """Threads of each rank that together update at the device's `cpu_update_params_per_s`."""
    known = device.workers or round(device.cpu_update_params_per_s / UPDATES_PER_WORKER)
    return max(1, known // ranks.gpus)


def filling_workers(profile: Profile, present: int) -> int:
    """Of the `present` workers that `profile` has, the fewest that fill the host's memory alone.

    All of them, where they do not, or where its bandwidth is not known.
    """
    rate, update_us = bytes_per_us(profile), profile.cpu_update_us
    moved = sum(traffic_bytes(unit, TaskKind.CPU_UPDATE) for unit in profile.units)
    if rate is None or not moved or not update_us:
        return present
    return max(1, min(present, math.ceil(present * rate * update_us / moved - 1e-9)))


def with_best_workers(profile: Profile, present: int, solve: Solve, *, fewer: bool = False, k: int | None = None) -> Plan:
    """The plan that `solve` makes for the number of workers with which its step is shortest.

    profile   its CPU updates are those of all `present` workers
    fewer     numbers below those that fill the memory are tried too: a plan for each of them
    k         all plans have it, and stream nothing; None: they may differ

    Of numbers that are within 1% of the best it is the largest. `inputs["workers"]` of the plan
    says how many; a note does where it is not all. Raises PlanError as `solve` does for all.
    """
    filling = filling_workers(profile, present)
    made, used = {present: solve(profile)}, present
    for count in range(filling, 0 if fewer else filling - 1, -1):
        if count in made:
            continue
        slower = _with_workers(profile, present, count, filling)
        if made[used].predicted["step_us"] <= _ENOUGH * least_step_us(slower, k):
            break  # nor does any smaller number gain enough
        with suppress(PlanError):
            made[count] = solve(slower)
            used = _chosen(made)
    return _told(made, used, present)


def _chosen(made: dict[int, Plan]) -> int:
    return max(count for count, plan in made.items() if plan.predicted["step_us"] <= _enough_us(made))


def _enough_us(made: dict[int, Plan]) -> float:
    return _ENOUGH * min(plan.predicted["step_us"] for plan in made.values())


def _told(made: dict[int, Plan], used: int, present: int) -> Plan:
    plan = made[used]
    inputs = {**plan.inputs, "workers": float(used)}
    if used == present:
        return replace(plan, inputs=inputs)
    note = (f"predicted with {used} of {present} workers, compile(..., workers={used}): with all of them copies have less of the host's "
            f"memory, and the step would take {time_text(made[present].predicted['step_us'])}")
    return replace(plan, inputs=inputs, notes=(*plan.notes, note))


def _with_workers(profile: Profile, present: int, count: int, filling: int) -> Profile:
    """The profile with the CPU updates of `count` of its `present` workers.

    Updates take longer by as much as there are fewer. That is what the cores give: what the
    memory gives is shared out as the step is played. `filling` of them fill it alone.
    """
    units = tuple(replace(unit, cpu_update_us=unit.cpu_update_us * present / count) for unit in profile.units)
    return replace(profile, units=units, host_memory_gb_per_s=memory_beside(profile, count / filling))


def memory_beside(profile: Profile, share: float) -> float | None:
    """GB/s of the host's memory for copies and updates together; None where it is not known.

    share   of the workers that fill the memory alone: with 1 and more it is all that it has, with
            none what copies both ways take, and between them a power of `share` (above)
    """
    all_gb = profile.host_memory_gb_per_s
    if all_gb is None:
        return None
    copies_gb = profile.node_ranks * max((_copies_bytes_per_us(unit) for unit in profile.units), default=0.0) / 1e3
    missing = 1 - float(min(share, 1.0) ** _SHARED_EXPONENT)
    return all_gb - max(all_gb - copies_gb, 0.0) * missing


def _copies_bytes_per_us(unit: UnitProfile) -> float:
    """Of copies both ways at once."""
    times_us = ((unit.stream_bytes, unit.stream_in_us), (unit.stream_bytes, unit.stream_out_us)) if unit.can_stream else (
        (unit.grad_bytes, unit.d2h_us), (unit.grad_bytes, unit.h2d_us))
    return sum(moved / us for moved, us in times_us if us)


# ---- A bound: no plan of the profile is shorter ----


def least_step_us(profile: Profile, k: int | None = None) -> float:
    """No plan of the profile has a shorter step, whatever is on the device and whatever streamed.

    With a `k` none that has it and streams nothing.

    Each lane must do its work within a step: the device, the CPU, the link to the device, the
    host's memory. With a share y streamed each one's work is a straight line in y.
    """
    rate, bubble_us = bytes_per_us(profile), profile.bubble_us
    on_device = list(accumulate((u.gpu_update_us for u in profile.units), initial=0.0))
    rest = list(accumulate(map(_work, reversed(profile.units)), _sum, initial=_Work()))[::-1]  # of the units from k on
    ks, may_stream = (range(len(rest)), profile.can_stream) if k is None else (range(k, k + 1), False)
    return min(_lowest(tuple(_lanes(profile.compute_us - bubble_us, on_device[k], on_device[-1], rest[k], rate, may_stream)))
               for k in ks)


class _Work(NamedTuple):
    """Of units not on the device, updated by the CPU or streamed: times on lanes, and bytes."""

    cpu_us: float = 0.0
    reload_us: float = 0.0
    stream_us: float = 0.0
    cpu_bytes: float = 0.0
    stream_bytes: float = 0.0


def _work(u: UnitProfile) -> _Work:
    kinds = (TaskKind.D2H, TaskKind.CPU_UPDATE, TaskKind.H2D)
    return _Work(u.cpu_update_us, u.reloaded_share * u.h2d_us, u.stream_in_us, sum(traffic_bytes(u, kind) for kind in kinds),
                 traffic_bytes(u, TaskKind.STREAM_IN))


def _sum(one: _Work, other: _Work) -> _Work:
    return _Work(*map(operator.add, one, other))


def _lanes(
    compute_us: float, resident_us: float, all_us: float, rest: _Work, rate: float | None, can_stream: bool
) -> Iterator[tuple[float, float]]:
    """Each lane's work with nothing streamed, and with all of the rest."""
    works = [(compute_us + resident_us, compute_us + all_us), (rest.cpu_us, 0.0), (rest.reload_us, rest.stream_us)]
    works += [] if rate is None else [(rest.cpu_bytes / rate, rest.stream_bytes / rate)]
    for none, streamed in works:
        yield none, streamed if can_stream else none


def _lowest(lines: Sequence[tuple[float, float]]) -> float:
    """The lowest point of the highest of lines over 0..1, each given by its values at both ends."""
    at = [0.0, 1.0]
    for (low, high), (other_low, other_high) in combinations(lines, 2):
        slope = (high - low) - (other_high - other_low)
        if slope and 0 < (crossing := (other_low - low) / slope) < 1:
            at.append(crossing)
    return min(max(low + y * (high - low) for low, high in lines) for y in at)
