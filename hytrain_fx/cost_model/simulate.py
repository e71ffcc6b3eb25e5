"""Predict a plan's schedule by playing the task DAG through: one queue for each of device, D2H, CPU and H2D.

Each share is cut into chunks, a chunk goes copy out -> update -> copy back, and a queue may change to a more urgent
unit between chunks. The device computes whenever it can and fills its waits with its own updates. A streamed chunk waits
for a staging slot; whenever one is free it goes to the lowest unit whose gradient is there, else to the highest unit not yet
loaded. Copies of streamed states share the link with gradients and new weights, which go first. Where the bandwidth of the host's memory is
known, CPU updates and copies that run at once share it (`sharing.py`).

One period is played: from the start of a backward to the end of the next forward. It is the steady state as it stands, because
no forward ends before every update has: when the next backward starts, at most the last staging slots are still on their way
back to the host, while no gradient is. They are cut off.

When the step is committed says the profile; or, where the launching thread runs ahead, the period before it: it is played twice then, the
first time with a commit that comes as late as launching allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace

from hytrain_fx.cost_model.discipline import CHUNK_PARAMS, Barrier, CommitAt, Discipline, Order
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.jobs import Job, Load, step_jobs
from hytrain_fx.cost_model.sharing import Running
from hytrain_fx.cost_model.staging import Staging
from hytrain_fx.ir.plan import Plan, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskKind

__all__ = ["CHUNK_PARAMS", "Barrier", "CommitAt", "Discipline", "Order", "simulate"]


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
