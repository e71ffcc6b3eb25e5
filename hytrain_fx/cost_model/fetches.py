"""Which fetches of weights from the host a step makes, and whose slot on the device each takes.

The runtime's rules (weights/fetched_units.py), played without times:

    order     units are used first to last in the forward, last to first in the backward
    window    the unit that computes and `ahead` more after it are brought, up to the step's end
    slots     `ahead` + 1 of each size; a fetch takes the one that was read longest ago and is not
              in the window
    turn      what the last units of the forward have in slots is there for the backward
    update    makes what slots hold out of date; a unit comes back to its own slot, if it has one
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hytrain_fx.ir.limits import HALF_BYTES
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import ARRIVALS, FETCHES, GATHERS, Resource, TaskId, TaskKind

_FETCH_OF = {TaskKind.FORWARD: TaskKind.FETCH_FORWARD, TaskKind.BACKWARD: TaskKind.FETCH_BACKWARD}


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetch, in the order of the copies.

    task     its name in the task graph
    before   what computes with it
    after    what computes last with what the slot held before; None: that was in an earlier step
    """

    task: TaskId
    before: TaskId
    after: TaskId | None


@dataclass(slots=True)
class _Slot:
    unit: int
    holds: bool
    used: int = -1  # position of the last use


def fetched_shares(profile: Profile, plan: Plan) -> dict[int, float]:
    """By unit whose weights are fetched under the plan: which share of them, 0..1.

    Only what the CPU updates rests on the host.
    """
    by_cpu: Counter[int] = Counter()
    for row in plan.rows:
        by_cpu[row.unit] += row.numel if row.placement is Placement.CPU else 0
    return {u.index: by_cpu[u.index] / u.params for u in profile.units if u.fetched_params and by_cpu[u.index]}


def fetched_bytes(profile: Profile, plan: Plan) -> dict[int, int]:
    """By unit whose weights are fetched under the plan: bytes of one fetch, which a slot holds."""
    return {unit: round(share * HALF_BYTES * profile.units[unit].fetched_params) for unit, share in fetched_shares(profile, plan).items()}


def slot_sizes(profile: Profile, plan: Plan) -> dict[int, int]:
    """By unit whose weights come to a slot under the plan: bytes of them.

    Of weights in shards all are gathered, wherever they are updated.
    """
    return gathered_bytes(profile) if profile.gathers else fetched_bytes(profile, plan)


def gathered_bytes(profile: Profile) -> dict[int, int]:
    """By unit whose weights are gathered: bytes of all of them, which a slot holds."""
    return {u.index: u.gathered_bytes for u in profile.units if u.gathered_params}


def weight_slots_bytes(nbytes: Mapping[int, int], ahead: int) -> int:
    """Device memory of the slots that units of these sizes pass through."""
    return sum(size * min(count, ahead + 1) for size, count in Counter(nbytes.values()).items())


def fetches(nbytes: Mapping[int, int], ahead: int, *, stay: bool = True) -> list[Fetch]:
    """The fetches of a steady step, from the begin of a backward to the end of the next forward.

    nbytes   by unit with weights to fetch (`fetched_bytes`)
    stay     whether what is in slots at the forward's end is there for the backward
    """
    return list(_fetches(tuple(nbytes.items()), ahead, stay))


@functools.lru_cache(maxsize=16)  # many plans of one model are played with the same
def _fetches(sizes: tuple[tuple[int, int], ...], ahead: int, stay: bool) -> tuple[Fetch, ...]:
    nbytes = dict(sizes)
    forward = [TaskId(TaskKind.FORWARD, unit) for unit in sorted(nbytes)]
    backward = [TaskId(TaskKind.BACKWARD, task.unit) for task in reversed(forward)]
    uses = [*forward, *backward, *forward]
    cache = _Cache(uses, nbytes, ahead)
    cache.play(0, len(forward))
    if not stay:
        cache.out_of_date()
    cache.play(len(forward), len(forward) + len(backward))
    cache.out_of_date()
    # what comes after it belongs to the next step's backward, and is held already
    cache.play(len(forward) + len(backward), len(uses))
    found = ((position, after) for position, after in cache.fetched if position >= len(forward))
    return tuple(Fetch(TaskId(_FETCH_OF[uses[p].kind], uses[p].unit), uses[p], uses[after] if after >= len(forward) else None)
                 for p, after in found)


