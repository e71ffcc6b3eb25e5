"""List scheduling of compiled task graphs: of one rank, or of several that meet in collectives.

Whenever a lane is free it takes the most urgent piece that is ready. Each rank has lanes of its
own. The host's memory is shared by all. A collective begins when every rank has come to it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from operator import itemgetter

from hytrain_fx.cost_model.compiled_graph import LANES, CompiledGraph
from hytrain_fx.ir.task_graph import Resource, TaskId, TaskKind


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces in order of start, and from when to when each ran, by its number."""

    order: list[int]
    start_us: list[float]
    end_us: list[float]


def play(arrays: CompiledGraph, host_bytes_per_us: float | None) -> Run:
    """Play every piece of one rank's graph to its end."""
    return play_together([(arrays, 1)], host_bytes_per_us)[0]


def play_together(ranks: Sequence[tuple[CompiledGraph, int]], host_bytes_per_us: float | None) -> list[Run]:
    """Play several ranks' graphs to their ends, all of which begin together.

    ranks   each graph, and how many ranks run it alike: together they move so many times its bytes
            of the host's memory
    """
    meeting, running = _Meeting(len(ranks)), Running(host_bytes_per_us)
    plays: list[_Play] = []
    owner: list[_Play] = []  # of each piece, numbered through all ranks
    for arrays, alike in ranks:
        plays.append(_Play(arrays, alike, len(owner), meeting))
        owner += [plays[-1]] * len(arrays.us)
    for one in plays:
        one.begin()
    now_us = 0.0
    while True:
        for one in plays:
            one.start(running, now_us)
        now_us, ended = running.until_next_end(now_us)
        if not ended:
            return [one.run for one in plays]
        for number in ended:
            owner[number].end(number, now_us)


class _Meeting:
    """Where the ranks wait for each other: a collective is ready once all have come to it."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._here: dict[TaskId, list[tuple[_Play, int]]] = defaultdict(list)

    def arrive(self, task: TaskId, one: _Play, piece: int) -> None:
        """One rank has come to its piece of the collective."""
        here = self._here[task]
        here.append((one, piece))
        if len(here) == self._ranks:
            for other, waiting in here:
                other.make_ready(waiting)


class _Play:
    """One rank: which of its pieces are ready, and which run."""

    def __init__(self, arrays: CompiledGraph, alike: int, first: int, meeting: _Meeting) -> None:
        self.run = Run([], [0.0] * len(arrays.us), [0.0] * len(arrays.us))
        self._arrays, self._alike, self._first, self._meeting = arrays, alike, first, meeting
        self._lane_of, self._task_of = arrays.lane_of, arrays.task_of  # here, too: every piece asks for them
        self._busy = [False] * len(LANES)
        self._ready: list[list[int]] = [[] for _ in LANES]  # ranks
        self._staging = Staging(arrays)
        self._waits = [1 + count for count in arrays.waits]  # 1 for its task, which is opened
        self._gates = list(arrays.gates)
        self._left = [end - begin for begin, end in pairwise(arrays.first)]

    def begin(self) -> None:
        """What waits for nothing is ready."""
        for task, gate in enumerate(self._gates):
            if not gate:
                self._opened(task)

    def start(self, running: Running, now_us: float) -> None:
        """Begin what free lanes can take."""
        busy, staging = self._busy, self._staging
        if staging.free and staging.waiting:
            for rank in staging.taken():
                heappush(self._ready[_H2D], rank)
        for lane, queue in enumerate(self._ready):
            if queue and not busy[lane]:
                arrays, run = self._arrays, self.run
                piece = arrays.piece_at[heappop(queue)]
                busy[lane] = True
                running.start(self._first + piece, arrays.us[piece], self._alike * arrays.host_bytes[piece], now_us)
                run.order.append(piece)
                run.start_us[piece] = now_us

    def end(self, number: int, now_us: float) -> None:
        """A piece is over; `number` counts through all ranks."""
        piece = number - self._first
        self.run.end_us[piece] = now_us
        arrays, task, lane = self._arrays, self._task_of[piece], self._lane_of[piece]
        self._busy[lane] = False
        if lane == _D2H and arrays.tasks[task].kind is TaskKind.STREAM_OUT:
            self._staging.free += 1
        for behind in arrays.then[piece]:
            self._one_less(piece + behind)
        if piece in arrays.opens_at:
            for opened in arrays.opens_at[piece]:
                self._open(opened)
        self._left[task] -= 1
        if not self._left[task]:
            self._over(task)

    def make_ready(self, piece: int) -> None:
        """Its lane may take the piece."""
        heappush(self._ready[self._lane_of[piece]], self._arrays.rank[piece])

    def _one_less(self, piece: int) -> None:
        """The piece waits for one thing less; with the last it has arrived."""
        self._waits[piece] -= 1
        if self._waits[piece]:
            return
        lane = self._lane_of[piece]
        if lane == _H2D and piece in self._arrays.ahead_rank:
            self._staging.arrive(piece)
        elif lane == _COLLECTIVES:
            self._meeting.arrive(self._arrays.tasks[self._task_of[piece]], self, piece)
        else:
            heappush(self._ready[lane], self._arrays.rank[piece])

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
            self._one_less(piece)


# ---- Pieces that run at once share the bandwidth of the host's memory ----
#
# Copies and updates that together want more than the memory gives all become slower by the same
# factor. On the measured H200 machine 14 threads of AdamW and copies both ways, 290 GB/s when each
# runs alone, gave 215 GB/s: AdamW at 0.73 and the copies at 0.76 of their rates.


_Entry = tuple[float, int, int, float]
"""A piece that runs: its end, the number of its start, the piece, and the bytes that it wants of
the host's memory in a microsecond."""


