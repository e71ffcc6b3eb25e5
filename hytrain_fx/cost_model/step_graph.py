"""A profile, a plan and a discipline as the task DAG of one steady step (ir/task_graph.py).

This is the only place that knows what waits for what.

Besides the edges that every step has, the discipline adds its own:

    commit           updates, and loads of streamed states, wait for the piece of the backward with
                     whose end the step is committed
    before_forward   wait(l) -> forward(0): the forward waits for all updates
    zero_offload     backward(0) -> all copies out, one by one -> all updates -> all copies back

Where several ranks train, a gradient is there after its reduce-scatter, and a new weight after its
all-gather. The collectives run one after the other, in one order on all ranks. Weights in shards
are gathered before each forward and backward instead (gathers.py), in their places of that order.

Weights that rest on the host are fetched before each forward and backward (fetches.py), and not
sent after an update: fetch_forward(l) waits for the update instead.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain_fx.cost_model.discipline import CommitAt, Discipline
from hytrain_fx.cost_model.fetches import fetched_bytes, fetched_shares, fetches
from hytrain_fx.cost_model.gathers import collective_order, gathers, held_up, own_shards
from hytrain_fx.cost_model.host_memory import traffic_bytes
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import FETCHES, GATHERS, RESOURCE_OF, Cut, Order, TaskGraph, TaskId, TaskKind, Unit, Work

# At most so many chunks, of streamed shares and others, and pieces of computing are played: a plan
# must be predicted in milliseconds.
_MOST_STREAMED, _MOST_CHUNKS, _MOST_PIECES = 300, 2000, 300
# Least slots: one chunk coming in, one updated, one going out.
_LEAST_SLOTS = 3
# The tasks of a share by its placement, in the order in which they follow one another.
_WAYS = {
    Placement.GPU: (TaskKind.GPU_UPDATE,),
    Placement.CPU: (TaskKind.D2H, TaskKind.CPU_UPDATE, TaskKind.H2D),
    Placement.STREAM: (TaskKind.STREAM_IN, TaskKind.GPU_UPDATE, TaskKind.STREAM_OUT),
}

_TIME_OF = {kind: "fetch_us" if kind in FETCHES else "gather_us" if kind in GATHERS else f"{kind}_us" for kind in TaskKind}

_WHOLE, _BY_PIECE = Order(), Order(by_piece=True)


def step_graph(profile: Profile, plan: Plan, discipline: Discipline, units: Sequence[Unit] = ()) -> TaskGraph:
    """The DAG of one step, from the start of a backward to the end of the next forward.

    units   the profile's units with names and floating-point operations, where these are known
    """
    return _Builder(profile, plan, discipline).graph(tuple(units) or tuple(map(_bare, profile.units)))


def unmeasured(units: Sequence[Unit]) -> Profile:
    """A profile in which nothing takes any time.

    It serves the graph of a plan before anything is measured.
    """
    profiled = (UnitProfile(u.index, u.name, u.params, u.grad_bytes, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, param_numels=u.param_numels,
                            traffic=u.traffic, grain_params=u.grain_params, fetched_params=u.fetched_params,
                            gathered_params=u.gathered_params) for u in units)
    return Profile(tuple(profiled), device="", host="")


def check_streaming(profile: Profile, plan: Plan, discipline: Discipline) -> None:
    """Raise PlanError for a streamed share that cannot be predicted.

    Its unit has no streaming times, or the barrier is "zero_offload".
    """
    for row in plan.rows:
        unit = profile.units[row.unit]
        if row.placement.visits_device and not unit.can_stream:
            raise PlanError(f"unit {unit.index} ({unit.name}) has a streamed share, but its profile has no times for streaming "
                            f"(stream_in_us={unit.stream_in_us}, stream_out_us={unit.stream_out_us}); measure them or place it elsewhere")
        if row.placement.visits_device and discipline.barrier == "zero_offload":
            raise PlanError(f"unit {unit.index} ({unit.name}) has a streamed share; nothing is streamed under the barrier \"zero_offload\"")


@dataclass(frozen=True, slots=True)
class _Commit:
    """After the first `pieces` pieces of backward(`unit`)."""

    unit: int
    pieces: int


class _Builder:
    def __init__(self, profile: Profile, plan: Plan, discipline: Discipline) -> None:
        self._profile, self._discipline = profile, discipline
        self._fetched_shares = fetched_shares(profile, plan)
        self._gathers = gathers(profile, discipline.units_ahead)
        self._fetches = (own_shards(self._gathers, self._fetched_shares) if profile.gathers
                         else fetches(fetched_bytes(profile, plan), discipline.units_ahead))
        self._rows: dict[int, list[PlanRow]] = defaultdict(list)
        for row in plan.rows:
            self._rows[row.unit].append(row)
        streamed = [row for row in plan.rows if row.placement.visits_device]
        chunk = discipline.chunk_params
        resident_chunk = max(chunk, profile.params // _MOST_CHUNKS) if chunk else None
        streamed_chunk, self._slots = _staging(streamed, discipline)
        self._chunk_params = {Placement.GPU: resident_chunk, Placement.CPU: resident_chunk, Placement.STREAM: streamed_chunk}
        self._piece_us = _piece_us(profile, streamed, streamed_chunk)
        self._works: dict[TaskId, Work] = {}
        self._orders: dict[tuple[TaskId, TaskId], Order] = {}

    def graph(self, units: tuple[Unit, ...]) -> TaskGraph:
        """The whole graph."""
        for unit in reversed(units):
            self._add_compute(TaskKind.BACKWARD, unit.index, self._profile.units[unit.index].backward_us, unit.backward_flops)
        for unit in units:
            # Other micro-batches come after the first forward, which all updates end before.
            others_us = self._profile.between_us if unit is units[-1] else 0.0
            self._add_compute(TaskKind.FORWARD, unit.index, self._profile.units[unit.index].forward_us + others_us, unit.forward_flops)
        for before, after in itertools.pairwise(list(self._works)):
            self._edge(before, after)
        if self._profile.bubble_us:
            self._add_bubble()
        if self._profile.has_collectives or self._gathers:
            self._add_collectives()
        for profiled in self._profile.units:
            self._add_updates(profiled)
        self._add_fetches()
        self._add_gathers()
        if self._discipline.barrier == "zero_offload":
            self._one_after_the_other()
        else:
            self._add_commits()
        return TaskGraph(units, self._works, self._orders, self._slots)

    # ---- Tasks ----

    def _add_compute(self, kind: TaskKind, unit: int, us: float, flops: float) -> None:
        pieces = max(1, math.ceil(us / self._piece_us)) if self._piece_us else 1
        self._add(kind, unit, (Cut(0, pieces, us / pieces),), us, self._profile.units[unit].params, flops=flops)

    def _add_bubble(self) -> None:
        """Between backward and forward the device stands still, and updates go on."""
        us = self._profile.bubble_us
        task = self._add(TaskKind.RECEIVE, 0, (Cut(0, 1, us),), us, 0)
        self._edge(TaskId(TaskKind.BACKWARD, 0), task)
        self._edge(task, TaskId(TaskKind.FORWARD, 0))

    def _add_collectives(self) -> None:
        """Reduce-scatters in the order of the backward, then all-gathers in the forward's."""
        tasks = list(collective_order(self._profile, self._gathers, self._discipline.units_ahead))
        for task in tasks:
            unit = self._profile.units[task.unit]
            us, gathered = _task_us(unit, task.kind), task.kind in GATHERS
            params, nbytes = (unit.gathered_params, unit.gathered_bytes) if gathered else (unit.params, 0.0)
            self._add(*task, (Cut(0, 1, us),), us, params, nbytes)
            if task.kind is TaskKind.REDUCE_SCATTER:
                self._edge(TaskId(TaskKind.BACKWARD, task.unit), task)
        for before, after in itertools.pairwise(tasks):
            self._edge(before, after)

    def _add_gathers(self) -> None:
        """Each into a slot that is free; the thread that launches waits for updates on the host."""
        for gather in self._gathers:
            self._edge(gather.task, gather.before)
            if gather.after is not None:
                self._edge(gather.after, gather.task)
        for unit, forward in held_up(self._gathers, self._discipline.units_ahead):
            if (update := TaskId(TaskKind.CPU_UPDATE, unit)) in self._works:
                self._edge(update, forward)

    def _add_fetches(self) -> None:
        """One after the other, each into a slot that is free, a forward's after the update."""
        for fetch in self._fetches:
            kind, unit = fetch.task.kind, self._profile.units[fetch.task.unit]
            share = self._fetched_shares[unit.index]
            us, nbytes = share * _task_us(unit, kind), share * unit.fetch_bytes
            self._add(*fetch.task, (Cut(0, 1, us, nbytes),), us, round(share * unit.fetched_params), nbytes)
            self._edge(fetch.task, fetch.before)
            if fetch.after is not None:
                self._edge(fetch.after, fetch.task)
            if kind is TaskKind.FETCH_FORWARD:
                self._edge(TaskId(TaskKind.CPU_UPDATE, unit.index), fetch.task)
        for before, after in itertools.pairwise(self._fetches):
            self._edge(before.task, after.task)

    def _add_updates(self, unit: UnitProfile) -> None:
        """The tasks of all its shares, their own edges, and the wait of its next use."""
        cuts: dict[TaskKind, list[Cut]] = defaultdict(list)
        numel: dict[TaskKind, int] = defaultdict(int)
        for row in self._rows[unit.index]:
            chunk_params = self._chunk_params[row.placement]
            pieces = math.ceil(row.numel / chunk_params) if chunk_params else 1
            share = row.numel / unit.params / pieces
            for kind in self._way(unit, row.placement):
                cuts[kind].append(Cut(row.begin, pieces, _update_us(unit, kind) * share, share * traffic_bytes(unit, kind),
                                      row.placement.visits_device))
                numel[kind] += row.numel
        for kind, own in cuts.items():
            share = numel[kind] / unit.params
            self._add(kind, unit.index, tuple(own), share * _update_us(unit, kind), numel[kind], share * _moved_bytes(unit, kind))
        wait = self._add(TaskKind.WAIT, unit.index, (), 0.0, unit.params)
        self._edge(wait, TaskId(TaskKind.FORWARD, unit.index if self._discipline.barrier == "none" else 0))
        made_by, read_by = TaskKind.BACKWARD, [wait]
        if self._profile.has_collectives:
            made_by = TaskKind.REDUCE_SCATTER
        if unit.gathered_params:
            read_by.append(TaskId(TaskKind.GATHER_FORWARD, unit.index))
        elif self._profile.has_collectives:
            read_by = [TaskId(TaskKind.ALL_GATHER, unit.index)]
            self._edge(read_by[0], wait)
        gradient = TaskId(made_by, 0 if self._discipline.barrier == "zero_offload" else unit.index)
        for placement in dict.fromkeys(row.placement for row in self._rows[unit.index]):
            way = [TaskId(kind, unit.index) for kind in self._way(unit, placement)]
            for before, after in itertools.pairwise(way):
                self._edge(before, after, _BY_PIECE)
            self._edge(gradient, way[1] if placement.visits_device else way[0])
            for reader in read_by:
                self._edge(way[1] if placement.visits_device else way[-1], reader)

    @staticmethod
    def _way(unit: UnitProfile, placement: Placement) -> tuple[TaskKind, ...]:
        """Its tasks; a weight that rests on the host is not sent."""
        return tuple(kind for kind in _WAYS[placement] if kind is not TaskKind.H2D or unit.reloaded_share)

    # ---- What the discipline adds ----

    def _add_commits(self) -> None:
        discipline, commit_us = self._discipline, self._profile.commit_us
        commit = self._commit(commit_us, discipline.commit_at)
        sends = self._commit(commit_us, "backward_start") if discipline.early_weights else commit
        by_cpu = (TaskKind.H2D, sends) if discipline.early_updates else (TaskKind.CPU_UPDATE, commit)
        for unit in self._profile.units:
            for kind, gate in (by_cpu, (TaskKind.GPU_UPDATE, commit), (TaskKind.STREAM_IN, sends)):
                task = TaskId(kind, unit.index)
                # Nothing but a load begins before its own gradient is there, so an earlier commit
                # asks no more of it.
                if gate is None or task not in self._works or (gate.unit >= unit.index and kind is not TaskKind.STREAM_IN):
                    continue
                self._edge(TaskId(TaskKind.BACKWARD, gate.unit), task, Order(pieces=gate.pieces))

    def _commit(self, commit_us: float, commit_at: CommitAt) -> _Commit | None:
        """With which piece of the backward the step is committed; None: before any update."""
        backward = [(u.index, self._works[TaskId(TaskKind.BACKWARD, u.index)].cuts[0]) for u in reversed(self._profile.units)]
        last, cut = backward[-1]
        if commit_at == "backward_start":
            if not commit_us:
                return None
            end_us = 0.0
            for unit, own in backward:
                for pieces in range(1, own.pieces + 1):
                    end_us += own.us
                    if end_us >= commit_us:
                        return _Commit(unit, pieces)
        return _Commit(last, cut.pieces)

    def _one_after_the_other(self) -> None:
        """Each stage after all of the one before it, its tasks in a row, as a lane takes them."""
        stages = (TaskId(kind, unit.index) for kind in _WAYS[Placement.CPU] for unit in self._profile.units)
        for before, after in itertools.pairwise(task for task in stages if task in self._works):
            self._edge(before, after)

    def _add(
        self, kind: TaskKind, unit: int, cuts: tuple[Cut, ...], us: float, params: int, nbytes: float = 0.0, flops: float = 0.0
    ) -> TaskId:  # fmt: skip
        task = TaskId(kind, unit)
        self._works[task] = Work(RESOURCE_OF[kind], cuts, us, params, nbytes, flops)
        return task

    def _edge(self, before: TaskId, after: TaskId, order: Order = _WHOLE) -> None:
        self._orders[before, after] = order


