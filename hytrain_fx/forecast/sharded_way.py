"""A step with `weights="sharded"`, estimated by hand beside what the simulator plays (gathers.py).

Each rank keeps its shard of every weight, and all gather whole units, one after the other, in the
forward and in the backward. A unit is asked for when the one before it begins. How long the passes
take is worked out with two lanes, computing and collectives (`passed_us`). Updates are those of the
same ranks with whole weights, played beside passes of that length. No weight is gathered after its
update: the next forward does it.
"""

from __future__ import annotations

from dataclasses import replace

from hytrain_fx.forecast.memory import DEVICE_SHARE, WEIGHT_BYTES
from hytrain_fx.forecast.peers import Passed, passed_us
from hytrain_fx.forecast.systems import OUR_SYSTEM, Case, Row
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile

_SLOTS = UNITS_AHEAD + 1  # whole units on the device: the one that is read, and those ahead


def sharded_row(case: Case) -> tuple[Row, Plan]:
    """What a step takes, and its plan. `case`: of several ranks, with whole weights."""
    kept = weights_bytes(case)
    more = WEIGHT_BYTES * case.shape.params - kept
    # The case has whole weights, so it is solved on a device that has room for them besides.
    roomy = case.remade(device=replace(case.device, memory_bytes=int(case.device.memory_bytes + more / DEVICE_SHARE)))
    roomy = replace(roomy, profile=gathering(case.profile))
    plan = roomy.plan_of(OUR_SYSTEM)
    row = roomy.row_of(OUR_SYSTEM, plan)
    memory = replace(row.memory, weights_bytes=kept)
    return replace(row, memory=memory, fits=memory.fits(case.device)), plan


def weights_bytes(case: Case) -> int:
    """Of one rank: its shards, and whole units in slots."""
    largest = max(unit.params for unit in case.shape.units)
    return WEIGHT_BYTES * (case.ranks.shard(case.shape.params) + _SLOTS * largest)


def gathering(profile: Profile) -> Profile:
    """The profile with passes that gather: each unit takes as many times as long as the pass does.

    Reduce-scatters come after the backward's gathers, on their lane; the simulator has them too.
    """
    forward_us = passed_us(Passed(u.forward_us, gather_us=u.all_gather_us) for u in profile.units)
    backward_us = passed_us(Passed(u.backward_us, gather_us=u.all_gather_us) for u in reversed(profile.units))
    forward, backward = forward_us / profile.forward_us, backward_us / profile.backward_us
    units = (replace(u, forward_us=forward * u.forward_us, backward_us=backward * u.backward_us, all_gather_us=0.0) for u in profile.units)
    return replace(profile, units=tuple(units))