class Running:
    """The pieces that run, each to its end; those that move host memory on their own clock.

    That clock is `slowness` times slower than real time while they want more bytes than the memory
    gives. Where its bandwidth is not known every piece takes its own time.
    """

    def __init__(self, bytes_per_us: float | None) -> None:
        self._bytes_per_us = bytes_per_us
        self._alone: list[_Entry] = []  # by real end
        self._sharing: list[_Entry] = []  # by end on the shared clock
        self._clock_us = 0.0
        self._started = 0

    def start(self, piece: int, us: float, host_bytes: float, now_us: float) -> None:
        """Begin a piece that alone would take `us` and move `host_bytes`."""
        self._started += 1
        if host_bytes and us and self._bytes_per_us is not None:
            heappush(self._sharing, (self._clock_us + us, self._started, piece, host_bytes / us))
        else:
            heappush(self._alone, (now_us + us, self._started, piece, 0.0))

    def until_next_end(self, now_us: float) -> tuple[float, list[int]]:
        """When the next piece ends, and all that end then, in order of their start.

        None ends where none runs.
        """
        alone, sharing = self._alone, self._sharing
        slowness = self._slowness() if sharing else 1.0
        alone_us = alone[0][0] if alone else math.inf
        shared_us = now_us + (sharing[0][0] - self._clock_us) * slowness if sharing else math.inf
        if sharing and shared_us <= alone_us:
            end_us, self._clock_us = shared_us, sharing[0][0]
        else:
            end_us, self._clock_us = alone_us, self._clock_us + (alone_us - now_us) / slowness
        ended: list[_Entry] = []
        while alone and alone[0][0] <= end_us:
            ended.append(heappop(alone))
        while sharing and sharing[0][0] <= self._clock_us:
            ended.append(heappop(sharing))
        if len(ended) == 1:
            return end_us, [ended[0][2]]
        return end_us, [piece for _, _, piece, _ in sorted(ended, key=itemgetter(1))]

    def _slowness(self) -> float:
        """Real microseconds for one of the sharing pieces' clock.

        1 where the memory gives what all of them want.
        """
        wanted = 0.0
        for _, _, _, bytes_per_us in self._sharing:
            wanted += bytes_per_us
        return max(1.0, wanted / self._bytes_per_us) if self._bytes_per_us else 1.0


# ---- The streamer's choice, played: which streamed chunk gets the next free staging slot ----
#
# The lowest unit whose gradient is there goes first, as everywhere. Where no gradient waits, states
# of the highest unit that is not loaded yet are fetched ahead: its gradient comes next.

_D2H, _H2D, _COLLECTIVES = map(LANES.index, (Resource.D2H, Resource.H2D, Resource.COLLECTIVES))


class Staging:
    """Slots for the loads of a graph.

    `arrive` and `over` tell what happened, `taken` hands out what may be copied now.
    """

    def __init__(self, arrays: CompiledGraph) -> None:
        self.free = arrays.slots
        self._arrays = arrays
        self._gradient_of = {load: task for task, loads in arrays.loads_of.items() for load in loads}
        self._over: set[int] = set()  # gradients
        self.waiting: set[int] = set()  # loads that have arrived and have no slot
        self._due: list[int] = []  # ranks of loads whose gradient is there
        # ranks of all; those taken meanwhile are passed over, here and above
        self._ahead: list[int] = []

    def arrive(self, load: int) -> None:
        """The chunk may be loaded from now on."""
        self.waiting.add(load)
        heappush(self._ahead, self._arrays.ahead_rank[load])
        if self._gradient_of[load] in self._over:
            heappush(self._due, self._arrays.rank[load])

    def over(self, task: int) -> None:
        """A task is over: a gradient, perhaps."""
        if task not in self._arrays.loads_of:
            return
        self._over.add(task)
        for load in self._arrays.loads_of[task]:
            if load in self.waiting:
                heappush(self._due, self._arrays.rank[load])

    def taken(self) -> Iterator[int]:
        """Ranks of loads that have just been given a slot.

        Those fetched ahead let weights pass.
        """
        while self.free:
            rank = self._next(self._due)
            rank = self._next(self._ahead) if rank is None else rank
            if rank is None:
                return
            self.waiting.discard(self._arrays.piece_at[rank])
            self.free -= 1
            yield rank

    def _next(self, ranks: list[int]) -> int | None:
        while ranks:
            rank = heappop(ranks)
            if self._arrays.piece_at[rank] in self.waiting:
                return rank
        return None