def _bare(unit: UnitProfile) -> Unit:
    return Unit(unit.index, unit.name, unit.params, (), unit.grad_bytes, param_numels=unit.param_numels, traffic=unit.traffic,
                grain_params=unit.grain_params, fetched_params=unit.fetched_params, gathered_params=unit.gathered_params)


def _task_us(unit: UnitProfile, kind: TaskKind) -> float:
    return float(getattr(unit, _TIME_OF[kind]))


def _update_us(unit: UnitProfile, kind: TaskKind) -> float:
    """What one of its update's tasks takes; only weights that rest on the device are sent."""
    return _task_us(unit, kind) * (unit.reloaded_share if kind is TaskKind.H2D else 1.0)


def _moved_bytes(unit: UnitProfile, kind: TaskKind) -> float:
    """Bytes over the link, or read and written by the update where the states are."""
    updates = kind in (TaskKind.CPU_UPDATE, TaskKind.GPU_UPDATE)
    return unit.traffic.device_bytes(unit.params) if updates else traffic_bytes(unit, kind)


def _staging(streamed: list[PlanRow], discipline: Discipline) -> tuple[int, int]:
    """Parameters in a played chunk and the number of slots.

    The runtime's own, coarser where there would be too many chunks.
    """
    numel = sum(row.numel for row in streamed)
    chunk_params = max(discipline.staging_params, math.ceil(numel / _MOST_STREAMED))
    held = discipline.staging_params * discipline.staging_slots
    return chunk_params, max(min(_LEAST_SLOTS, discipline.staging_slots), held // chunk_params)


def _piece_us(profile: Profile, streamed: list[PlanRow], chunk_params: int) -> float | None:
    """Length of the pieces that computing is cut into, so that streamed updates run beside it.

    None where nothing is streamed.
    """
    if not streamed:
        return None
    compute_us = profile.compute_us
    chunk_us = max(chunk_params / profile.units[row.unit].params * profile.units[row.unit].stream_in_us for row in streamed)
    return max(chunk_us, compute_us / _MOST_PIECES)
