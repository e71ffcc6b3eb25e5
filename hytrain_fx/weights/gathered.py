"""New weights of which each rank has updated its shard: gathered before they are read.

    step()          the shards of its rows are to be gathered, unit by unit
    a forward       before it reads a unit: that unit, and those before it
    a reader        anybody else of a weight: the same
    a backward      the rest, before its first gradients go from rank to rank
    bring           sharded weights, which no rank keeps: where all ranks ask for the same

So between two steps every rank gathers each unit once, in the order of the units, whoever asks
first. A rank that asks earlier than others waits for them.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit
from hytrain_fx.errors import RankError
from hytrain_fx.ir.task_graph import FETCH_OF, TaskKind
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.ranks import Packed, Ranks
from hytrain_fx.runtime.shard_layout import ShardLayouts
from hytrain_fx.runtime.side_stream import SideStream
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import without_torch_function


class GatheredWeights:
    """The weights of one session that several ranks update in shards.

    unseen   around what reads weights here: nobody is to wait for them
    left     whether this rank waits for no other any more
    """

    left = False

    def __init__(self, ranks: Ranks, table: ParameterTable, units: Sequence[Unit], engine: Engine, states: StateStore) -> None:
        self.unseen: Callable[[], AbstractContextManager[None]] = nullcontext
        self._ranks = ranks
        self._table = table
        self._units = units
        self._engine = engine
        self._states = states
        self._pending: deque[tuple[int, ...]] = deque()  # rows of each unit whose shards are to come, in the units' order
        self._rows: set[int] = set()  # in them
        self._failed: str | None = None  # what a gather has ended in: none is tried again
        self._updated: tuple[int, ...] = ()  # rows of the last step
        self._names: tuple[str, ...] = ()  # their parameters
        self._layouts = ShardLayouts(table.shards)
        self._lock = RLock()  # another thread may read weights
        self._pid = os.getpid()
        self._committed: torch.cuda.Event | None = None
        self._come: dict[int, torch.cuda.Event] = {}  # by row: when it was there, whole
        self._side = SideStream(table.device)

    def before_updates(self, parameters: Collection[int]) -> None:
        """A `step()` is about to begin the updates of these, or their states are being loaded.

        Raises RankError where another rank updates others.
        """
        with self._lock:
            self.all()
            rows = tuple(sorted(self._table.shards.keys() & set(parameters)))
            if rows != self._updated:
                self._updated, self._names = rows, tuple(self._table.names[row] for row in rows)
            self._ranks.require_alike("the parameters that step() updates", self._names)

    def updated(self, parameters: Collection[int]) -> None:
        """The updates of these have begun. Whoever reads one gathers it."""
        with self._lock:
            rows = self._table.shards.keys() & set(parameters)
            self._rows = {row for row in rows if row not in self._states.streamed}  # those come when they are needed
            self._come.clear()
            of_units = (tuple(row for row in unit.rows if row in self._rows) for unit in self._units)
            self._pending = deque(filter(None, of_units))
            if self._table.device.type == "cuda":
                self._committed = torch.cuda.current_stream(self._table.device).record_event()

    def loaded(self, parameters: Collection[int]) -> None:
        """States of these were loaded. Raises RankError as `before_updates`."""
        try:
            self.before_updates(parameters)
        finally:
            self.updated(parameters)

    def of(self, parameters: Iterable[int]) -> None:
        """The current stream is to see the new weights of these, whole. Raises RankError.

        Those of the next unit are put on their way, where this rank's have been.
        """
        parameters = tuple(parameters)
        if os.getpid() != self._pid:
            return  # a forked child: all was gathered before
        with self._lock:
            wanted = self._rows.intersection(parameters)
            while wanted:
                wanted.difference_update(self._gather())
            if self._come:
                stream = torch.cuda.current_stream(self._table.device)
                for come in {self._come[row] for row in parameters if row in self._come}:
                    stream.wait_event(come)
            # On the CPU a collective blocks this thread: when depends on no rank's own pace there.
            if self._pending and self._committed and self._engine.issued(self._states.pieces.rows(self._pending[0])):
                self._gather()

    def all(self) -> None:
        """`of` all that are not gathered yet."""
        self.of(self._come.keys() | self._rows)

    def settle(self, parameters: Iterable[int] | None = None) -> None:
        """Return when these, or all, are there for any stream. Raises RankError."""
        if parameters is None:
            self.all()
        else:
            self.of(parameters)
        for come in set(self._come.values()):
            come.synchronize()

    def leave(self) -> None:
        """Gather none of what is pending: the other ranks may not come any more."""
        with self._lock:
            self.left = True
            self._pending.clear()
            self._rows.clear()

    def before_fork(self, settle: Callable[[], None]) -> Callable[[], None]:
        """What settles and gathers all: a child finds whole weights, and can gather none."""
        found = weakref.ref(self)

        def settle_and_gather() -> None:
            settle()
            alive = found()
            if alive is not None:
                alive.settle()

        return settle_and_gather

    def agree(self, what: str, found: tuple[str, ...]) -> None:
        """All ranks have found the same, and gathered all that is pending. Raises RankError."""
        with self._lock:
            self.all()
            self._ranks.require_alike(what, found)

    def agree_ahead(self, what: str, found: tuple[str, ...], wish: int) -> int:
        """As `agree`; gives the fewest units ahead of need that any rank wishes for."""
        with self._lock:
            self.all()
            if len(set(self._ranks.tell(what, (f"{wish} units ahead", *found)))) == 1:
                return wish
            wishes = self._ranks.of_all(what, wish)
            self._ranks.require_alike(what, found)
            return min(wishes)

    def on_any(self, what: str, rows: Collection[int]) -> set[int]:
        """What each rank has found of these rows, together. Raises RankError."""
        with self._lock:
            self.all()
            if len(set(self._ranks.tell(what, tuple(map(str, sorted(rows)))))) == 1:
                return set(rows)
            return set().union(*self._ranks.of_all(what, sorted(rows)))

    def bring(self, rows: tuple[int, ...], wholes: Sequence[torch.Tensor], kind: TaskKind = TaskKind.ALL_GATHER) -> None:
        """Write the whole weights of sharded rows, on the current stream, of every rank's shards.

        wholes   flat, bf16
        kind     what it is in a recording

        All ranks have agreed on it. Raises RankError where one does not come.
        """
        homes = list(map(self._states.home, rows))
        from_host = sum(home.nbytes for row, home in zip(rows, homes, strict=True) if self._states.streamed[row].shard is None)
        with self._ranks.times.around(FETCH_OF[kind], rows[0], from_host) if from_host and kind in FETCH_OF else nullcontext():
            for row, home, whole in zip(rows, homes, wholes, strict=True):
                shard = self._table.shards[row]
                whole[shard.begin : shard.end].copy_(home, non_blocking=True)
        packed = self._ranks.gather(wholes, self._layouts[rows], f"the weights of {self._table.names[rows[0]]} and others")
        self._ranks.send([packed], kind, rows[0])

    def whole(self, row: int, part: torch.Tensor) -> torch.Tensor:
        """What every rank keeps of one parameter, together, flat on the CPU.

        part   what this one keeps of it

        Raises RankError where another rank does not ask for it.
        """
        shard, name = self._table.shards[row], self._table.names[row]
        with self._lock:
            self.all()
            self._ranks.require_alike("optimizer states that the loop reads", (name,))
            whole = torch.empty(shard.numel, dtype=part.dtype, device=self._table.device)
            whole[shard.begin : shard.end] = part
            self._ranks.gather([whole], self._layouts[(row,)], f"the states of {name}").send()
        return whole.cpu()

    def from_owner(self, row: int, own: Any) -> Any:
        """What the owner of a parameter keeps of it, on every rank.

        own   what the owner has, a nest of values with tensors on the CPU; other ranks' is not read

        Raises RankError where another rank does not ask for it.
        """
        owner, name = self._table.shards[row].owner, self._table.names[row]
        assert owner is not None
        with self._lock:
            self.all()
            self._ranks.require_alike("optimizer states that the loop reads", (name,))
            return self._ranks.from_owner(owner, own, f"the states of {name}")

    def rows_of_all(self, rows: Collection[int]) -> set[int]:
        """What each rank has found of the rows of a checkpoint, together. Raises RankError."""
        with self._lock:
            self.all()
            self._ranks.require_alike("the loading of optimizer states", ())
            return set().union(*self._ranks.of_all("the optimizer states that each rank loads", sorted(rows)))

    def _gather(self) -> tuple[int, ...]:
        """Gather the next unit; its rows.

        Where that fails they stay pending: a rank that goes on would read old shards.
        """
        if self._failed is not None:
            raise RankError(self._failed)
        rows = self._pending[0]
        try:
            self._gather_rows(rows)
        except RankError as error:
            self._failed = str(error)
            raise
        self._pending.popleft()
        self._rows.difference_update(rows)
        return rows

    def _gather_rows(self, rows: Sequence[int]) -> None:
        with torch.no_grad(), without_torch_function(), self.unseen(), self._side.beside():
            if self._committed is not None:
                torch.cuda.current_stream(self._table.device).wait_event(self._committed)  # another thread may be the first to ask
            self._engine.wait(self._states.pieces.rows(rows))
            self._ranks.send(self._pack(rows), TaskKind.ALL_GATHER, rows[0])
            if self._committed is not None:
                self._come.update(dict.fromkeys(rows, torch.cuda.current_stream(self._table.device).record_event()))

    def _pack(self, rows: Sequence[int]) -> list[Packed]:
        parameters, packed = self._table.parameters, list[Packed]()
        for dtype in dict.fromkeys(parameters[row].dtype for row in rows):
            alike = tuple(row for row in rows if parameters[row].dtype == dtype)
            # Memory with a version counter of its own: this is no edit of the parameter.
            wholes = [flat_alias(parameters[row].detach()) for row in alike]
            packed.append(self._ranks.gather(wholes, self._layouts[alike], f"the new weights of {self._table.names[alike[0]]} and others"))
        return packed
