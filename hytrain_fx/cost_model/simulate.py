"""Predict a plan's schedule by playing the task DAG through: one queue for each of device, D2H, CPU and H2D.

Each share is cut into chunks, a chunk goes copy out -> update -> copy back, and a queue may change to a more urgent
unit between chunks. The device computes whenever it can and fills its waits with its own updates. One period is played:
from the start of a backward to the end of the next forward. It is the steady state as it stands, because no forward ends
before every update has: all queues are empty when the next backward starts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow, validate
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import RESOURCE_OF, Resource, TaskId, TaskKind

Order = Literal["edf", "fifo"]
Barrier = Literal["none", "before_forward", "zero_offload"]
CommitAt = Literal["backward_start", "backward_end"]
CHUNK_PARAMS = 8 << 20


@dataclass(frozen=True)
class Discipline:
    """How the runtime orders and gates the work.

    order         "edf": lowest unit first on every queue; "fifo": in order of readiness
    barrier       "none": each layer's forward waits for its own update; "before_forward": the forward waits for all
                  (HyTrainDNN, CoTrain); "zero_offload": backward, copies, updates and copies back one after the other
    commit_at     when updates may begin: "backward_start" (as gradients arrive) or "backward_end"
    chunk_params  parameters in one piece of work, None = whole shares (then nothing is preempted)
    """

    order: Order = "edf"
    barrier: Barrier = "none"
    commit_at: CommitAt = "backward_start"
    chunk_params: int | None = CHUNK_PARAMS


@dataclass(eq=False)
class _Job:
    """A piece of a task: runs on its resource for `us` once all jobs before it are done."""

    task: TaskId
    us: float
    urgency: tuple[int, ...]
    waits_for: int = 0
    then: list[_Job] = field(default_factory=list)

    @property
    def resource(self) -> Resource:
        return RESOURCE_OF[self.task.kind]

    def after(self, *jobs: _Job) -> None:
        for job in jobs:
            job.then.append(self)
            self.waits_for += 1


def simulate(profile: Profile, plan: Plan, discipline: Discipline | None = None) -> Schedule:
    """The predicted schedule of one steady step, all times in microseconds.

    Raises PlanError when the plan does not fit the profile's units or holds a streamed share, which is not simulated.
    """
    validate(plan, profile.units)
    streamed = [row for row in plan.rows if row.placement == Placement.STREAM]
    if streamed:
        raise PlanError(f"unit {streamed[0].unit} has a streamed share, the simulator knows shares on the device and on the CPU only")
    discipline = discipline or Discipline()
    jobs = _jobs(profile, plan, discipline)
    intervals, end_us = _play(jobs, discipline.order)
    return Schedule(tuple(_merged(intervals)), end_us, _stalls(profile, intervals))


def _jobs(profile: Profile, plan: Plan, discipline: Discipline) -> list[_Job]:
    backward = [_Job(TaskId(TaskKind.BACKWARD, u.index), u.backward_us, (0,)) for u in reversed(profile.units)]
    forward = [_Job(TaskId(TaskKind.FORWARD, u.index), u.forward_us, (0,)) for u in profile.units]
    compute = backward + forward
    for before, after in itertools.pairwise(compute):
        after.after(before)
    jobs = list(compute)
    stages: dict[TaskKind, list[_Job]] = {kind: [] for kind in TaskKind}
    gradient = {job.task.unit: job for job in backward}
    for row in plan.rows:
        for chain in _chains(profile.units[row.unit], row, discipline):
            _gate(chain, gradient[row.unit], backward[-1], discipline)
            forward[0 if discipline.barrier != "none" else row.unit].after(chain[-1])
            for job in chain:
                stages[job.task.kind].append(job)
                jobs.append(job)
    if discipline.barrier == "zero_offload":
        jobs += _fences(stages)
    return jobs


def _chains(unit: UnitProfile, row: PlanRow, discipline: Discipline) -> Iterator[list[_Job]]:
    """The jobs of each chunk of a share, in the order in which they follow one another."""
    times = {TaskKind.GPU_UPDATE: unit.gpu_update_us} if row.placement == Placement.GPU else {
        TaskKind.D2H: unit.d2h_us, TaskKind.CPU_UPDATE: unit.cpu_update_us, TaskKind.H2D: unit.h2d_us}
    chunks = math.ceil(row.numel / discipline.chunk_params) if discipline.chunk_params else 1
    share = row.numel / unit.params / chunks
    for chunk in range(chunks):
        chain = [_Job(TaskId(kind, unit.index), us * share, (1, unit.index, row.begin, chunk)) for kind, us in times.items()]
        for before, after in itertools.pairwise(chain):
            after.after(before)
        yield chain


def _gate(chain: list[_Job], gradient: _Job, last_backward: _Job, discipline: Discipline) -> None:
    """When a chunk may start: its gradient for the copy out, `commit_at` for the update."""
    first, update = chain[0], chain[1] if len(chain) > 1 else chain[0]
    first.after(last_backward if discipline.barrier == "zero_offload" else gradient)
    if discipline.commit_at == "backward_end" and discipline.barrier != "zero_offload":
        update.after(last_backward)


def _fences(stages: dict[TaskKind, list[_Job]]) -> list[_Job]:
    """Empty jobs that keep each stage behind all of the one before it."""
    fences = []
    for before, after in ((TaskKind.D2H, TaskKind.CPU_UPDATE), (TaskKind.CPU_UPDATE, TaskKind.H2D)):
        if stages[before]:
            fence = _Job(TaskId(before, stages[before][-1].task.unit), 0.0, (2,))
            fence.after(*stages[before])
            for job in stages[after]:
                job.after(fence)
            fences.append(fence)
    return fences


def _play(jobs: list[_Job], order: Order) -> tuple[list[Interval], float]:
    """List scheduling: whenever a resource is free it takes the most urgent job that is ready."""
    ready: dict[Resource, list[tuple[tuple[int, ...], int, _Job]]] = {resource: [] for resource in Resource}
    running: list[tuple[float, int, _Job]] = []
    busy: set[Resource] = set()
    intervals: list[Interval] = []
    now_us, arrivals = 0.0, 0

    def enqueue(job: _Job) -> None:
        nonlocal arrivals
        arrivals += 1
        by_urgency = order == "edf" or job.resource == Resource.GPU
        heapq.heappush(ready[job.resource], (job.urgency if by_urgency else job.urgency[:1], arrivals, job))

    for job in jobs:
        if not job.waits_for:
            enqueue(job)
    while True:
        for resource in Resource:
            if resource not in busy and ready[resource]:
                _, _, job = heapq.heappop(ready[resource])
                busy.add(resource)
                arrivals += 1
                heapq.heappush(running, (now_us + job.us, arrivals, job))
                intervals.append(Interval(job.task, resource, now_us, now_us + job.us))
        if not running:
            break
        now_us = running[0][0]
        while running and running[0][0] == now_us:
            _, _, done = heapq.heappop(running)
            busy.discard(done.resource)
            for job in done.then:
                job.waits_for -= 1
                if not job.waits_for:
                    enqueue(job)
    return intervals, now_us


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
            stalls[piece.task.unit] = idle_us
            idle_us = 0.0
    return tuple(stalls)
