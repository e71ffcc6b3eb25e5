"""Which task ran, or is predicted to run, on which resource from when to when.

A schedule covers one steady training step, from the start of the backward to the end of the next
forward: every layer of a forward waits for its own update, so all queues are empty when a backward
starts.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.task_graph import Resource, TaskId

# Two times closer than this share of the makespan count as the same instant: sums of floats differ
# in their last bits.
ROUNDING = 1e-9


_IN_ORDER_OF_TIME = attrgetter("start_us", "end_us")


class Interval(NamedTuple):
    """`task` (or a piece of it) occupies `resource` from `start_us` to `end_us`.

    A tuple, because a schedule has many: it is made fast.
    """

    task: TaskId
    resource: Resource
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        """Length of the interval in microseconds."""
        return self.end_us - self.start_us


@dataclass(frozen=True)
class Schedule:
    """Intervals of one steady step, its length, and the wait before the forward of each unit.

    `stalls_us[l]` is how long the device stood idle right before the forward of unit l. Raises
    PlanError when an interval runs backwards or past the makespan, or when a resource is used twice
    at once.
    """

    intervals: tuple[Interval, ...]
    makespan_us: float
    stalls_us: tuple[float, ...]

    def __post_init__(self) -> None:
        slack = ROUNDING * max(self.makespan_us, 1.0)
        latest_us = self.makespan_us + slack
        for task, _, start_us, end_us in self.intervals:
            if not -slack <= start_us <= end_us <= latest_us:
                raise PlanError(f"{task} runs from {start_us} to {end_us} us, expected a span inside 0..{self.makespan_us} us")
        for resource, intervals in self._by_resource.items():
            for before, after in itertools.pairwise(intervals):
                if after.start_us < before.end_us - slack:
                    raise PlanError(f"{resource} is used by {after.task} from {after.start_us} us while {before.task} "
                                    f"holds it until {before.end_us} us; a resource runs one task at a time")

    @property
    def stall_us(self) -> float:
        """Time the device waits for updates, summed over units."""
        return sum(self.stalls_us)

    def on(self, resource: Resource) -> tuple[Interval, ...]:
        """The intervals of one resource in order of time."""
        return tuple(self._by_resource.get(resource, ()))

    def of(self, task: TaskId) -> tuple[Interval, ...]:
        """The pieces of one task in order of time."""
        return tuple(sorted((i for i in self.intervals if i.task == task), key=lambda i: i.start_us))

    def busy_us(self, resource: Resource) -> float:
        """Time the resource works during the step."""
        return self._busy_us.get(resource, 0)

    def busy_share(self, resource: Resource) -> float:
        """Share 0..1 of the step in which the resource works."""
        return self.busy_us(resource) / self.makespan_us if self.makespan_us else 0.0

    def idle_share(self, resource: Resource) -> float:
        """Share 0..1 of the step in which the resource does not work."""
        return 1.0 - self.busy_share(resource)

    @functools.cached_property
    def _by_resource(self) -> dict[Resource, list[Interval]]:
        lanes: dict[Resource, list[Interval]] = defaultdict(list)
        for interval in sorted(self.intervals, key=_IN_ORDER_OF_TIME):
            lanes[interval.resource].append(interval)
        return lanes

    @functools.cached_property
    def _busy_us(self) -> dict[Resource, float]:
        busy: dict[Resource, float] = defaultdict(float)
        for _, resource, start_us, end_us in self.intervals:
            busy[resource] += end_us - start_us
        return busy
