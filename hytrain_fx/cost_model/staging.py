"""The streamer's choice, played: which streamed chunk gets the next free staging slot.

The lowest unit whose gradient is there goes first, as everywhere. Where no gradient waits, states of the highest unit that is not
loaded yet are fetched ahead: its gradient comes next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator

from hytrain_fx.cost_model.jobs import Job, Load
from hytrain_fx.ir.task_graph import TaskKind


class Staging:
    """`slots` slots for the loads among `jobs`: `arrive` and `finish` tell what happened, `taken` hands out what may be copied now."""

    def __init__(self, slots: int, jobs: Iterable[Job]) -> None:
        self._free = slots
        self._of_gradient: dict[int, list[Load]] = defaultdict(list)
        for job in jobs:
            if isinstance(job, Load) and job.gradient is not None:
                self._of_gradient[id(job.gradient)].append(job)
        self._due: list[tuple[tuple[int, ...], int, Load]] = []  # gradient there
        self._ahead: list[tuple[tuple[int, ...], int, Load]] = []  # all; those taken meanwhile are passed over
        self._arrivals = 0

    def arrive(self, load: Load) -> None:
        """The chunk may be loaded from now on."""
        self._arrivals += 1
        load.waits_for = 0
        lane, unit, *rest = load.urgency
        heapq.heappush(self._ahead, ((lane, -unit, *rest), self._arrivals, load))
        if load.gradient is None or load.gradient.done:
            heapq.heappush(self._due, (load.urgency, self._arrivals, load))

    def finish(self, job: Job) -> None:
        """A job has ended: a gradient, or a copy back that frees its slot."""
        if job.task.kind is TaskKind.STREAM_OUT:
            self._free += 1
        for load in self._of_gradient.pop(id(job), ()):
            if not load.waits_for and not load.taken:
                self._arrivals += 1
                heapq.heappush(self._due, (load.urgency, self._arrivals, load))

    def taken(self) -> Iterator[tuple[Load, tuple[int, ...]]]:
        """Loads that have just been given a slot, with their urgency on the link: those fetched ahead let weights pass."""
        while self._free:
            load = self._next(self._due)
            urgency = load.urgency if load else ()
            if load is None:
                load = self._next(self._ahead)
                if load is None:
                    return
                lane, unit, *rest = load.urgency
                urgency = (lane + 1, -unit, *rest)
            load.taken = True
            self._free -= 1
            yield load, urgency

    @staticmethod
    def _next(heap: list[tuple[tuple[int, ...], int, Load]]) -> Load | None:
        while heap:
            _, _, load = heapq.heappop(heap)
            if not load.taken:
                return load
        return None
