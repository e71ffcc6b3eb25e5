"""Predict a plan's schedule by playing the task graph through.

There is one queue for each of device, D2H, CPU and H2D.

Each share is cut into chunks, a chunk goes copy out -> update -> copy back, and a queue may change
to a more urgent unit between chunks. The device computes whenever it can and fills its waits with
its own updates. A streamed chunk waits for a staging slot; whenever one is free it goes to the
lowest unit whose gradient is there, else to the highest unit not yet loaded. Copies of streamed
states share the link with gradients and new weights, which go first. Where the bandwidth of the
host's memory is known, CPU updates and copies that run at once share it.

One period is played: from the start of a backward to the end of the next forward. This is already
the steady state, because no forward ends before every update has ended. When the next backward
starts, no gradient is on its way, and at most the last staging slots still go back to the host.
They are cut off.

The profile says when the step is committed. Where the launching thread runs ahead, the period
before says it: then it is played twice, first with a commit as late as launching allows.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain_fx.cost_model.compiled_graph import LANES, CompiledGraph, compiled
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.step_graph import check_streaming, step_graph
from hytrain_fx.ir.plan import Plan, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskGraph, TaskKind, Unit


@dataclass(frozen=True)
class PlayedStep:
    """The task graph of one steady step, and when each of its tasks runs."""

    graph: TaskGraph
    schedule: Schedule


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
        graph = step_graph(replace(profile, commit_us=commit_us), plan, discipline, units)
        return PlayedStep(graph, played(graph, bytes_per_us(profile)))

    if not (discipline.runs_ahead and profile.launching_us):
        return committed(profile.commit_us)
    late = committed(profile.launching_us)
    hidden_us = late.schedule.makespan_us - _passed_us(late.schedule)
    return committed(max(profile.launching_us - hidden_us, 0.0)) if hidden_us > 0 else late


def played(graph: TaskGraph, host_bytes_per_us: float | None) -> Schedule:
    """When each task of the graph runs."""
    arrays = compiled(graph)
    run = Play(arrays, host_bytes_per_us).run()
    end_us = max(run.end_us[piece] for piece in run.order if arrays.tasks[arrays.task_of[piece]].kind is TaskKind.FORWARD)
    return Schedule(tuple(_merged(arrays, run, end_us)), end_us, _stalls(arrays, run, len(graph.units)))


def _passed_us(schedule: Schedule) -> float:
    """When the launching thread has passed the last wait, if it does not wait for updates."""
    kinds = (TaskKind.BACKWARD, TaskKind.D2H)
    return max(i.end_us for i in schedule.intervals if i.task.kind in kinds)


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces in order of start, and from when to when each ran, by its number."""

    order: list[int]
    start_us: list[float]
    end_us: list[float]


