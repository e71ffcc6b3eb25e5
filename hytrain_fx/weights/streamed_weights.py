"""Weights that rest on the host and are on the device while graphs read them.

    fetch       a node is about to read a unit: its weights are put under their parameters, in a
                slot of the device; units that the last step needed next are brought meanwhile
    let_go      a node has read them: the slot may be used again
    fill        the loop looks at a weight: the parameter gets memory of its own
    a training forward begins      that memory is given back where nobody holds it

What shares a parameter's storage, views that autograd has saved among it, finds the weight wherever
it is put, as only the memory under the storage changes. No version counts up: no weight changes.

The order with updates: a row is fetched when its update has ended (`Engine.wait` on the lane), and
updated when the last copy of it has come (`cover`, `before_step`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.capture.units import Unit, unit_of_rows
from hytrain_fx.errors import DroppedNodeError, EngineError
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.ir.plan import PlacedPiece, Placement
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.native.storage_memory import put_memory, take_memory
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.runtime.states.streamed_homes import may_stream
from hytrain_fx.torch_private.autograd import accumulator
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.torch_private.trace import is_held_alone
from hytrain_fx.weights.device_slots import CopyLane, Slot, SlotPool, places_in_slot, wait_for
from hytrain_fx.weights.fetch_order import FetchOrder
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.outside_writes import OutsideWrites

UNITS_AHEAD: Final = 2
"""Units brought ahead of need."""
NAN_VARIABLE: Final = "HYTRAIN_FX_NAN_SLOTS"
"""In the environment: fill a slot with NaN once its weights have been read, to find late readers."""


@dataclass(slots=True, eq=False)
class _Streamed:
    """The streamed weights of one unit.

    rows      in order, with the byte in a slot where each begins
    uses      by row: graphs that are about to read it, or do
    slot      under the parameters; what it holds may be out of date
    updated   whether the lane has waited for the last updates
    copied    when the last copies of them have come
    covered   whether an update that comes now comes after that
    """

    number: int
    rows: dict[int, int] = field(default_factory=dict)
    nbytes: int = 0
    uses: Counter[int] = field(default_factory=Counter)
    slot: Slot | None = None
    updated: bool = False
    copied: torch.cuda.Event | None = None
    covered: bool = True


@dataclass(slots=True, eq=False)
class _Run:
    """One run of a graph: what it has fetched, and what of that it has not let go of."""

    fetched: set[int] = field(default_factory=set)
    reads: Counter[int] = field(default_factory=Counter)


class StreamedWeights:
    """Those of one session.

    ahead    units brought ahead of need
    bytes_fetched    copied to slots, since the session began
    """

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, writes: OutsideWrites, held: HeldWeights, units: Sequence[Unit],
    ) -> None:
        self.ahead = UNITS_AHEAD
        self.bytes_fetched = 0
        self._table = table
        self._engine = engine
        self._states = states
        self._writes = writes
        self._held = held
        self._of = states.streamed
        self._unit_of = unit_of_rows(units)
        self._units: dict[int, _Streamed] = {}
        self._kept: set[int] = set()  # rows that stay on the device, because code outside graphs reads them
        self._lane = CopyLane(table.device)
        self._pool = SlotPool(table.device, self.ahead + 1)
        self._order = FetchOrder()
        self._lock = threading.RLock()
        self._runs = threading.local()  # of graphs, in this thread: what each is reading
        self._fills_nan = bool(os.environ.get(NAN_VARIABLE))

    # ---- which weights ----

    def choose(self) -> None:
        """Stream every weight that may be and is not: whole ones in bf16 that the CPU updates.

        All rows are at rest, and written weights are followed.
        """
        with torch.no_grad(), without_torch_function(), self._held.ours():
            self._states.on_home = self._home_changes
            new = list(filter(self._may_begin, range(len(self._table))))
            if new:
                self._drop_slots()
                for row in new:
                    self._states.stream(row)
                self._arrange()

    def before_move(self, placed: Sequence[PlacedPiece]) -> None:
        """Weights of rows that will not be whole on the CPU are to stay on the device."""
        leaving = sorted(self._of.keys() - self._whole_on_cpu(placed))
        if not leaving:
            return
        self.fill(leaving)
        self._drop_slots()
        with torch.no_grad(), without_torch_function(), self._held.ours():
            for row in leaving:
                self._states.keep_on_device(row)
            self._arrange()

    @staticmethod
    def _whole_on_cpu(placed: Sequence[PlacedPiece]) -> set[int]:
        pieces = Counter(of.piece.parameter for of in placed)
        return {of.piece.parameter for of in placed if of.placement is Placement.CPU and pieces[of.piece.parameter] == 1}

    def may_be_any(self) -> bool:
        """Whether any weight of the model may be streamed, wherever it is updated."""
        return any(map(self._fits, range(len(self._table))))

    def _may_begin(self, row: int) -> bool:
        if row in self._of or row in self._states.pieces.cut or self._states.placement[row] is not Placement.CPU:
            return False
        return self._states[row].low is not None and may_stream(self._table.parameters[row])

    def _arrange(self) -> None:
        """Give each unit's weights their places in a slot. There are none now."""
        self._units = {}
        for row in self._of:
            number = self._unit_of[row]
            self._units.setdefault(number, _Streamed(number)).rows[row] = 0
        for unit in self._units.values():
            begins, unit.nbytes = places_in_slot([self._nbytes(row) for row in unit.rows])
            unit.rows = dict(zip(unit.rows, begins, strict=True))

    def _nbytes(self, row: int) -> int:
        parameter = self._table.parameters[row]
        return parameter.numel() * parameter.element_size()

    # ---- while graphs run ----

    @contextmanager
    def running(self, graph: str, needed: Collection[int]) -> Iterator[None]:
        """Around one run of a compiled graph that reads the weights of these rows.

        What its nodes have not let go of is let go of as it ends.

        Raises DroppedNodeError where it has not fetched them all.
        """
        outer, run = getattr(self._runs, "now", None), _Run()
        self._runs.now = run
        try:
            yield
            missing = [row for row in needed if row not in run.fetched]
            if missing:
                raise DroppedNodeError(
                    f"{graph} ended but {len(missing)} of its weights were never fetched ({self._table.names[missing[0]]}, ...); "
                    "an inserted node was dropped by the compiler: please report this with the torch version")
        finally:
            self._runs.now = outer
            self._end_uses(run.reads)

    def fetch(self, rows: Sequence[int]) -> None:
        """What is launched from now on finds these weights on the device."""
        run: _Run | None = getattr(self._runs, "now", None)
        if run is None:
            raise EngineError("internal: weights were fetched outside a compiled graph")
        run.fetched.update(rows)
        mine = [row for row in rows if row in self._of]
        with self._lock, torch.no_grad(), without_torch_function():
            for number in dict.fromkeys(self._unit_of[row] for row in mine):
                unit = self._units[number]
                self._bring(unit)
                for row in mine:
                    if self._unit_of[row] == number:
                        unit.uses[row] += 1
                        run.reads[row] += 1
                self._bring_ahead(self._order.needed(number, self.ahead))

    def let_go(self, rows: Iterable[int]) -> None:
        """The graph that runs in this thread has launched all that reads these weights."""
        run: _Run | None = getattr(self._runs, "now", None)
        if run is not None and run.reads:
            self._end_uses(Counter({row: run.reads.pop(row) for row in rows if row in run.reads}))

    def _end_uses(self, ended: Counter[int]) -> None:
        with self._lock:
            for row, count in ended.items():
                unit = self._units[self._unit_of[row]]
                unit.uses[row] -= count
                if unit.uses[row] <= 0:
                    del unit.uses[row]
                if not unit.uses and unit.slot is not None and not self._pool.is_idle(unit.slot):
                    self._give(unit.slot)

    def _give(self, slot: Slot) -> None:
        if self._fills_nan:
            slot.memory.fill_(0xFF)  # of every 16-bit element, NaN
            slot.holds = False
        slot.free = self._lane.present()
        self._pool.give(slot)

    def _bring(self, unit: _Streamed) -> None:
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

    def _bring_ahead(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            unit = self._units.get(number)
            if unit is None:  # it was streamed in the last step
                continue
            away, behind = self._missing(unit)
            if not away or behind or unit.uses or (unit.slot is not None and unit.slot.holds):
                continue
            if not unit.updated and not self._engine.issued(list(unit.rows)):
                return
            slot = unit.slot or self._pool.take_ahead(unit.nbytes)
            if slot is None:
                return
            self._pool.use(slot)
            self._settle_in(unit, slot)
            slot.ahead = True
            self._copy(unit, away, ())

    def _missing(self, unit: _Streamed) -> tuple[list[int], list[int]]:
        """Rows of a unit without memory of their own, and those whose memory is out of date."""
        away = [row for row in unit.rows if not self._of[row].has_memory]
        return away, [row for row in unit.rows if self._of[row].has_memory and not self._of[row].current]

    def _settle_in(self, unit: _Streamed, slot: Slot) -> None:
        """The slot is this unit's: the parameters of the one before have no memory."""
        before = self._units.get(slot.unit) if slot.unit is not None else None
        if before is not None and before is not unit and before.slot is slot:
            self._leave(before)
        unit.slot, slot.unit, slot.holds = slot, unit.number, False

    def _leave(self, unit: _Streamed) -> None:
        for row in unit.rows:
            if not self._of[row].has_memory:
                take_memory(self._table.parameters[row])
        unit.slot = None

    def _copy(self, unit: _Streamed, away: Sequence[int], behind: Sequence[int]) -> None:
        """Put copies of these rows on the lane: into the slot, or into memory of their own."""
        slot, present = unit.slot, self._lane.present() if behind else None
        with self._lane.current(present, slot.free if slot is not None else None):
            if not unit.updated:
                self._engine.wait(list(unit.rows))
                unit.updated = True
            for row in away:
                assert slot is not None
                begin, nbytes = unit.rows[row], self._nbytes(row)
                slot.memory[begin : begin + nbytes].view(torch.bfloat16).copy_(self._states.home(row), non_blocking=True)
                self.bytes_fetched += nbytes
            for row in behind:
                flat_alias(self._table.parameters[row].detach()).copy_(self._states.home(row), non_blocking=True)
                self._of[row].current = True
            unit.copied, unit.covered = self._lane.point(), False
        for row in away:
            assert slot is not None
            put_memory(self._table.parameters[row], slot.memory, unit.rows[row], self._nbytes(row))
        if slot is not None and away:
            slot.holds = True

    # ---- the order with updates ----

    def cover(self, rows: Iterable[int]) -> None:
        """Gradients of these rows are about to be copied: their updates come after that.

        The compute stream, which the copies wait for, waits for the copies of the weights.
        """
        with self._lock:
            for number in {self._unit_of[row] for row in rows if row in self._of}:
                unit = self._units[number]
                if not unit.covered:
                    wait_for(unit.copied, self._table.device)
                    unit.covered = True

    def before_step(self) -> None:
        """Updates are about to begin: no copy of a weight may be under way that they write.

        Returns when none is, except those that `cover` has put before the gradients.
        """
        with self._lock:
            for unit in self._units.values():
                self._end_copies(unit)

    def committed(self, rows: Iterable[int]) -> None:
        """The updates of these rows have begun: what the device has of them is out of date."""
        with self._lock:
            for row in rows:
                if row in self._of:
                    unit = self._units[self._unit_of[row]]
                    if not unit.covered or unit.uses:
                        raise EngineError(f"internal: {self._table.names[row]} is updated while its weight is on its way or read")
                    self._of[row].current = False
                    self._out_of_date(unit)
            self._order.stepped()

    def _home_changes(self, row: int) -> None:
        """The weight is about to be written on the host by somebody else than an update."""
        with self._lock:
            unit = self._units[self._unit_of[row]]
            self._end_copies(unit)
            self._out_of_date(unit)

    @staticmethod
    def _end_copies(unit: _Streamed) -> None:
        if not unit.covered:
            if unit.copied is not None:
                unit.copied.synchronize()
            unit.covered = True

    @staticmethod
    def _out_of_date(unit: _Streamed) -> None:
        unit.updated = False
        if unit.slot is not None:
            unit.slot.holds = False

    # ---- what the loop reads and writes ----

    def enter_forward(self, touched: Collection[int]) -> None:
        """Before a training forward: give back memory that nobody holds.

        Not what was written, or may have been, and is not the master yet: `step()` follows it.
        """
        if not self._of or not torch.is_grad_enabled():
            return
        seen = touched if self._table.device.type == "cpu" else ()
        with torch.no_grad(), without_torch_function():
            there = [row for row, of in self._of.items() if of.has_memory and row not in self._kept and row not in seen]
            alone = [row for row in there if self._writes.is_ours(row) and self._is_alone(self._table.parameters[row])]
            if alone and self._table.device.type == "cuda":
                torch.cuda.synchronize(self._table.device)  # a stream of the loop's own may still read it
            with self._lock:
                for row in alone:
                    self._of[row].has_memory = False
                    take_memory(self._table.parameters[row])
                    unit = self._units[self._unit_of[row]]
                    if unit.slot is not None:
                        unit.slot.holds = False  # it has nothing of this row

    @staticmethod
    def _is_alone(parameter: nn.Parameter) -> bool:
        return may_stream(parameter) and is_held_alone(parameter, accumulator(parameter) if parameter.requires_grad else None)

    def fill(self, rows: Iterable[int]) -> None:
        """Have these parameters show the weight of the last update in memory of their own."""
        behind = [row for row in rows if row in self._of and not self._of[row].shows]
        if not behind:
            return
        with torch.no_grad(), without_torch_function():
            self._engine.settle(behind)
            with self._lock:
                for row in behind:
                    self._fill(row)
            self._writes.note_all(behind)

    def _fill(self, row: int) -> None:
        of, parameter = self._of[row], self._table.parameters[row]
        if of.has_memory:
            self._states.show_weight(row)
            return
        memory = torch.empty(self._nbytes(row), dtype=torch.uint8, device=parameter.device)
        memory.view(torch.bfloat16).copy_(self._states.home(row))  # it is there when this returns: another thread may read it at once
        put_memory(parameter, memory, 0, memory.nbytes)
        of.has_memory = of.current = True

    def keep(self, rows: Iterable[int]) -> None:
        """Code outside graphs reads these weights, now or in its backward: they stay here."""
        rows = list(rows)
        self._kept.update(rows)
        self.fill(rows)

    def keep_all(self) -> None:
        """Code that nobody can watch may read any weight from now on."""
        self.keep(tuple(self._of))

    def may_lose_memory(self, row: int) -> bool:
        """Whether the parameter's memory may go before the next training forward."""
        return row in self._of and row not in self._kept

    def restore(self) -> None:
        """Give every parameter its memory and weight, for good. Also where the engine has failed."""
        if not self._of:
            return
        with suppress(EngineError):
            self._engine.drain(list(self._of))
        with torch.no_grad(), without_torch_function(), self._lock:
            for row in self._of:
                if not self._of[row].shows:
                    self._fill(row)
            self._kept.update(self._of)
            self._drop_slots()

    def _drop_slots(self) -> None:
        """Let go of the slots; the device has read and filled them."""
        if self._pool.slots and self._table.device.type == "cuda":
            torch.cuda.synchronize(self._table.device)
        for unit in self._units.values():
            with without_torch_function():  # this is no touch
                self._leave(unit)
            unit.uses.clear()
            unit.covered = True
        self._pool.clear()

    # ---- telling of it ----

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots now."""
        return self._pool.nbytes

    @property
    def away_bytes(self) -> int:
        """Bytes of the weights whose parameters have no memory of their own now."""
        return sum(self._nbytes(row) for row, of in self._of.items() if not of.has_memory)

    def under(self, placed: Sequence[PlacedPiece]) -> tuple[int, int]:
        """Bytes of the weights that rest on the host alone where states are placed so.

        And those of the slots that they take on the device once every unit was fetched.
        """
        rows = [row for row in self._whole_on_cpu(placed) - self._kept if row in self._of or self._fits(row)]
        sizes: dict[int, list[int]] = {}
        for row in sorted(rows):
            sizes.setdefault(self._unit_of[row], []).append(self._nbytes(row))
        slots = Counter(places_in_slot(of_unit)[1] for of_unit in sizes.values())
        return sum(map(self._nbytes, rows)), sum(nbytes * min(count, self._pool.of_a_size) for nbytes, count in slots.items())

    def _fits(self, row: int) -> bool:
        with without_torch_function():
            return may_stream(self._table.parameters[row])

    def in_words(self) -> str | None:
        """How many weights are streamed, and how much of them; None where none are."""
        if not self._of:
            return None
        streamed = [row for row in self._of if row not in self._kept]
        params, everything = sum(self._table.parameters[row].numel() for row in streamed), sum(p.numel() for p in self._table.parameters)
        stay = sorted(self._kept.intersection(self._of))
        kept = (f"; {len(stay)} more stay on the device, as code outside graphs reads them: "
                f"{self._table.names[stay[0]]}" + (", ..." if len(stay) > 1 else "")) if stay else ""
        return (f"streamed weights: {len(streamed)} of {len(self._table)} rest on the host ({params / everything:.1%} of the parameters, "
                f"{bytes_text(sum(map(self._nbytes, streamed)))}), the device has {bytes_text(self.slot_bytes)} of slots for them{kept}")
