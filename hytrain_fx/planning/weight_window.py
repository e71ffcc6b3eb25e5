"""Weights that rest on the host, as planning sees them: which they are, how long a fetch takes.

The window itself, units in slots of the device, is in `weights/`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.ir.profile import Profile
from hytrain_fx.runtime.device_clock import elapsed_us
from hytrain_fx.runtime.lane_times import LaneTimes, Timed


class WeightWindow(Protocol):
    """Of one session whose weights may rest on the host.

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
    def back_bytes(self) -> int: ...  # of weights that would rest on the host but for where they are updated
    def follow(self, depth: FetchDepth) -> None: ...  # bring so many ahead from now on


def with_fetches(
    profile: Profile, timed: Collection[Timed], unit_of: Mapping[int, int], link_us_per_byte: Callable[[], float]
) -> Profile:
    """The profile with the time of a fetch of every unit whose weights rest on the host.

    By the median rate of its own copies, else of all units', else the link's.

        unit_of             the profile's unit of each parameter
        link_us_per_byte    of the link to the device, asked for where nothing was brought
    """
    if not profile.fetches:
        return profile
    rates: dict[int, list[float]] = defaultdict(list)
    for of in timed:
        if of.nbytes and of.row in unit_of:
            rates[unit_of[of.row]].append(elapsed_us(of.begin, of.end) / of.nbytes)
    every = [rate for own in rates.values() for rate in own]
    other = statistics.median(every) if every else link_us_per_byte()
    units = (replace(u, fetch_us=u.fetch_bytes * (statistics.median(rates[u.index]) if rates[u.index] else other)) for u in profile.units)
    return replace(profile, units=tuple(units))
