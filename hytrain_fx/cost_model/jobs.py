"""A plan as jobs: the pieces of each task of one step, and what each waits for.

    updated by the CPU      gradient -> d2h -> cpu_update -> h2d -> next forward                    chunk by chunk
    updated on the device   gradient -> gpu_update -> next forward
    streamed                commit -> stream_in; stream_in and gradient -> gpu_update -> next forward, stream_out
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from hytrain_fx.cost_model.discipline import CommitAt, Discipline
from hytrain_fx.cost_model.host_memory import traffic_bytes
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import RESOURCE_OF, Resource, TaskId, TaskKind

# Played are at most so many chunks, of streamed shares and others, and pieces of computing: a plan must be predicted in milliseconds.
_MOST_STREAMED, _MOST_CHUNKS, _MOST_PIECES = 300, 2000, 300
# Least slots: one chunk coming in, one updated, one going out.
_LEAST_SLOTS = 3
# Urgencies: streamed updates run beside computing on a stream of their own, resident ones fill the device's waits.
_STREAMED_UPDATE, _COMPUTE, _COPY, _LATE = -1, 0, 1, 2


@dataclass(eq=False)
class Job:
    """A piece of a task: runs on its resource for `us` once all jobs before it are done; the lowest urgency goes first.

    `host_bytes` is what it reads and writes of host memory.
    """

    task: TaskId
    us: float
    urgency: tuple[int, ...]
    waits_for: int = 0
    host_bytes: float = 0.0
    then: list[Job] = field(default_factory=list)
    done: bool = False

    @property
    def resource(self) -> Resource:
        """What it runs on."""
        return RESOURCE_OF[self.task.kind]

    def after(self, *jobs: Job) -> None:
        """Let it wait for these too."""
        for job in jobs:
            job.then.append(self)
            self.waits_for += 1


@dataclass(eq=False)
class Load(Job):
    """A streamed chunk's way in: it needs a staging slot, and is wanted at once when its gradient is there."""

    gradient: Job | None = None
    taken: bool = False


@dataclass(frozen=True)
class StepJobs:
    """All jobs of one step, and how many staging slots the streamed chunks share."""

    jobs: list[Job]
    slots: int