class Play:
    """List scheduling: whenever a lane is free it takes the most urgent piece that is ready."""

    def __init__(self, arrays: CompiledGraph, host_bytes_per_us: float | None) -> None:
        self._arrays = arrays
        self._running = Running(host_bytes_per_us)
        self._ready: list[list[int]] = [[] for _ in LANES]  # ranks
        self._staging = Staging(arrays)
        self._waits, self._gates = list(arrays.waits), list(arrays.gates)
        self._left = [end - begin for begin, end in zip(arrays.first, arrays.first[1:], strict=False)]

    def run(self) -> Run:
        """Play every piece to its end."""
        arrays, running = self._arrays, self._running
        busy = [False] * len(LANES)
        order: list[int] = []
        start_us, end_us = [0.0] * len(arrays.us), [0.0] * len(arrays.us)
        now_us = 0.0
        for task, gate in enumerate(self._gates):
            if not gate:
                self._opened(task)
        while True:
            for rank in self._staging.taken():
                heapq.heappush(self._ready[_H2D], rank)
            for lane, queue in enumerate(self._ready):
                if queue and not busy[lane]:
                    piece = arrays.piece_at[heapq.heappop(queue)]
                    busy[lane] = True
                    running.start(piece, arrays.us[piece], arrays.host_bytes[piece], now_us)
                    order.append(piece)
                    start_us[piece] = now_us
            if not running:
                return Run(order, start_us, end_us)
            now_us, ended = running.until_next_end(now_us)
            for piece in ended:
                end_us[piece] = now_us
                busy[arrays.lane_of[piece]] = False
                self._finish(piece)

    def _arrive(self, piece: int) -> None:
        """All that the piece waits for is done."""
        if piece in self._arrays.ahead_rank:
            self._staging.arrive(piece)
        else:
            heapq.heappush(self._ready[self._arrays.lane_of[piece]], self._arrays.rank[piece])

    def _finish(self, piece: int) -> None:
        arrays = self._arrays
        task = arrays.task_of[piece]
        if arrays.tasks[task].kind is TaskKind.STREAM_OUT:
            self._staging.free += 1
        for other in arrays.then[piece]:
            self._waits[other] -= 1
            if not self._waits[other] and not self._gates[arrays.task_of[other]]:
                self._arrive(other)
        for other in arrays.opens_at.get(piece, ()):
            self._open(other)
        self._left[task] -= 1
        if not self._left[task]:
            self._over(task)

    def _over(self, task: int) -> None:
        """All pieces of the task are done."""
        self._staging.over(task)
        for other in self._arrays.opens[task]:
            self._open(other)

    def _open(self, task: int) -> None:
        """The task waits for one thing less."""
        self._gates[task] -= 1
        if not self._gates[task]:
            self._opened(task)

    def _opened(self, task: int) -> None:
        """All that the whole task waits for is over; so is a wait, which has no pieces."""
        if not self._left[task]:
            self._over(task)
        for piece in range(self._arrays.first[task], self._arrays.first[task + 1]):
            if not self._waits[piece]:
                self._arrive(piece)


def _merged(arrays: CompiledGraph, run: Run, until_us: float) -> Iterator[Interval]:
    """What runs before `until_us`.

    Pieces of a task without a gap are one interval; empty ones go.
    """
    lanes: list[list[int]] = [[] for _ in LANES]
    for piece in run.order:
        lanes[arrays.lane_of[piece]].append(piece)
    for resource, pieces in zip(LANES, lanes, strict=True):
        open_task, begin_us, at_us = -1, 0.0, 0.0
        for piece in pieces:
            start_us, end_us = run.start_us[piece], min(run.end_us[piece], until_us)
            if end_us <= start_us:
                continue
            if arrays.task_of[piece] != open_task or at_us != start_us:
                if open_task >= 0:
                    yield Interval(arrays.tasks[open_task], resource, begin_us, at_us)
                open_task, begin_us = arrays.task_of[piece], start_us
            at_us = end_us
        if open_task >= 0:
            yield Interval(arrays.tasks[open_task], resource, begin_us, at_us)


def _stalls(arrays: CompiledGraph, run: Run, units: int) -> tuple[float, ...]:
    """Idle time of the device right before the forward of each unit."""
    stalls = [0.0] * units
    free_at_us, idle_us = 0.0, 0.0
    for piece in run.order:
        if LANES[arrays.lane_of[piece]] is not Resource.GPU:
            continue
        idle_us += run.start_us[piece] - free_at_us
        free_at_us = run.end_us[piece]
        task = arrays.tasks[arrays.task_of[piece]]
        if task.kind is TaskKind.FORWARD:
            stalls[task.unit] += idle_us
            idle_us = 0.0
    return tuple(stalls)


# ---- Pieces that run at once share the bandwidth of the host's memory ----
#
# Copies and updates that together want more than the memory gives all become slower by the same
# factor. On the measured H200 machine 14 threads of AdamW and copies both ways, 290 GB/s when each
# runs alone, gave 215 GB/s: AdamW at 0.73 and the copies at 0.76 of their rates.