class _Cache:
    """Slots by size. `fetched` has the position of each fetched use, and of the last use before."""

    def __init__(self, uses: Sequence[TaskId], nbytes: Mapping[int, int], ahead: int) -> None:
        self.fetched: list[tuple[int, int]] = []
        self._uses, self._nbytes, self._ahead = uses, nbytes, ahead
        self._slots: dict[int, list[_Slot]] = defaultdict(list)

    def play(self, begin: int, end: int) -> None:
        """The uses of one step."""
        for now in range(begin, end):
            window = range(now, min(now + self._ahead + 1, end))
            units = {self._uses[i].unit for i in window}
            for position in window:
                self._bring(position, units)
            self._slot_of(self._uses[now].unit).used = now

    def out_of_date(self) -> None:
        """All weights are updated."""
        for slots in self._slots.values():
            for slot in slots:
                slot.holds = False

    def _slot_of(self, unit: int) -> _Slot:
        return next(slot for slot in self._slots[self._nbytes[unit]] if slot.unit == unit)

    def _bring(self, position: int, window: set[int]) -> None:
        unit = self._uses[position].unit
        slots = self._slots[self._nbytes[unit]]
        own = next((slot for slot in slots if slot.unit == unit), None)
        if own is not None and own.holds:
            return
        if own is None and len(slots) <= self._ahead:
            slots.append(own := _Slot(unit, False))
        # of a size at most as many units are in the window as there are slots; this one has none
        slot = own or min((slot for slot in slots if slot.unit not in window), key=lambda slot: slot.used)
        self.fetched.append((position, slot.used))
        slot.unit, slot.holds = unit, True


def fetch_figures(profile: Profile, plan: Plan, ahead: int, schedule: Schedule) -> dict[str, float]:
    """What is predicted of fetches and gathers; nothing where the plan has none.

    fetch_us        copies of weights from the host to the device
    gather_us       gathers of weights in shards, where there are any
    fetch_stall_us  how long the device stands still for them, a part of `stall_us`
    weight_slots_bytes    device memory that they pass through
    """
    nbytes = slot_sizes(profile, plan)
    if not nbytes:
        return {}
    gather_us = {"gather_us": sum(i.duration_us for i in schedule.intervals if i.task.kind in GATHERS)} if profile.gathers else {}
    return {
        "fetch_us": sum(i.duration_us for i in schedule.on(Resource.H2D) if i.task.kind in FETCHES),
        **gather_us,
        "fetch_stall_us": exposed_fetch_us(schedule),
        "weight_slots_bytes": float(weight_slots_bytes(nbytes, ahead)),
    }


def exposed_fetch_us(schedule: Schedule) -> float:
    """How long the device stands still in a step while a fetch or a gather of shards runs.

    Fetches come in the order of need: it is that one, or one behind it, that the device waits for.
    """
    copies = _merged(i for i in schedule.intervals if i.task.kind in ARRIVALS)
    if not copies:
        return 0.0
    starts, ends = zip(*copies, strict=True)
    return sum(_shared_us(copies[bisect_right(ends, begin_us) : bisect_left(starts, end_us)], begin_us, end_us)
               for begin_us, end_us in _idle(schedule))


def _idle(schedule: Schedule) -> list[tuple[float, float]]:
    """When the device stands still, and does not wait for another stage."""
    gaps, at_us = [], 0.0
    waits = [i for i in schedule.on(Resource.COLLECTIVES) if i.task.kind is TaskKind.RECEIVE]
    for interval in sorted((*schedule.on(Resource.GPU), *waits), key=lambda i: i.start_us):
        if interval.start_us > at_us:
            gaps.append((at_us, interval.start_us))
        at_us = max(at_us, interval.end_us)
    return gaps


def _merged(copies: Iterable[Interval]) -> list[tuple[float, float]]:
    """When any of them runs: a fetch and a gather may run at once."""
    found: list[tuple[float, float]] = []
    for i in sorted(copies, key=lambda i: i.start_us):
        if found and i.start_us <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], i.end_us)
        else:
            found.append((i.start_us, i.end_us))
    return found


def _shared_us(copies: Sequence[tuple[float, float]], begin_us: float, end_us: float) -> float:
    return sum((max(min(end, end_us) - max(start, begin_us), 0.0) for start, end in copies), start=0.0)