def step_jobs(profile: Profile, plan: Plan, discipline: Discipline) -> StepJobs:
    """The jobs of one step from the start of a backward to the end of the next forward.

    Raises PlanError for a streamed share whose unit has no streaming times, and under the barrier "zero_offload".
    """
    streamed = [row for row in plan.rows if row.placement == Placement.STREAM]
    chunk_params, slots = _staging(streamed, discipline)
    piece_us = _piece_us(profile, streamed, chunk_params)
    whole_chunk = max(discipline.chunk_params, profile.params // _MOST_CHUNKS) if discipline.chunk_params else None
    backward = {u.index: _pieces(TaskKind.BACKWARD, u, u.backward_us, piece_us) for u in reversed(profile.units)}
    forward = {u.index: _pieces(TaskKind.FORWARD, u, u.forward_us, piece_us) for u in profile.units}
    jobs = [piece for pieces in (*backward.values(), *forward.values()) for piece in pieces]
    for before, after in itertools.pairwise(jobs):
        after.after(before)
    last_backward, commit = backward[0][-1], _commit(jobs, backward, profile.commit_us, discipline.commit_at)
    sends = _commit(jobs, backward, profile.commit_us, "backward_start") if discipline.early_weights else commit
    stages: dict[TaskKind, list[Job]] = {kind: [] for kind in TaskKind}
    for row in plan.rows:
        unit, gradient = profile.units[row.unit], backward[row.unit][-1]
        due = forward[0 if discipline.barrier != "none" else row.unit][0]
        if row.placement == Placement.STREAM:
            jobs += _streamed(unit, row, chunk_params, gradient, commit, due, discipline)
            continue
        for chain in _chains(unit, row, whole_chunk):
            _gate(chain, gradient, last_backward, commit, sends, discipline)
            due.after(chain[-1])
            jobs += chain
            for job in chain:
                stages[job.task.kind].append(job)
    if discipline.barrier == "zero_offload":
        jobs += _fences(stages)
    return StepJobs(jobs, slots)


def _commit(jobs: list[Job], backward: dict[int, list[Job]], commit_us: float, commit_at: CommitAt) -> Job | None:
    """The piece of the backward with whose end the step is committed; None where that is before anything could be updated."""
    pieces = jobs[: sum(map(len, backward.values()))]
    if commit_at == "backward_end":
        return pieces[-1]
    ends_us = itertools.accumulate(piece.us for piece in pieces)
    return next((piece for piece, end_us in zip(pieces, ends_us, strict=True) if end_us >= commit_us), pieces[-1]) if commit_us else None


def _staging(streamed: list[PlanRow], discipline: Discipline) -> tuple[int, int]:
    """Parameters in a played chunk and the number of slots: those of the runtime, coarser where there would be too many chunks."""
    numel = sum(row.numel for row in streamed)
    chunk_params = max(discipline.staging_params, math.ceil(numel / _MOST_STREAMED))
    held = discipline.staging_params * discipline.staging_slots
    return chunk_params, max(min(_LEAST_SLOTS, discipline.staging_slots), held // chunk_params)


def _piece_us(profile: Profile, streamed: list[PlanRow], chunk_params: int) -> float | None:
    """Length of the pieces that computing is cut into, so that streamed updates run beside it; None where nothing is streamed."""
    if not streamed:
        return None
    compute_us = profile.forward_us + profile.backward_us
    chunk_us = max(chunk_params / profile.units[row.unit].params * profile.units[row.unit].stream_in_us for row in streamed)
    return max(chunk_us, compute_us / _MOST_PIECES)


def _pieces(kind: TaskKind, unit: UnitProfile, us: float, piece_us: float | None) -> list[Job]:
    count = max(1, math.ceil(us / piece_us)) if piece_us else 1
    return [Job(TaskId(kind, unit.index), us / count, (_COMPUTE,)) for _ in range(count)]


def _streamed(
    unit: UnitProfile, row: PlanRow, chunk_params: int, gradient: Job, commit: Job | None, due: Job, discipline: Discipline
) -> Iterator[Job]:
    if not unit.can_stream:
        raise PlanError(f"unit {unit.index} ({unit.name}) has a streamed share, but its profile has no times for streaming "
                        f"(stream_in_us={unit.stream_in_us}, stream_out_us={unit.stream_out_us}); measure them or place it elsewhere")
    if discipline.barrier == "zero_offload":
        raise PlanError(f"unit {unit.index} ({unit.name}) has a streamed share; nothing is streamed under the barrier \"zero_offload\"")
    chunks = math.ceil(row.numel / chunk_params)
    share = row.numel / unit.params / chunks
    for chunk in range(chunks):
        key = (unit.index, row.begin, chunk)
        load = Load(TaskId(TaskKind.STREAM_IN, unit.index), unit.stream_in_us * share, (_COPY, *key),
                    host_bytes=share * traffic_bytes(unit, TaskKind.STREAM_IN), gradient=gradient)
        update = Job(TaskId(TaskKind.GPU_UPDATE, unit.index), unit.gpu_update_us * share, (_STREAMED_UPDATE, *key))
        store = Job(TaskId(TaskKind.STREAM_OUT, unit.index), unit.stream_out_us * share, (_LATE, *key),
                    host_bytes=share * traffic_bytes(unit, TaskKind.STREAM_OUT))
        update.after(load, gradient)
        store.after(update)
        due.after(update)
        if commit is not None:  # the engine loads states of committed rows only
            load.after(commit)
        yield from (load, update, store)


def _chains(unit: UnitProfile, row: PlanRow, chunk_params: int | None) -> Iterator[list[Job]]:
    """The jobs of each chunk of a share, in the order in which they follow one another."""
    times = {TaskKind.GPU_UPDATE: unit.gpu_update_us} if row.placement == Placement.GPU else {
        TaskKind.D2H: unit.d2h_us, TaskKind.CPU_UPDATE: unit.cpu_update_us, TaskKind.H2D: unit.h2d_us}
    chunks = math.ceil(row.numel / chunk_params) if chunk_params else 1
    share = row.numel / unit.params / chunks
    for chunk in range(chunks):
        chain = [Job(TaskId(kind, unit.index), us * share, (_COPY, unit.index, row.begin, chunk),
                     host_bytes=share * traffic_bytes(unit, kind)) for kind, us in times.items()]
        for before, after in itertools.pairwise(chain):
            after.after(before)
        yield chain


def _gate(chain: list[Job], gradient: Job, last_backward: Job, commit: Job | None, sends: Job | None, discipline: Discipline) -> None:
    """When a chunk may start: its gradient for the copy out; the commit for the update, or `sends` for the copy back of an early one."""
    chain[0].after(last_backward if discipline.barrier == "zero_offload" else gradient)
    if discipline.barrier == "zero_offload":
        return
    by_cpu = {TaskKind.H2D: sends} if discipline.early_updates else {TaskKind.CPU_UPDATE: commit}
    gates = by_cpu | {TaskKind.GPU_UPDATE: commit}
    for job in chain:
        if (gate := gates.get(job.task.kind)) is not None:
            job.after(gate)


def _fences(stages: dict[TaskKind, list[Job]]) -> list[Job]:
    """Empty jobs that keep each stage behind all of the one before it."""
    fences = []
    for before, after in ((TaskKind.D2H, TaskKind.CPU_UPDATE), (TaskKind.CPU_UPDATE, TaskKind.H2D)):
        if stages[before]:
            fence = Job(TaskId(before, stages[before][-1].task.unit), 0.0, (_LATE,))
            fence.after(*stages[before])
            for job in stages[after]:
                job.after(fence)
            fences.append(fence)
    return fences
