"""Gathers of weights that ranks keep in shards, in a step's one order of collectives.

The runtime's rules (weights/gather_order.py), played without times:

    once       each pass gathers each of its units once: nothing stays through the turn
    order      that of the graph's text, every unit as many places earlier as units come ahead; the
               gradients that the text has before go first
    begin      none before all that is launched before its place has been computed, nor before its
               slot is free
    forward    a unit that comes ahead was updated first: the thread that launches waits for that
    source     this rank's shard is on the device, or is fetched from the host before the gather
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from hytrain_fx.cost_model.fetches import Fetch, fetches, gathered_bytes
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import FETCH_OF, GATHERS, TaskId, TaskKind

_GATHER_OF = {fetch: gather for gather, fetch in FETCH_OF.items()}


def gathers(profile: Profile, ahead: int) -> list[Fetch]:
    """The gathers of a step, from the begin of a backward to the end of the next forward."""
    found, units = fetches(gathered_bytes(profile), ahead, stay=False), len(profile.units)
    computed = [TaskId(TaskKind.BACKWARD, u) for u in reversed(range(units))] + [TaskId(TaskKind.FORWARD, u) for u in range(units)]
    place_of = {task: place for place, task in enumerate(computed)}

    def of_pass(own: Sequence[Fetch]) -> Iterator[Fetch]:
        for place, of in enumerate(own):
            launched = place_of[own[max(place - ahead, 0)].before] - 1
            after = max(launched, -1 if of.after is None else place_of[of.after])
            yield Fetch(TaskId(_GATHER_OF[of.task.kind], of.task.unit), of.before, computed[after] if after >= 0 else None)

    passes = ([of for of in found if of.task.kind is kind] for kind in (TaskKind.FETCH_BACKWARD, TaskKind.FETCH_FORWARD))
    return [of for own in passes for of in of_pass(own)]


def own_shards(found: Sequence[Fetch], on_host: Container[int]) -> list[Fetch]:
    """The copies of this rank's shards that these gathers wait for.

    on_host   units whose shards rest on the host
    """
    return [Fetch(TaskId(FETCH_OF[of.task.kind], of.task.unit), of.task, of.after) for of in found if of.task.unit in on_host]


def collective_order(profile: Profile, found: Sequence[Fetch], ahead: int) -> Iterator[TaskId]:
    """All collectives of a step, in the one order that all ranks have.

    New weights that stay whole come before the gathers of the forward: they are what was pending.
    """
    backward, forward = ([of.task for of in found if of.task.kind is kind] for kind in GATHERS)
    yield from _backward(profile, backward, ahead)
    gathered = {task.unit for task in forward}
    if profile.has_collectives:
        yield from (TaskId(TaskKind.ALL_GATHER, u.index) for u in profile.units if u.index not in gathered)
    yield from forward


def _backward(profile: Profile, backward: Sequence[TaskId], ahead: int) -> Iterator[TaskId]:
    last = len(profile.units) - 1
    gone = 0
    for turn, u in enumerate(reversed(profile.units)):
        # a unit is gathered where the one that is `ahead` places before it is read
        while gone < len(backward) and last - backward[max(0, gone - ahead)].unit <= turn:
            yield backward[gone]
            gone += 1
        if profile.has_collectives:
            yield TaskId(TaskKind.REDUCE_SCATTER, u.index)


def held_up(found: Sequence[Fetch], ahead: int) -> Iterator[tuple[int, TaskId]]:
    """Units whose updates must have ended before a forward may be launched, and that forward."""
    forward = [of for of in found if of.task.kind is TaskKind.GATHER_FORWARD]
    for place, of in enumerate(forward):
        yield forward[min(place + ahead, len(forward) - 1)].task.unit, of.before
