"""A task graph as arrays that can be played fast.

Every piece of every task has a number, and with it what it needs and what it frees.

Two kinds of waiting are kept apart, so that an edge costs one entry and not one for each pair of
pieces. A piece waits for pieces (`waits`: the same piece of another task, or the one before it in
computing), and for its task's gate (`gates`: tasks that must be over first).

Of the pieces that a lane could run the one of the lowest rank goes first: the runtime's order,
lowest layer first. Streamed updates run next to computing on their own stream, resident ones
fill the device's waits; states that go home let gradients pass. Fetches of weights, which the
device is about to need, pass all other copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hytrain_fx.ir.task_graph import ARRIVALS, Cut, Resource, TaskGraph, TaskId, TaskKind

LANES = tuple(Resource)
_LANE_OF = {resource: lane for lane, resource in enumerate(LANES)}
# Who goes first on a lane.
_STREAMED_UPDATE, _FETCH, _COMPUTE, _COPY, _LATE = -1, 0, 0, 1, 2
_COMPUTES = (TaskKind.BACKWARD, TaskKind.FORWARD)


@dataclass
class CompiledGraph:
    """The pieces of task t are the numbers `first[t]` to `first[t + 1]`.

    Tasks and pieces have the order of the graph's nodes.

    task_of, lane_of, us, host_bytes    of each piece; a lane is an index into LANES
    rank, piece_at      of each piece, lower goes first; the piece of a rank
    ahead_rank          of each streamed load while its gradient is not there: new weights pass it
    loads_of            the loads whose gradient a task makes
    waits, then         of each piece: how many pieces must end first; how many places behind it are
                        the pieces that wait for it
    gates, opens        of each task: how many tasks (or first pieces of them) must be over first;
                        the tasks that wait for all of it
    opens_at            by piece: the tasks that wait for this piece of the backward, with which the
                        step is committed
    """

    tasks: list[TaskId]
    first: list[int]
    slots: int
    task_of: list[int] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    us: list[float] = field(default_factory=list)
    host_bytes: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    ahead_rank: dict[int, int] = field(default_factory=dict)
    piece_at: list[int] = field(default_factory=list)
    loads_of: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    waits: list[int] = field(default_factory=list)
    then: list[tuple[int, ...]] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)
    opens: list[list[int]] = field(default_factory=list)
    opens_at: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def compiled(graph: TaskGraph) -> CompiledGraph:
    """The arrays of a graph."""
    made = CompiledGraph(list(graph.works), [0], graph.slots)
    number_of = {task: number for number, task in enumerate(made.tasks)}
    for number, work in enumerate(graph.works.values()):
        lane = _LANE_OF[work.resource]
        for cut in work.cuts:
            made.us += [cut.us] * cut.pieces
            made.host_bytes += [cut.host_bytes] * cut.pieces
        count = len(made.us) - made.first[-1]
        made.task_of += [number] * count
        made.lane_of += [lane] * count
        made.first.append(len(made.us))
    _connect(made, graph, number_of)
    _rank(made, graph)
    for number, task in enumerate(made.tasks):
        if task.kind is TaskKind.STREAM_IN:
            reduced = number_of.get(TaskId(TaskKind.REDUCE_SCATTER, task.unit))
            gradient = number_of[TaskId(TaskKind.BACKWARD, task.unit)] if reduced is None else reduced
            made.loads_of[gradient] += range(made.first[number], made.first[number + 1])
    return made


def _connect(made: CompiledGraph, graph: TaskGraph, number_of: dict[TaskId, int]) -> None:
    made.waits, made.then = [0] * len(made.us), [()] * len(made.us)
    made.gates, made.opens = [0] * len(made.tasks), [[] for _ in made.tasks]
    for number, task in enumerate(made.tasks):
        if task.kind in _COMPUTES:
            first, count = made.first[number], made.first[number + 1] - made.first[number]
            _follow(made, first, first + 1, count - 1)
    for (before, after), order in graph.orders.items():
        source, target = number_of[before], number_of[after]
        if order.by_piece:
            piece_of = {cut.begin: piece for cut, piece in _ranges(graph, before, made.first[source])}
            for cut, piece in _ranges(graph, after, made.first[target]):
                if cut.begin in piece_of:
                    _follow(made, piece_of[cut.begin], piece, cut.pieces)
            continue
        made.gates[target] += 1
        if order.pieces is None:
            made.opens[source].append(target)
        else:
            made.opens_at[made.first[source] + order.pieces - 1].append(target)


def _follow(made: CompiledGraph, before: int, after: int, count: int) -> None:
    """So many pieces from `after` on wait for as many from `before` on, each for one.

    Pieces of one range are alike, so that their lists are filled at once.
    """
    if count > 0:
        made.then[before : before + count] = [(*made.then[before], after - before)] * count
        made.waits[after : after + count] = [made.waits[after] + 1] * count


def _ranges(graph: TaskGraph, task: TaskId, piece: int) -> Iterator[tuple[Cut, int]]:
    """A task's cuts with the number of the first piece of each.

    `piece` is the task's own first piece.
    """
    for cut in graph.works[task].cuts:
        yield cut, piece
        piece += cut.pieces


def _rank(made: CompiledGraph, graph: TaskGraph) -> None:
    """Ranks of whole ranges: the pieces of one follow one another."""
    ranges: list[tuple[tuple[int, int, int], int, int, bool]] = []
    for number, task in enumerate(made.tasks):
        for cut, piece in _ranges(graph, task, made.first[number]):
            key = (_COMPUTE, number, 0) if task.kind in _COMPUTES else (_urgency(task.kind, cut), task.unit, cut.begin)
            ranges.append((key, piece, cut.pieces, False))
            if task.kind is TaskKind.STREAM_IN:
                ranges.append(((_LATE, -task.unit, cut.begin), piece, cut.pieces, True))
    made.rank = [0] * len(made.us)
    for _, piece, count, ahead in sorted(ranges):
        rank = len(made.piece_at)
        made.piece_at += range(piece, piece + count)
        if ahead:
            made.ahead_rank.update(zip(range(piece, piece + count), range(rank, rank + count), strict=True))
        else:
            made.rank[piece : piece + count] = range(rank, rank + count)


def _urgency(kind: TaskKind, cut: Cut) -> int:
    if kind is TaskKind.GPU_UPDATE and cut.streamed:
        return _STREAMED_UPDATE
    if kind in ARRIVALS:
        return _FETCH
    return _LATE if kind is TaskKind.STREAM_OUT else _COPY