class Running:
    """The pieces that run, each to its end; those that move host memory on their own clock.

    That clock is `slowness` times slower than real time while they want more bytes than the memory
    gives. Where its bandwidth is not known every piece takes its own time.
    """

    def __init__(self, bytes_per_us: float | None) -> None:
        self._bytes_per_us = bytes_per_us
        # by real end: end, number of its start, piece
        self._alone: list[tuple[float, int, int]] = []
        # by end on the shared clock; last the bytes it wants in a microsecond
        self._sharing: list[tuple[float, int, int, float]] = []
        self._clock_us = 0.0
        self._started = 0

    def __bool__(self) -> bool:
        return bool(self._alone or self._sharing)

    @property
    def slowness(self) -> float:
        """Real microseconds for one of the sharing pieces' clock.

        1 where the memory gives what all of them want.
        """
        if self._bytes_per_us is None:
            return 1.0
        return max(1.0, sum(wanted for _, _, _, wanted in self._sharing) / self._bytes_per_us)

    def start(self, piece: int, us: float, host_bytes: float, now_us: float) -> None:
        """Begin a piece that alone would take `us` and move `host_bytes`."""
        self._started += 1
        if self._bytes_per_us is not None and host_bytes and us:
            heapq.heappush(self._sharing, (self._clock_us + us, self._started, piece, host_bytes / us))
        else:
            heapq.heappush(self._alone, (now_us + us, self._started, piece))

    def until_next_end(self, now_us: float) -> tuple[float, list[int]]:
        """When the next piece ends, and all that end then, in order of their start."""
        slowness = self.slowness
        alone_us = self._alone[0][0] if self._alone else math.inf
        shared_us = now_us + (self._sharing[0][0] - self._clock_us) * slowness if self._sharing else math.inf
        end_us = min(alone_us, shared_us)
        self._clock_us = self._sharing[0][0] if shared_us <= alone_us else self._clock_us + (end_us - now_us) / slowness
        ended: list[tuple[int, int]] = []
        while self._alone and self._alone[0][0] <= end_us:
            ended.append(heapq.heappop(self._alone)[1:])
        while self._sharing and self._sharing[0][0] <= self._clock_us:
            ended.append(heapq.heappop(self._sharing)[1:3])
        return end_us, [piece for _, piece in sorted(ended)]


# ---- The streamer's choice, played: which streamed chunk gets the next free staging slot ----
#
# The lowest unit whose gradient is there goes first, as everywhere. Where no gradient waits, states
# of the highest unit that is not loaded yet are fetched ahead: its gradient comes next.

_H2D = LANES.index(Resource.H2D)


class Staging:
    """Slots for the loads of a graph.

    `arrive` and `over` tell what happened, `taken` hands out what may be copied now.
    """

    def __init__(self, arrays: CompiledGraph) -> None:
        self.free = arrays.slots
        self._arrays = arrays
        self._gradient_of = {load: task for task, loads in arrays.loads_of.items() for load in loads}
        self._over: set[int] = set()  # gradients
        self._waiting: set[int] = set()  # loads that have arrived and have no slot
        self._due: list[int] = []  # ranks of loads whose gradient is there
        # ranks of all; those taken meanwhile are passed over, here and above
        self._ahead: list[int] = []

    def arrive(self, load: int) -> None:
        """The chunk may be loaded from now on."""
        self._waiting.add(load)
        heapq.heappush(self._ahead, self._arrays.ahead_rank[load])
        if self._gradient_of[load] in self._over:
            heapq.heappush(self._due, self._arrays.rank[load])

    def over(self, task: int) -> None:
        """A task is over: a gradient, perhaps."""
        if task not in self._arrays.loads_of:
            return
        self._over.add(task)
        for load in self._arrays.loads_of[task]:
            if load in self._waiting:
                heapq.heappush(self._due, self._arrays.rank[load])

    def taken(self) -> Iterator[int]:
        """Ranks of loads that have just been given a slot.

        Those fetched ahead let weights pass.
        """
        while self.free:
            rank = self._next(self._due)
            rank = self._next(self._ahead) if rank is None else rank
            if rank is None:
                return
            self._waiting.discard(self._arrays.piece_at[rank])
            self.free -= 1
            yield rank

    def _next(self, ranks: list[int]) -> int | None:
        while ranks:
            rank = heapq.heappop(ranks)
            if self._arrays.piece_at[rank] in self._waiting:
                return rank
        return None
