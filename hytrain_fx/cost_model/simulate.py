"""Predict a plan's schedule by playing the task graph through.

There is one queue for each of device, D2H, CPU, H2D and collectives.

Each share is cut into chunks, a chunk goes copy out -> update -> copy back, and a queue may change
to a more urgent unit between chunks. The device computes whenever it can and fills its waits with
its own updates. A streamed chunk waits for a staging slot; whenever one is free it goes to the
lowest unit whose gradient is there, else to the highest unit not yet loaded. Copies of streamed
states share the link with gradients and new weights, which go first. So do fetches of weights that
rest on the host, before all others. Where the bandwidth of the host's memory is known, CPU updates
and copies that run at once share it.

Several ranks that take equally long are one that has an equal part of the host's memory. Where one
is slower, it and the others of its host are played together: they share the memory, and each
collective waits for all of them. Ranks of other hosts wait no longer than those.

One period is played: from the start of a backward to the end of the next forward. This is already
the steady state, because no forward ends before every update has ended. When the next backward
starts, no gradient is on its way, and at most the last staging slots still go back to the host.
They are cut off.

The profile says when the step is committed. Where the launching thread runs ahead, the period
before says it: then it is played twice, first with a commit as late as launching allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.compiled_graph import LANES, CompiledGraph, compiled
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.play import Run, play, play_together
from hytrain_fx.cost_model.step_graph import check_streaming, step_graph
from hytrain_fx.ir.plan import Plan, validate
from hytrain_fx.ir.profile import FETCH_TIMES, STREAM_TIMES, TIMES, Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskGraph, TaskKind, Unit

_GPU, _COLLECTIVES = LANES.index(Resource.GPU), LANES.index(Resource.COLLECTIVES)


@dataclass(frozen=True)
class PlayedStep:
    """The task graph of one steady step, and when each of its tasks runs.

    Where one rank is slower, they are that rank's. `others` is when the tasks of another rank of
    its host run, None where all are alike or there is none.
    """

    graph: TaskGraph
    schedule: Schedule
    others: Schedule | None = None


def simulate(profile: Profile, plan: Plan, discipline: Discipline | None = None) -> Schedule:
    """The predicted schedule of one steady step, in microseconds; see `steady_step`."""
    return steady_step(profile, plan, discipline or Discipline()).schedule


def steady_step(profile: Profile, plan: Plan, discipline: Discipline, units: Sequence[Unit] = ()) -> PlayedStep:
    """The task graph of one steady step and its predicted schedule.

    units   the profile's units with names and floating-point operations, where these are known

    Raises PlanError when the plan does not fit the profile's units, or streams a unit whose times
    for that are not known.
    """
    validate(plan, profile.units)
    check_streaming(profile, plan, discipline)

    def committed(commit_us: float) -> PlayedStep:
        return _played_step(replace(profile, commit_us=commit_us), plan, discipline, units)

    if not (discipline.runs_ahead and profile.launching_us):
        return committed(profile.commit_us)
    soon = committed(0.0)  # the thread has had a whole step for it
    late_us = profile.launching_us - soon.schedule.makespan_us
    return committed(late_us) if late_us > 0 else soon


def _played_step(profile: Profile, plan: Plan, discipline: Discipline, units: Sequence[Unit]) -> PlayedStep:
    """One period with the commit where the profile has it."""
    graph, part = step_graph(profile, plan, discipline, units), bytes_per_us(profile)
    if profile.skew == 1.0:
        return PlayedStep(graph, played(graph, part))
    slowest = step_graph(slowed(profile), plan, discipline, units)
    if profile.node_ranks == 1:
        return PlayedStep(slowest, played(slowest, part))
    alike = profile.node_ranks - 1
    arrays = [compiled(slowest), compiled(graph)]
    runs = play_together(list(zip(arrays, (1, alike), strict=True)), None if part is None else part * profile.node_ranks)
    slow, other = (_schedule(*both, len(graph.units)) for both in zip(arrays, runs, strict=True))
    return PlayedStep(slowest, slow, other)


def slowed(profile: Profile) -> Profile:
    """The profile of the slowest rank: all that it does itself takes `skew` times as long."""
    names = (*TIMES, *STREAM_TIMES, *FETCH_TIMES)
    units = tuple(replace(u, **{name: profile.skew * getattr(u, name) for name in names}) for u in profile.units)
    return replace(profile, units=units, commit_us=profile.skew * profile.commit_us, launching_us=profile.skew * profile.launching_us)


def played(graph: TaskGraph, host_bytes_per_us: float | None) -> Schedule:
    """When each task of one rank's graph runs."""
    arrays = compiled(graph)
    return _schedule(arrays, play(arrays, host_bytes_per_us), len(graph.units))


def _schedule(arrays: CompiledGraph, run: Run, units: int) -> Schedule:
    # a forward's pieces follow one another
    end_us = max(run.end_us[arrays.first[number + 1] - 1] for number, task in enumerate(arrays.tasks) if task.kind is TaskKind.FORWARD)
    return Schedule(tuple(_merged(arrays, run, end_us)), end_us, _stalls(arrays, run, units))


def _merged(arrays: CompiledGraph, run: Run, until_us: float) -> Iterator[Interval]:
    """What runs before `until_us`.

    Pieces of a task without a gap are one interval; empty ones go.
    """
    lanes: list[list[int]] = [[] for _ in LANES]
    lane_of, task_of = arrays.lane_of, arrays.task_of
    for piece in run.order:
        lanes[lane_of[piece]].append(piece)
    for resource, pieces in zip(LANES, lanes, strict=True):
        open_task, begin_us, at_us = -1, 0.0, 0.0
        for piece in pieces:
            task, start_us, end_us = task_of[piece], run.start_us[piece], run.end_us[piece]
            if end_us > until_us:
                end_us = until_us
            if end_us <= start_us:
                continue
            if task != open_task or at_us != start_us:
                if open_task >= 0:
                    yield Interval(arrays.tasks[open_task], resource, begin_us, at_us)
                open_task, begin_us = task, start_us
            at_us = end_us
        if open_task >= 0:
            yield Interval(arrays.tasks[open_task], resource, begin_us, at_us)


def _stalls(arrays: CompiledGraph, run: Run, units: int) -> tuple[float, ...]:
    """Idle time of the device right before the forward of each unit, without a bubble."""
    stalls = [0.0] * units
    free_at_us, idle_us = 0.0, 0.0
    for piece in run.order:
        lane = arrays.lane_of[piece]
        if lane == _COLLECTIVES and arrays.tasks[arrays.task_of[piece]].kind is TaskKind.RECEIVE:
            free_at_us = run.end_us[piece]
        if lane != _GPU:
            continue
        task, start_us, end_us = arrays.tasks[arrays.task_of[piece]], run.start_us[piece], run.end_us[piece]
        if start_us > free_at_us:
            idle_us += start_us - free_at_us
        if end_us > free_at_us:
            free_at_us = end_us
        if task.kind is TaskKind.FORWARD:
            stalls[task.unit] += idle_us
            idle_us = 0.0
    return tuple(stalls)
