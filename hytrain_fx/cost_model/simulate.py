"""Predict a plan's schedule by playing the task DAG through: one queue for each of device, D2H, CPU and H2D.

Each share is cut into chunks, a chunk goes copy out -> update -> copy back, and a queue may change to a more urgent
unit between chunks. The device computes whenever it can and fills its waits with its own updates. A streamed chunk waits
for a staging slot; whenever one is free it goes to the lowest unit whose gradient is there, else to the highest unit not yet
loaded. Copies of streamed states share the link with gradients and new weights, which go first. Where the bandwidth of the host's memory is
known, CPU updates and copies that run at once share it.

One period is played: from the start of a backward to the end of the next forward. It is the steady state as it stands, because
no forward ends before every update has: when the next backward starts, at most the last staging slots are still on their way
back to the host, while no gradient is. They are cut off.

When the step is committed says the profile; or, where the launching thread runs ahead, the period before it: it is played twice then, the
first time with a commit that comes as late as launching allows.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hytrain_fx.cost_model.discipline import Barrier, CommitAt, Discipline, Order
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.jobs import Job, Load, step_jobs
from hytrain_fx.ir.plan import Plan, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskKind

__all__ = ["Barrier", "CommitAt", "Discipline", "Order", "simulate"]


def simulate(profile: Profile, plan: Plan, discipline: Discipline | None = None) -> Schedule:
    """The predicted schedule of one steady step, all times in microseconds.

    Raises PlanError when the plan does not fit the profile's units, or streams a unit whose times for that are not known.
    """
    validate(plan, profile.units)
    discipline = discipline or Discipline()
    if not (discipline.runs_ahead and profile.launching_us):
        return _played(profile, plan, discipline)
    late = _played(replace(profile, commit_us=profile.launching_us), plan, discipline)
    hidden_us = late.makespan_us - _passed_us(late)
    return _played(replace(profile, commit_us=max(profile.launching_us - hidden_us, 0.0)), plan, discipline) if hidden_us > 0 else late


def _played(profile: Profile, plan: Plan, discipline: Discipline) -> Schedule:
    step = step_jobs(profile, plan, discipline)
    intervals = _Play(step.jobs, discipline.order, step.slots, bytes_per_us(profile)).run()
    end_us = max(i.end_us for i in intervals if i.task.kind == TaskKind.FORWARD)
    return Schedule(tuple(_merged(_until(end_us, intervals))), end_us, _stalls(profile, intervals))


def _passed_us(schedule: Schedule) -> float:
    """When the launching thread has passed the last wait, if it does not wait for updates."""
    kinds = (TaskKind.BACKWARD, TaskKind.D2H)
    return max(i.end_us for i in schedule.intervals if i.task.kind in kinds)


class _Play:
    """List scheduling: whenever a resource is free it takes the most urgent job that is ready."""

    def __init__(self, jobs: list[Job], order: Order, slots: int, host_bytes_per_us: float | None) -> None:
        self._jobs, self._order = jobs, order
        self._running = Running(host_bytes_per_us)
        self._ready: dict[Resource, list[tuple[tuple[int, ...], int, Job]]] = {resource: [] for resource in Resource}
        self._staging = Staging(slots, jobs)
        self._arrivals = 0

    def run(self) -> list[Interval]:
        """What ran when, in order of start."""
        busy: set[Resource] = set()
        begun: list[tuple[Job, float]] = []
        end_us: dict[Job, float] = {}
        now_us = 0.0
        for job in self._jobs:
            if not job.waits_for:
                self._arrive(job)
        while True:
            for load, urgency in self._staging.taken():
                self._enqueue(load, urgency)
            for resource, queue in self._ready.items():
                if queue and resource not in busy:
                    _, _, job = heapq.heappop(queue)
                    busy.add(resource)
                    self._running.start(job, now_us)
                    begun.append((job, now_us))
            if not self._running:
                return [Interval(job.task, job.resource, start_us, end_us[job]) for job, start_us in begun]
            now_us, ended = self._running.until_next_end(now_us)
            for done in ended:
                end_us[done] = now_us
                busy.discard(done.resource)
                self._finish(done)

    def _arrive(self, job: Job) -> None:
        """All that the job waits for is done."""
        if isinstance(job, Load):
            self._staging.arrive(job)
        else:
            self._enqueue(job, job.urgency)

    def _enqueue(self, job: Job, urgency: tuple[int, ...]) -> None:
        self._arrivals += 1
        by_urgency = self._order == "edf" or job.resource == Resource.GPU
        heapq.heappush(self._ready[job.resource], (urgency if by_urgency else urgency[:1], self._arrivals, job))

    def _finish(self, done: Job) -> None:
        done.done = True
        self._staging.finish(done)
        for job in done.then:
            job.waits_for -= 1
            if not job.waits_for:
                self._arrive(job)


def _until(end_us: float, intervals: list[Interval]) -> list[Interval]:
    """What lies before `end_us`."""
    if all(piece.end_us <= end_us for piece in intervals):
        return intervals
    return [Interval(i.task, i.resource, i.start_us, min(i.end_us, end_us)) for i in intervals if i.start_us < end_us]


def _merged(intervals: list[Interval]) -> Iterator[Interval]:
    """Pieces of one task that follow without a gap become one interval; empty ones go."""
    for resource in Resource:
        open_: Interval | None = None
        for piece in intervals:
            if piece.resource != resource or piece.duration_us == 0.0:
                continue
            if open_ and open_.task == piece.task and open_.end_us == piece.start_us:
                open_ = Interval(open_.task, resource, open_.start_us, piece.end_us)
                continue
            if open_:
                yield open_
            open_ = piece
        if open_:
            yield open_


def _stalls(profile: Profile, intervals: list[Interval]) -> tuple[float, ...]:
    """Idle time of the device right before the forward of each unit; `intervals` come in order of start."""
    stalls = [0.0] * len(profile.units)
    free_at_us, idle_us = 0.0, 0.0
    for piece in intervals:
        if piece.resource != Resource.GPU:
            continue
        idle_us += piece.start_us - free_at_us
        free_at_us = piece.end_us
        if piece.task.kind == TaskKind.FORWARD:
            stalls[piece.task.unit] += idle_us
            idle_us = 0.0
    return tuple(stalls)


# ---- Jobs that run at once share the bandwidth of the host's memory ----
#
# Copies and updates that together want more than the memory gives all become slower by the same factor. On the measured H200 machine 14
# threads of AdamW and copies both ways, 290 GB/s when each runs alone, gave 215 GB/s: AdamW at 0.73 and the copies at 0.76 of their rates.


class Running:
    """The jobs that run, each to its end; those that move host memory on a clock of their own.

    That clock is `slowness` times slower than real time while they want more bytes than the memory gives. Where its bandwidth is not known
    every job takes its own time.
    """

    def __init__(self, bytes_per_us: float | None) -> None:
        self._bytes_per_us = bytes_per_us
        self._alone: list[tuple[float, int, Job]] = []  # by real end
        self._sharing: list[tuple[float, int, Job]] = []  # by end on the clock below
        self._clock_us = 0.0
        self._started = 0

    def __bool__(self) -> bool:
        return bool(self._alone or self._sharing)

    @property
    def slowness(self) -> float:
        """Real microseconds for one of the sharing jobs' clock; 1 where the memory gives what all of them want."""
        if self._bytes_per_us is None:
            return 1.0
        return max(1.0, sum(job.host_bytes / job.us for _, _, job in self._sharing) / self._bytes_per_us)

    def start(self, job: Job, now_us: float) -> None:
        """Begin a job."""
        self._started += 1
        if self._bytes_per_us is not None and job.host_bytes and job.us:
            heapq.heappush(self._sharing, (self._clock_us + job.us, self._started, job))
        else:
            heapq.heappush(self._alone, (now_us + job.us, self._started, job))

    def until_next_end(self, now_us: float) -> tuple[float, list[Job]]:
        """When the next job ends, and all that end then, in order of their start."""
        slowness = self.slowness
        alone_us = self._alone[0][0] if self._alone else math.inf
        shared_us = now_us + (self._sharing[0][0] - self._clock_us) * slowness if self._sharing else math.inf
        end_us = min(alone_us, shared_us)
        self._clock_us = self._sharing[0][0] if shared_us <= alone_us else self._clock_us + (end_us - now_us) / slowness
        ended = [*_taken(self._alone, end_us), *_taken(self._sharing, self._clock_us)]
        return end_us, [job for _, _, job in sorted(ended, key=lambda entry: entry[1])]


def _taken(heap: list[tuple[float, int, Job]], until_us: float) -> list[tuple[float, int, Job]]:
    taken = []
    while heap and heap[0][0] <= until_us:
        taken.append(heapq.heappop(heap))
    return taken


# ---- The streamer's choice, played: which streamed chunk gets the next free staging slot ----
#
# The lowest unit whose gradient is there goes first, as everywhere. Where no gradient waits, states of the highest unit that is not
# loaded yet are fetched ahead: its gradient comes next.


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
