"""Weights that rest on the host or in shards, as planning sees them: which, how long they take.

And how long all else takes that goes from rank to rank. The window itself, units in slots of the
device, is in `weights/`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import FETCHES, GATHERS, TaskKind
from hytrain_fx.runtime.device_clock import elapsed_us
from hytrain_fx.runtime.lane_times import LaneTimes, Timed


class WeightWindow(Protocol):
    """Of one session whose weights may rest on the host, or in shards of several ranks.

    ahead     units brought ahead of need
    times     when units were brought, in a recording
    """

    @property
    def ahead(self) -> int: ...
    @property
    def times(self) -> LaneTimes: ...
    @property
    def slot_bytes(self) -> int: ...  # device memory of the slots now

    def streamed_params(self, rows: Iterable[int]) -> int: ...  # of parameters whose weights rest on the host once the CPU updates them
    def gathered_params(self, rows: Iterable[int]) -> int: ...  # of parameters whose weights ranks keep in shards, all ranks' together
    def back_bytes(self) -> int: ...  # of weights that would rest on the host but for where they are updated
    def follow(self, depth: FetchDepth) -> None: ...  # bring so many ahead from now on


def with_fetches(
    profile: Profile, timed: Collection[Timed], unit_of: Mapping[int, int], link_us_per_byte: Callable[[], float]
) -> Profile:
    """The profile with the times of every unit whose weights come to slots of the device.

    A fetch by the median rate of its own copies, else of all units', else the link's. A gather by
    the best rate of its own, as others have waits for slower ranks in them; else the best of all.

        unit_of             the profile's unit of each parameter
        link_us_per_byte    of the link to the device, asked for where nothing was brought
    """
    if profile.fetches:
        rates = _rates(timed, unit_of, FETCHES)
        every = [rate for own in rates.values() for rate in own]
        other = statistics.median(every) if every else link_us_per_byte()
        units = (replace(u, fetch_us=u.fetch_bytes * (statistics.median(rates[u.index]) if rates[u.index] else other))
                 for u in profile.units)
        profile = replace(profile, units=tuple(units))
    if profile.gathers:
        gathered_us = _at_best_us(timed, unit_of, GATHERS, [u.gathered_bytes for u in profile.units])
        units = (replace(u, gather_us=us) for u, us in zip(profile.units, gathered_us, strict=True))
        profile = replace(profile, units=tuple(units))
    return profile


def with_collectives(profile: Profile, timed: Collection[Timed], unit_of: Mapping[int, int], nbytes: Sequence[int]) -> Profile:
    """The profile with the times of every unit's collectives; none where none was timed.

    Gradients are reduce-scattered, new weights that stay whole all-gathered: by the best rate of
    the unit's own, as others have waits for slower ranks in them; else the best of all.

        nbytes    of each unit's gradients, and of its weights, all ranks' together
    """
    reduced, gathered = (_at_best_us(timed, unit_of, (kind,), nbytes) for kind in (TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER))
    times = zip(profile.units, reduced, gathered, strict=True)
    units = (replace(u, reduce_scatter_us=reduced_us, all_gather_us=0.0 if u.gathered_params else gathered_us)
             for u, reduced_us, gathered_us in times)
    return replace(profile, units=tuple(units))


def _at_best_us(timed: Iterable[Timed], unit_of: Mapping[int, int], kinds: Container[TaskKind], nbytes: Sequence[int]) -> list[float]:
    """How long so many bytes of each unit take at the best rate of its own, else at that of all."""
    rates = _rates(timed, unit_of, kinds)
    best = min((min(own) for own in rates.values()), default=0.0)
    return [of_unit * min(rates[unit], default=best) for unit, of_unit in enumerate(nbytes)]


def _rates(timed: Iterable[Timed], unit_of: Mapping[int, int], kinds: Container[TaskKind]) -> Mapping[int, list[float]]:
    """Microseconds a byte of each unit's copies of these kinds."""
    rates: dict[int, list[float]] = defaultdict(list)
    for of in timed:
        if of.nbytes and of.kind in kinds and of.row in unit_of:
            rates[unit_of[of.row]].append(elapsed_us(of.begin, of.end) / of.nbytes)
    return rates
