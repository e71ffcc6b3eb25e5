"""Weights that rest elsewhere than on the device: which they are, and how the loop finds them.

    choose       whole bf16 matrices that the CPU updates: their homes are on the host from now on
    (graphs)     find them in slots of the device (fetched_units.py)
    fill         the loop looks at a weight: the parameter gets memory of its own
    keep         code outside graphs reads it in a forward: it keeps that memory
    a training forward begins      the memory is given back where nobody holds it

Or sharded: each rank has its shard, and all gather a weight together, also for the loop. So ranks
look at the same weights. What decides whether they gather, all ranks know (`FetchedUnits.whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import nn

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.errors import EngineError
from hytrain_fx.ir.figures import bytes_text
from hytrain_fx.ir.plan import PlacedPiece, Placement, whole_on_cpu
from hytrain_fx.runtime import memory
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.lane_times import LaneTimes
from hytrain_fx.runtime.memory import available_host_bytes
from hytrain_fx.runtime.native.storage_memory import put_memory, take_memory
from hytrain_fx.runtime.states.pieces import flat_alias
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.runtime.states.streamed_homes import may_stream
from hytrain_fx.torch_private.autograd import accumulator
from hytrain_fx.torch_private.tensors import set_data, without_torch_function
from hytrain_fx.torch_private.trace import is_held_alone
from hytrain_fx.weights.fetched_units import FetchedUnits
from hytrain_fx.weights.gathered_units import GatheredUnits
from hytrain_fx.weights.held import HeldWeights
from hytrain_fx.weights.outside_writes import OutsideWrites
from hytrain_fx.weights.returning import ReservedMemory, Returning
from hytrain_fx.weights.shared_reads import SharedReads


class StreamedWeights:
    """Those of one session.

    wanted   whether there are to be any
    units    as graphs read them
    depth    how many are brought ahead of need and why, once that is solved
    since    why they are streamed only from a later step on, in a sentence
    left_on_host   whether the device had no room for them at the end, so that they are on the CPU
    """

    depth: FetchDepth | None = None
    since: str | None = None
    left_on_host = False

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, writes: OutsideWrites, held: HeldWeights, units: FetchedUnits,
        is_elsewhere: Callable[[], bool],
    ) -> None:
        self.wanted = units.wanted
        self.units = units
        self._table = table
        self._engine = engine
        self._states = states
        self._writes = writes
        self._held = held
        self._of = states.streamed
        self._kept: set[int] = set()  # rows that stay on the device, because code outside graphs reads them
        self._reserved = ReservedMemory(table.device)
        self._shared = SharedReads(table, states, units, self._reserved, is_elsewhere) if isinstance(units, GatheredUnits) else None

    # ---- which weights ----

    def rest_on_host(self, on: bool) -> None:
        """Whether shards are to rest on the host, from the next `choose` on."""
        if self._shared:
            self._shared.homes.on_host = on

    @whole()
    def choose(self) -> None:
        """Stream every weight that may be and is not: whole ones in bf16 that the CPU updates.

        Or shard them, wherever they are updated. All rows are at rest, and written weights are
        followed.
        """
        with torch.no_grad(), without_torch_function(), self._held.ours():
            self._states.on_home = self.units.home_changes
            new = list(filter(self._may_begin, range(len(self._table))))
            if new:
                self.units.drop_slots()
                for row in new:
                    (self._shared.homes.begin if self._shared else self._states.stream)(row)
                self.units.arrange()
            if self._shared:
                self._shared.units.whole.update(new)  # until the first training forward
                self._shared.homes.settle()

    @contextmanager
    def moving(self, placed: Sequence[PlacedPiece]) -> Iterator[None]:
        """Around a move of states to where `placed` has them: weights follow, there and back."""
        if not self.wanted:
            yield
            return
        self._before_move(placed)
        try:
            yield
        finally:
            self.choose()

    @whole()
    def _before_move(self, placed: Sequence[PlacedPiece]) -> None:
        """Weights of rows that will not be whole on the CPU are to stay on the device."""
        if self._shared:
            with torch.no_grad(), without_torch_function(), self._held.ours():
                self._shared.homes.before_move(placed)
            return
        leaving = sorted(self._of.keys() - whole_on_cpu(placed))
        if not leaving:
            return
        self.fill(leaving)
        self.units.drop_slots()
        with torch.no_grad(), without_torch_function(), self._held.ours():
            for row in leaving:
                self._states.keep_on_device(row)
            self.units.arrange()

    @whole()
    def begin_away(self, rows: Iterable[int]) -> None:
        """These weights were just streamed or sharded, and never were whole on the device.

        The memory there goes.
        """
        with self.units.lock, torch.no_grad(), without_torch_function():
            self.units.arrange()
            for row in rows:
                self._of[row].has_memory = False
                take_memory(self._table.parameters[row])

    def may_be_any(self) -> bool:
        """Whether any weight of the model may be streamed, wherever it is updated."""
        return any(map(self._fits, range(len(self._table))))

    def _may_begin(self, row: int) -> bool:
        if self._shared:
            return row not in self._of and row not in self._kept and self._fits(row)
        if row in self._of or row in self._states.pieces.cut or self._states.placement[row] is not Placement.CPU:
            return False
        return self._states[row].low is not None and may_stream(self._table.parameters[row])

    # ---- what the loop reads and writes ----

    def enter_forward(self, touched: Collection[int]) -> None:
        """Before a training forward: give back memory that nobody holds.

        Not what was written, or may have been, and is not the master yet: `step()` follows it.
        """
        if not self._of or not torch.is_grad_enabled():
            return
        if self._shared:
            self._shared.units.whole.clear()
        seen = touched if self._table.device.type == "cpu" else ()
        with torch.no_grad(), without_torch_function():
            there = [row for row, of in self._of.items() if of.has_memory and row not in self._kept and row not in seen]
            alone = [row for row in there if self._writes.is_ours(row) and self._is_alone(self._table.parameters[row])]
            if alone and self._table.device.type == "cuda":
                torch.cuda.synchronize(self._table.device)  # a stream of the loop's own may still read it
            with whole(), self.units.lock:
                for row in alone:
                    self._of[row].has_memory = False
                    self.units.lost(row)
                    take_memory(self._table.parameters[row])

    @staticmethod
    def _is_alone(parameter: nn.Parameter) -> bool:
        return may_stream(parameter) and is_held_alone(parameter, accumulator(parameter) if parameter.requires_grad else None)

    @whole()
    def fill(self, rows: Iterable[int]) -> None:
        """Have these parameters show the weight of the last update in memory of their own.

        Raises RankError and UnsupportedError where they are sharded.
        """
        if self._shared:
            self._writes.note_all(self._shared.fill(rows))
            return
        behind = [row for row in rows if row in self._of and not self._of[row].shows]
        if not behind:
            return
        with torch.no_grad(), without_torch_function():
            self._engine.settle(behind)
            with self.units.lock:
                for row in behind:
                    self._fill(row)
            self._writes.note_all(behind)

    def _fill(self, row: int) -> None:
        of, parameter = self._of[row], self._table.parameters[row]
        if of.has_memory:
            self._states.show_weight(row)
            return
        memory = self._reserved.memory(row, self.units.nbytes(row))
        memory.view(torch.bfloat16).copy_(self._states.home(row))  # it is there when this returns: another thread may read it at once
        put_memory(parameter, memory, 0, memory.nbytes)
        of.has_memory = of.current = True

    def keep(self, rows: Iterable[int]) -> None:
        """Code outside graphs reads these weights, now or in its backward: they stay here."""
        rows = [row for row in rows if row in self._of]
        if not self._shared:
            self._kept.update(rows)
        self.fill(rows)
        if self._shared:
            self._engine.drain(self._states.pieces.rows(rows))
            with torch.no_grad(), without_torch_function(), self._held.ours():
                for row in rows:
                    self._states.keep_on_device(row)
                    self._shared.units.stays(row)
            self._kept.update(rows)

    def gathered_on_host(self, row: int) -> torch.Tensor | None:
        """The weight of a sharded parameter, flat on the CPU; None where its own memory has it.

        Raises RankError and UnsupportedError as `fill`.
        """
        if not self._shared or row not in self._of or self._shared.units.is_whole(row):
            return None
        return self._shared.on_host(row)

    def keep_all(self) -> None:
        """Code that nobody can watch may read any weight from now on."""
        self.keep(range(len(self._table)))

    def held_anywhere(self, held: Sequence[int]) -> tuple[int, ...]:
        """These rows, and sharded ones that code of any rank holds. Raises RankError."""
        if not self._shared or not self._of:
            return tuple(held)
        return tuple(sorted({*held, *self._shared.held(row for row in held if row in self._of)}))

    def require_loop(self) -> None:
        """Raises UnsupportedError where another thread than the loop's reads sharded weights."""
        if self._shared and self._of:
            self._shared.require_loop()

    def may_lose_memory(self, row: int) -> bool:
        """Whether the parameter's memory may go before the next training forward."""
        return row in self._of and row not in self._kept

    def restore(self) -> None:
        """Give every parameter its memory and weight, for good.

        Also where the engine has failed.
        """
        if not self._of:
            return
        with suppress(EngineError):
            self._engine.drain(self._states.pieces.rows(list(self._of)))
        self.left_on_host = self.left_on_host or not (self._shared or self.reserve())
        with torch.no_grad(), without_torch_function(), self.units.lock:
            self.units.drop_slots()
            for row in self._of:
                if not self._of[row].shows:
                    (self._shared.fill_own if self._shared else self._leave_on_host if self.left_on_host else self._fill)(row)
            self._kept.update(self._of)

    def reserve(self) -> bool:
        """Whether the device has room for every weight. It is taken, so `restore` needs no more.

        Slots go first, and come again where a graph is run after all.
        """
        away = {row: self.units.nbytes(row) for row, of in self._of.items() if not of.has_memory}
        if self._reserved.has(away):
            return True
        if not self.returning.fits:
            return False
        with self.units.lock, torch.no_grad():
            self.units.drop_slots()
        return self._reserved.reserve(away)

    def release(self) -> None:
        """The weights do not come back after all."""
        self._reserved.release()

    @property
    def returning(self) -> Returning:
        """What weights take of the device when all come back, and what it has for them."""
        away_bytes = sum(self.units.nbytes(row) for row, of in self._of.items() if not of.has_memory)
        return Returning(away_bytes, memory.room_bytes(self._table.device, 0) + self.units.slot_bytes, available_host_bytes())

    def _leave_on_host(self, row: int) -> None:
        """The parameter is on the CPU from now on, with a copy of its weight."""
        of, parameter = self._of[row], self._table.parameters[row]
        if of.has_memory:
            self._states.show_weight(row)
            return
        copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        flat_alias(copy).copy_(self._states.home(row))
        set_data(parameter, copy)
        of.has_memory = of.current = True

    # ---- as planning sees them (`planning.weight_window.WeightWindow`) ----

    @property
    def ahead(self) -> int:
        """Units brought ahead of need."""
        return self.units.ahead

    @property
    def times(self) -> LaneTimes:
        """When units were brought, in a recording."""
        return self.units.times

    @property
    def slot_bytes(self) -> int:
        """Device memory of the slots now."""
        return self.units.slot_bytes

    def streamed_params(self, rows: Iterable[int]) -> int:
        """Elements of those weights of these rows that rest on the host if the CPU updates them."""
        if self._shared:
            return self._shared.homes.host_params(list(filter(self._may_rest, rows)))
        return sum(self._table.parameters[row].numel() for row in rows if self._may_rest(row))

    def gathered_params(self, rows: Iterable[int]) -> int:
        """Elements of those weights of these rows that ranks keep in shards, all together."""
        return sum(self._table.shards[row].numel for row in rows if row in self._of) if self._shared else 0

    def back_bytes(self) -> int:
        """Bytes of weights that are on the device only because of where they are updated."""
        if self._shared:
            return self._shared.homes.back_bytes
        return sum(self.units.nbytes(row) for row in range(len(self._table)) if row not in self._of and self._may_rest(row))

    def follow(self, depth: FetchDepth) -> None:
        """Bring so many units ahead of need from now on. No graph runs."""
        self.depth = depth
        if self._shared:
            self._shared.units.wish = depth.ahead
            return
        if depth.ahead != self.units.ahead:
            self.units.look_ahead(depth.ahead)
        self.units.make_slots()

    def _may_rest(self, row: int) -> bool:
        return row not in self._kept and (row in self._of or self._fits(row))

    # ---- telling of it ----

    @property
    def away_bytes(self) -> int:
        """Bytes of weights whose parameters have no memory of their own now, less all shards."""
        shards_bytes = sum(of.shard.nbytes for of in self._of.values() if of.shard is not None)
        return sum(self.units.nbytes(row) for row, of in self._of.items() if not of.has_memory) - shards_bytes

    def under(self, placed: Sequence[PlacedPiece]) -> tuple[int, int]:
        """Bytes of the weights that rest on the host alone where states are placed so.

        And those of the slots that they take on the device once every unit was fetched.
        """
        if self._shared:
            return self._shared.homes.away_bytes(placed), self.units.slot_bytes_for(self._of)
        rows = list(filter(self._may_rest, whole_on_cpu(placed)))
        return sum(map(self.units.nbytes, rows)), self.units.slot_bytes_for(rows)

    def _fits(self, row: int) -> bool:
        with without_torch_function():
            return may_stream(self._table.parameters[row]) and (self._shared is None or row in self._table.shards)

    def _depth_in_words(self) -> str:
        if self.depth is not None and self.depth.ahead == self.units.ahead:
            return str(self.depth)
        # fewer where memory ran out, or where another rank has solved fewer
        why = "until times are measured" if self.depth is None else f"where {self.depth.ahead} were solved"
        return f"{self.units.ahead} units are brought ahead of need, {why}"

    def in_words(self) -> str | None:
        """How many weights are streamed, and how much of them; None where none are."""
        if not self._of:
            return None
        streamed = [row for row in self._of if row not in self._kept]
        params, everything = sum(self._table.parameters[row].numel() for row in streamed), sum(p.numel() for p in self._table.parameters)
        stay = sorted(self._kept if self._shared else self._kept.intersection(self._of))
        kept = (f"; {len(stay)} more stay on the device, as code outside graphs reads them: "
                f"{self._table.names[stay[0]]}" + (", ..." if len(stay) > 1 else "")) if stay else ""
        nbytes = sum(map(self.units.nbytes, streamed))
        if self._shared:
            return (f"sharded weights: {len(streamed)} of {len(self._table)} ({params / everything:.1%} of the parameters, "
                    f"{bytes_text(nbytes)}), of which this rank has {self._shared.homes.in_words()}; the device has "
                    f"{bytes_text(self.units.slot_bytes)} of slots for them{kept}; {self._depth_in_words()}")
        ahead = f"; {self.since}" if self.since else ""
        ahead += f"; {self._depth_in_words()}"
        return (f"streamed weights: {len(streamed)} of {len(self._table)} rest on the host ({params / everything:.1%} of the parameters, "
                f"{bytes_text(nbytes)}), the device has {bytes_text(self.units.slot_bytes)} of slots for them{kept}{ahead}")
