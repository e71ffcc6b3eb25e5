"""Units of streamed weights in slots of the device, while graphs read them.

    fetch      a node is about to read a unit: its weights are put under their parameters, in a
               slot; units that the last step needed next are brought meanwhile
    let_go     a node has read them: the slot may be used again

What shares a parameter's storage, views that autograd has saved among it, finds the weight wherever
it is put, as only the memory under the storage changes. No version counts up: no weight changes.

The order with updates: a unit is fetched when its updates have ended (`Engine.wait` on the lane),
and updated when the last copy of it has come (`cover`, `before_step`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import DroppedNodeError, EngineError
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.ir.task_graph import TaskKind
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.lane_times import LaneTimes
from hytrain_fx.runtime.native.storage_memory import put_memory, take_memory
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.device_slots import CopyLane, Slot, SlotPool, bytes_of_slots, places_in_slot, slot_bytes, wait_for
from hytrain_fx.weights.fetch_order import FetchOrder
from hytrain_fx.weights.fetched_unit import FetchedUnit, GraphRun

NAN_VARIABLE: Final = "HYTRAIN_FX_NAN_SLOTS"
"""Set in the environment: a slot is filled with NaN once it has been read. Late readers show so."""


class FetchedUnits:
    """Those of one session.

    wanted           whether weights may be streamed at all: graphs of others are not looked at
    ahead            units brought ahead of need
    bytes_fetched    copied to slots, since the session began
    times            when units were copied, in a recording; with ranks theirs
    lock             held while memory under a parameter changes
    held             entered around what a graph waits for
    """

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, units: Sequence[Unit],
        held: Callable[[], AbstractContextManager[None]], times: LaneTimes | None, wanted: bool,
    ) -> None:  # fmt: skip
        self.wanted = wanted
        self.ahead = UNITS_AHEAD
        self.bytes_fetched = 0
        self.times = times or LaneTimes(table.device)
        self.lock = threading.RLock()
        self._table = table
        self._engine = engine
        self._states = states
        self.held = held
        self._of = states.streamed
        self._unit_of = unit_of_rows(units)
        self._units: dict[int, FetchedUnit] = {}
        self._lane = CopyLane(table.device)
        self._pool = SlotPool(table.device, self.ahead + 1)
        self._order = FetchOrder()
        self._runs = threading.local()  # of graphs, in this thread: what each is reading
        self._fills_nan = bool(os.environ.get(NAN_VARIABLE))

    # ---- where in slots ----

    def arrange(self) -> None:
        """Give each unit's weights their places in a slot. There are none now."""
        self._units = {}
        for row in self._of:
            number = self._unit_of[row]
            self._units.setdefault(number, FetchedUnit(number)).rows[row] = 0
        for unit in self._units.values():
            begins, unit.nbytes = places_in_slot([self.nbytes(row) for row in unit.rows])
            unit.rows = dict(zip(unit.rows, begins, strict=True))

    def nbytes(self, row: int) -> int:
        """Bytes of a weight."""
        parameter = self._table.parameters[row]
        return parameter.numel() * parameter.element_size()

    def drop_slots(self) -> None:
        """Let go of the slots; the device has read and filled them."""
        if self._pool.slots and self._table.device.type == "cuda":
            torch.cuda.synchronize(self._table.device)
        for unit in self._units.values():
            with without_torch_function():  # this is no touch
                self._leave(unit)
            unit.uses.clear()
            unit.covered = True
        self._pool.clear()

    @property
    def has_units(self) -> bool:
        """Whether any weights may pass through slots, also where none has been made."""
        return bool(self._units)

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots now."""
        return self._pool.nbytes

    @property
    def failures(self) -> int:
        """How many errors torch's allocator has counted for slots that are done without."""
        return self._pool.failures

    def slot_bytes_for(self, rows: Iterable[int]) -> int:
        """Bytes of the slots for these rows, once as many units as planned are there."""
        sizes: dict[int, list[int]] = {}
        for row in sorted(rows):
            sizes.setdefault(self._unit_of[row], []).append(self.nbytes(row))
        return bytes_of_slots(sizes.values(), self._pool.of_a_size)

    def look_ahead(self, units: int) -> None:
        """Bring so many units ahead of need from now on, in one slot more of each size.

        Where that is fewer than before, all slots go and new ones are made. No graph runs.
        """
        with self.lock:
            if units < self.ahead:
                self.drop_slots()
            self.ahead, self._pool.of_a_size = units, units + 1
            self._pool.lacking.clear()

    def make_slots(self) -> None:
        """Make all that the units of the last step may fill at once, as far as the device has room.

        Left to be made when they are needed, fewer are there where updates hold fetches back, and
        the device has less in use than was estimated.
        """
        with self.lock:
            read = (self._units[number] for number in self._order.units if number in self._units)
            nbytes = [unit.nbytes for unit in read if not all(self._of[row].has_memory for row in unit.rows)]
            self._pool.make(nbytes)

    # ---- while graphs run ----

    @contextmanager
    def running(
        self, graph: int, calls: Sequence[tuple[Sequence[int], int]], *, backward: bool = False, evaluates: bool = False
    ) -> Iterator[None]:
        """Around one run of a compiled graph.

        calls      of each node that fetches: its rows, and how many that take gradients come before
                   it
        backward   whether it is one of a backward
        evaluates  whether it is a forward that no backward comes after

        What its nodes have not let go of is let go of as it ends.

        Raises DroppedNodeError where it has not fetched them all, RankError where sharded weights
        are not gathered alike.
        """
        if not self.wanted:
            yield
            return
        outer, run = getattr(self._runs, "now", None), self._begin_run(calls)
        self._runs.now, run.backward, run.evaluates = run, backward, evaluates
        try:
            yield
            missing = [row for rows, _ in calls for row in rows if row not in run.fetched]
            if missing:
                raise DroppedNodeError(
                    f"graph {graph} ended but {len(missing)} of its weights were never fetched ({self._table.names[missing[0]]}, ...); "
                    "an inserted node was dropped by the compiler: please report this with the torch version")
        finally:
            with whole():
                self._runs.now = outer
                self._end_run(run)

    def _begin_run(self, calls: Sequence[tuple[Sequence[int], int]]) -> GraphRun:
        """A graph with these calls is about to run."""
        return GraphRun()

    def _end_run(self, run: GraphRun) -> None:
        self._end_uses(run.reads)

    def fetch(self, rows: Sequence[int]) -> None:
        """What is launched from now on finds these weights on the device."""
        if not self.wanted:
            return
        run: GraphRun | None = getattr(self._runs, "now", None)
        if run is None:
            raise EngineError("internal: weights were fetched outside a compiled graph")
        run.fetched.update(rows)
        mine = [row for row in rows if row in self._of]
        with self.held() if mine else nullcontext(), self.lock, torch.no_grad(), without_torch_function():
            for number in dict.fromkeys(self._unit_of[row] for row in mine):
                unit = self._units[number]
                self._bring(unit, run)
                for row in mine:
                    if self._unit_of[row] == number:
                        unit.uses[row] += 1
                        run.reads[row] += 1
                self._bring_ahead(number, run)

    def let_go(self, rows: Iterable[int]) -> None:
        """The graph that runs in this thread has launched all that reads these weights."""
        run: GraphRun | None = getattr(self._runs, "now", None)
        if run is not None and run.reads:
            self._end_uses(Counter({row: run.reads.pop(row) for row in rows if row in run.reads}))

    def _end_uses(self, ended: Counter[int]) -> None:
        with self.lock:
            for row, count in ended.items():
                unit = self._units[self._unit_of[row]]
                unit.uses[row] -= count
                if unit.uses[row] <= 0:
                    del unit.uses[row]
                self._give_unused(unit)

    def _give_unused(self, unit: FetchedUnit) -> None:
        if not unit.uses and unit.slot is not None and not self._pool.is_idle(unit.slot):
            self._give(unit.slot)

    def _give(self, slot: Slot) -> None:
        if self._fills_nan:
            slot.memory.fill_(0xFF)  # of every 16-bit element, NaN
            slot.holds = False
        slot.free = self._lane.present()
        self._pool.give(slot)

    def _bring(self, unit: FetchedUnit, run: GraphRun) -> None:
        """Have the weights of a unit where its graph is about to read them."""
        away, behind = self._missing(unit)
        if away and not behind and unit.slot is not None and unit.slot.holds:
            self._pool.use(unit.slot)
        elif away or behind:
            if away and unit.slot is None:
                self._settle_in(unit, self._pool.take(unit.nbytes))
            elif unit.slot is not None:
                self._pool.use(unit.slot)
            self._copy(unit, away, behind)
        wait_for(unit.copied, self._table.device)

    def _place(self, unit: FetchedUnit, away: Sequence[int]) -> None:
        """The slot, which has these weights, is the memory of their parameters."""
        for row in away:
            assert unit.slot is not None
            put_memory(self._table.parameters[row], unit.slot.memory, unit.rows[row], self.nbytes(row))
            unit.slot.holds = True

    def _bring_ahead(self, after: int, run: GraphRun) -> None:
        for number in self._order.needed(after, self.ahead, evaluates=run.evaluates):
            unit = self._units.get(number)
            if unit is None:  # it was streamed in the last step
                continue
            away, behind = self._missing(unit)
            if not away or behind or unit.uses:
                continue
            if unit.slot is not None and unit.slot.holds:
                self._pool.keep(unit.slot)
                continue
            if not unit.updated and not self._engine.issued(list(unit.rows)):
                return
            slot = unit.slot or self._pool.take_ahead(unit.nbytes)
            if slot is None:
                self._look_less_ahead(unit)
                return
            self._pool.use(slot)
            self._settle_in(unit, slot)
            slot.ahead = True
            self._copy(unit, away, ())

    def _look_less_ahead(self, unit: FetchedUnit) -> None:
        """Where there is no room for as many as planned of a size that several units have."""
        size = slot_bytes(unit.nbytes)
        there = self._pool.lacking.get(size)
        if there is not None and sum(slot_bytes(of.nbytes) == size for of in self._units.values()) > 1:
            self.ahead = max(there - 1, 0)

    def _missing(self, unit: FetchedUnit) -> tuple[list[int], list[int]]:
        """Rows of a unit without memory of their own, and those whose memory is out of date."""
        away = [row for row in unit.rows if not self._of[row].has_memory]
        return away, [row for row in unit.rows if self._of[row].has_memory and not self._of[row].current]

    def _settle_in(self, unit: FetchedUnit, slot: Slot) -> None:
        """The slot is this unit's: the parameters of the one before have no memory."""
        before = self._units.get(slot.unit) if slot.unit is not None else None
        if before is not None and before is not unit and before.slot is slot:
            self._leave(before)
        unit.slot, slot.unit, slot.holds = slot, unit.number, False

    def _leave(self, unit: FetchedUnit) -> None:
        for row in unit.rows:
            if not self._of[row].has_memory:
                take_memory(self._table.parameters[row])
        unit.slot = None

    def _copy(self, unit: FetchedUnit, away: Sequence[int], behind: Sequence[int]) -> None:
        """Put copies of these rows on the lane: into the slot, or into memory of their own."""
        slot, present = unit.slot, self._lane.present() if behind else None
        kind = TaskKind.FETCH_BACKWARD if unit.updated else TaskKind.FETCH_FORWARD
        with self._lane.current(present, slot.free if slot is not None else None):
            if not unit.updated:
                self._engine.wait(list(unit.rows))
                unit.updated = True
            nbytes = sum(map(self.nbytes, away))
            with self.times.around(kind, next(iter(unit.rows)), nbytes + sum(map(self.nbytes, behind))):
                for row in away:
                    assert slot is not None
                    begin, end = unit.rows[row], unit.rows[row] + self.nbytes(row)
                    slot.memory[begin:end].view(torch.bfloat16).copy_(self._states.home(row), non_blocking=True)
                for row in behind:
                    flat_alias(self._table.parameters[row].detach()).copy_(self._states.home(row), non_blocking=True)
                    self._of[row].current = True
            self.bytes_fetched += nbytes
            unit.copied, unit.covered = self._lane.point(), False
        self._place(unit, away)

    # ---- the order with updates ----

    def cover(self, rows: Iterable[int]) -> None:
        """Gradients of these rows are about to be copied: their updates come after that.

        The compute stream, which the copies wait for, waits for the copies of the weights.
        """
        with self.lock:
            for number in {self._unit_of[row] for row in rows if row in self._of}:
                unit = self._units[number]
                if not unit.covered:
                    wait_for(unit.copied, self._table.device)
                    unit.covered = True

    def before_step(self) -> None:
        """Updates are about to begin: no copy of a weight may be under way that they write.

        Returns when none is, except those that `cover` has put before the gradients.
        """
        with self.lock:
            for unit in self._units.values():
                self._end_copies(unit)
                self._end_uses(unit.uses.copy())  # of a graph that an interrupt has broken off

    def committed(self, rows: Iterable[int]) -> None:
        """The updates of these rows have begun: what the device has of them is out of date."""
        with self.lock:
            for row in rows:
                if row in self._of:
                    unit = self._units[self._unit_of[row]]
                    if not unit.covered:
                        raise EngineError(f"internal: {self._table.names[row]} is updated while its weight is on its way to the device")
                    self._of[row].current = False
                    self._out_of_date(unit)
            for slot in self._pool.slots:
                if slot.ahead:  # for a branch that the step did not take
                    self._give(slot)
            self._order.stepped()

    def home_changes(self, row: int) -> None:
        """The weight is about to be written on the host by somebody else than an update."""
        with self.lock:
            unit = self._units[self._unit_of[row]]
            self._end_copies(unit)
            self._out_of_date(unit)

    def lost(self, row: int) -> None:
        """Its parameter has no memory any more: what its unit has in a slot is not all of it."""
        unit = self._units[self._unit_of[row]]
        if unit.slot is not None:
            unit.slot.holds = False

    @staticmethod
    def _end_copies(unit: FetchedUnit) -> None:
        if not unit.covered:
            if unit.copied is not None:
                unit.copied.synchronize()
            unit.covered = True

    @staticmethod
    def _out_of_date(unit: FetchedUnit) -> None:
        unit.updated = False
        if unit.slot is not None:
            unit.slot.holds = False
