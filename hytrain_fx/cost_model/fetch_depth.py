"""How many units ahead of need weights are fetched from the host, or gathered from all ranks.

Fewer units ahead take less of the device's memory; more hide longer copies, and copies that come
late. More of shards also have the launching thread wait earlier for updates. The simulator is asked
for the most that fit, and from none on for the fewest that do as well; in coarse pieces, as the
launching thread waits for the answer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.fetches import exposed_fetch_us, slot_sizes, weight_slots_bytes
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.ir.figures import bytes_text, time_text
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule

MOST_AHEAD = 8
"""The most units ahead that are tried."""
SLOWER = 1.25
"""Fetches are taken to last so many times as long as measured: a copy that is late holds the device
up, one that is early costs nothing but memory."""
_CHUNKS = 240  # of a model that is played for this
_CLOSE = 1.01  # to the least exposed time
_NOTHING = 0.001  # of the step: exposed times closer than this are the same


@dataclass(frozen=True, slots=True)
class FetchDepth:
    """A solved depth. Its text is one sentence.

    ahead            units brought ahead of need
    exposed_us       how long the device then waits for fetches in a step, predicted; of weights in
                     shards for updates too
    least_us         the same with the most units that fit; of shards the least of all that do
    slots_bytes      device memory of the slots
    limit_bytes      what they may take; None = no limit
    capped           a depth that is better does not fit
    gathers          weights are in shards
    """

    ahead: int
    exposed_us: float
    least_us: float
    slots_bytes: int
    limit_bytes: int | None
    capped: bool
    gathers: bool = False

    def __str__(self) -> str:
        units = "1 unit is" if self.ahead == 1 else f"{self.ahead} units are"
        what = "weights and updates" if self.gathers else "weights"
        waits = f"the device then waits {time_text(self.exposed_us)} a step for {what} (predicted)"
        why = (f"more do not fit the {bytes_text(self.limit_bytes)} that slots may take" if self.capped and self.limit_bytes is not None
               else f"{'another number' if self.gathers else 'more'} would save less than 1% of that")
        return f"{units} brought ahead of need, in slots of {bytes_text(self.slots_bytes)}: {waits}, {why}"


def fetch_depth(profile: Profile, plan: Plan, discipline: Discipline, limit_bytes: int | None = None) -> FetchDepth | None:
    """The fewest units ahead that expose at most 1% more than as many as fit, up to MOST_AHEAD.

    limit_bytes    device memory of the slots; None = no limit. With none ahead they take what they
                   must.

    Of weights in shards, at most 1% more than any number that fits, and waits for updates count.

    None where no weights come to slots under the plan. Raises PlanError as `simulate` does.
    """
    nbytes = slot_sizes(profile, plan)
    if not nbytes:
        return None
    slower = replace(profile, units=tuple(replace(u, fetch_us=SLOWER * u.fetch_us, gather_us=SLOWER * u.gather_us) for u in profile.units))
    if discipline.chunk_params is not None:
        discipline = replace(discipline, chunk_params=max(discipline.chunk_params, profile.params // _CHUNKS))

    @functools.cache
    def exposed_us(ahead: int) -> tuple[float, float]:
        """And what of it is nothing."""
        schedule = simulate(slower, plan, replace(discipline, units_ahead=ahead))
        return waits_us(schedule), _NOTHING * schedule.makespan_us

    def waits_us(schedule: Schedule) -> float:
        return schedule.stall_us if profile.gathers else exposed_fetch_us(schedule)

    sizes = {ahead: weight_slots_bytes(nbytes, ahead) for ahead in range(min(MOST_AHEAD, len(nbytes) - 1) + 1)}
    fit = [ahead for ahead, size in sizes.items() if not ahead or limit_bytes is None or size <= limit_bytes]
    least_us, nothing_us = min(map(exposed_us, fit)) if profile.gathers else exposed_us(fit[-1])
    enough_us = max(_CLOSE * least_us, least_us + nothing_us)
    ahead = next(ahead for ahead in fit if exposed_us(ahead)[0] <= enough_us)
    capped = exposed_us(max(sizes))[0] < least_us - nothing_us
    found_us = waits_us(simulate(profile, plan, replace(discipline, units_ahead=ahead)))
    return FetchDepth(ahead, found_us, least_us, sizes[ahead], limit_bytes, capped, profile.gathers)
