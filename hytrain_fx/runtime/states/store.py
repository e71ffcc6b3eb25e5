"""The optimizer states of every row: where they rest, what they hold, and moving them between host and device.

    CPU      fp32 states on the host, a slot for the gradient, and memory for a 16-bit weight that no half of its master is
    STREAM   fp32 states on the host, no slot: the gradient stays on the device
    GPU      fp32 states on the device

On the host the masters of bf16 rows are in two halves, one of them the weight, where the engine has it so. So are those of
fp32 rows that the device has in 16 bits (`copied_weights.py`): their weight here is the copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.ir.limits import CHUNK_PARAMS, FP32_BYTES
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import Kernel, StateTable, StateTraffic
from hytrain_fx.runtime.engine import Engine, RowStates
from hytrain_fx.runtime.states.copied_weights import CopiedWeights
from hytrain_fx.runtime.states.own_states import OwnStates
from hytrain_fx.runtime.states.slabs import HostSlab, padded_bytes, pin_slabs, require_host_memory, slab_bytes
from hytrain_fx.runtime.states.split_master import copy_states, halved, load_masters, split_into, whole_states


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order of its memory, as a flat view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True


class StateStore:
    """Master weights and states by row; slabs by unit, those of slots apart from those of states, so that rows change between CPU and
    STREAM where they are.

    weights   the parameters' own tensors by row
    unit_of   unit of each row: the rows of a unit share one slab
    tables    by row: the states that it has
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        unit_of: Sequence[int],
        tables: Sequence[StateTable],
        engine: Engine,
    ) -> None:
        self._weights = list(weights)
        self.copies = CopiedWeights()
        self._tables = tuple(tables)
        self._engine = engine
        self._states: dict[int, RowStates] = {}
        self._slabs: dict[int, HostSlab] = {}  # of states, by row; rows of a unit that came to the host together share one
        self._slot_rows: dict[int, tuple[int, ...]] = {}  # by unit: the rows that have slots
        self._slot_slabs: dict[int, HostSlab] = {}  # by unit
        self._unit_of = tuple(unit_of)
        self._kept: set[int] = set()  # rows whose masters have their half that is the weight at home, wherever they are updated
        self.placement: list[Placement] = [Placement.CPU] * len(self._weights)

    def __getitem__(self, row: int) -> RowStates:
        return self._states[row]

    def in_memory(self, row: int) -> RowStates:
        """The states, for whoever reads or writes their values. Raises EngineError in a forked child that does not have them."""
        if row in self._slabs:
            self._slabs[row].require_here()
        return self._states[row]

    def whole(self, row: int) -> RowStates:
        """The states with the master as one fp32 tensor: for reading, copies in part. The weight must be as the last update left it.

        Raises EngineError as `in_memory` does.
        """
        states = self.in_memory(row)
        self._bring_weight_home(row)
        return whole_states(states, self._weights[row].device)

    def write(self, row: int, values: RowStates) -> None:
        """Write states, master in one piece, into those of an idle row; a 16-bit weight becomes the master's rounding."""
        states, weight = self.in_memory(row), flat_memory(self._weights[row])
        copy_states(values, states, weight.device)
        if weight.dtype != torch.float32:
            weight.copy_(states.master)
        if row in self.copies and self.placement[row] is not Placement.GPU:
            self.copies.updated([row])

    @property
    def slabs(self) -> list[HostSlab]:
        """All host memory that states and slots take."""
        return list({id(slab): slab for slab in (*self._slabs.values(), *self._slot_slabs.values())}.values())

    def host_bytes(self, rows: Iterable[int], place: Placement = Placement.CPU) -> int:
        """Bytes of host memory the states of these rows take under `place`, with their slots where it is CPU."""
        return sum(self._state_bytes(row) + (self._slot_bytes(row) if place is Placement.CPU else 0) for row in rows)

    def travelling_bytes(self, row: int) -> int:
        """Bytes of a row's gradient on its way to the host, as a rule, and of its new weight on its way back."""
        return self._weights[row].numel() * self._weights[row].element_size()

    def device_bytes(self, rows: Iterable[int]) -> int:
        """Bytes of device memory the states of these rows take there (fp32 weights are their own masters)."""
        return sum(self._table_bytes(row) - (self._weights[row].nbytes if self._weights[row].dtype == torch.float32 else 0) for row in rows)

    def traffic(self, rows: Sequence[int]) -> StateTraffic:
        """What updates of these rows move of their states."""
        params = sum(self._weights[row].numel() for row in rows)
        return StateTraffic(sum(map(self._table_bytes, rows)) / params, all(self._tables[row].tie is not None for row in rows))

    def allocate(self, placement: Sequence[Placement], limit_bytes: int | None) -> None:
        """Allocate every row where `placement` says, masters from the weights, states zero. Raises HostMemoryError."""
        rows = range(len(placement))
        on_host = [row for row in rows if placement[row] is not Placement.GPU]
        require_host_memory(sum(self.host_bytes([row], placement[row]) for row in on_host), limit_bytes)
        self.placement = list(placement)
        self._allocate_host(on_host)
        for row in rows:
            if placement[row] is Placement.GPU:
                self._states[row] = self._device_states(row)
        load_masters((self._states[row].master, flat_memory(self._weights[row])) for row in rows)
        self._tell_engine({*rows, *self._arrange_slots(rows)})

    def move(self, rows: Sequence[int], place: Placement, limit_bytes: int | None) -> None:
        """Move the states of idle rows; their bits do not change.

        Raises HostMemoryError, torch.OutOfMemoryError, and EngineError where memory cannot be pinned; then all are where they were.
        """
        rows = [row for row in rows if self.placement[row] is not place]
        if not rows:
            return
        for row in rows:
            self._bring_weight_home(row)
        before = {row: self._states[row] for row in rows if place is Placement.GPU or self.placement[row] is Placement.GPU}
        if place is not Placement.GPU:
            new_slots = sum(map(self._slot_bytes, rows)) if place is Placement.CPU else 0
            require_host_memory(sum(map(self._state_bytes, before)) + new_slots, limit_bytes)
        held = (self.placement[:], self._states.copy(), self._slabs.copy(), self._slot_rows.copy(), self._slot_slabs.copy())
        to_tell = set(rows)
        try:
            if place is not Placement.GPU:
                self._allocate_host(list(before))
            for row in rows:
                self.placement[row] = place
            for row, states in before.items():
                if place is Placement.GPU:
                    self._states[row] = self._device_states(row)
                target = self._states[row]
                if place is Placement.GPU and self._weights[row].dtype == torch.float32 and row not in self.copies:
                    # It is the weight, which has these bits: written, it would end the backward of a forward from before the move.
                    states = replace(states, master=target.master)
                copy_states(states, target, self._weights[row].device)
                if row in self.copies and place is Placement.GPU:
                    self.copies[row].current = True
            to_tell.update(self._arrange_slots(rows))
            self._tell_engine(to_tell)
        except BaseException:
            self.placement[:], self._states, self._slabs, self._slot_rows, self._slot_slabs = held
            with contextlib.suppress(EngineError):  # an engine that has failed says so at every later call
                self._tell_engine(to_tell)  # some of them may have been told of the new places
            raise
        del held  # until here: dropped gradients may be on their way to the old slots while the engine has not been told
        if place is Placement.GPU:
            for row in rows:
                self._slabs.pop(row)  # the last row of a slab frees it

    def use_copy(self, row: int) -> torch.Tensor:
        """From now on the device has an idle row's fp32 weight in 16 bits: the bf16 copy that graphs are to read."""
        weight, states = self._weights[row], self._states[row]
        copy = self.copies.add(row, weight)
        if self.placement[row] is not Placement.GPU:
            self._states[row] = halved(states, weight.device)
        self._weights[row] = copy
        self._engine.use_copy(row, copy)
        self._tell_engine([row])
        return copy

    def fill_weight(self, row: int) -> None:
        """Have the fp32 memory of a row with a copy, at rest, show its master."""
        if not self.copies[row].current and self.placement[row] is not Placement.GPU:
            self.copies.fill(row, self.in_memory(row))

    def _follow_copied(self, row: int) -> None:
        """What was written to the fp32 memory becomes master and copy; nothing can have been where it does not show the weight."""
        of = self.copies[row]
        if not of.current:
            return
        states = self.in_memory(row)
        if self.placement[row] is not Placement.GPU:
            split_into(states, replace(states, master=flat_memory(of.weight), low=None), of.copy.device)
        weight = of.weight.detach()
        # On the CPU a weight that was only read counts as written. Its copy keeps its version then:
        # a backward to come may have saved it.
        if of.copy.device.type == "cpu" and torch.equal(of.copy.view(torch.int16), weight.to(of.copy.dtype).view(torch.int16)):
            return
        of.copy.copy_(weight)

    def keep_weight(self, row: int, on: bool) -> None:
        """Whether to know, wherever the row is updated, the weight that the last update left. It must be there still when this begins."""
        if on and row not in self._kept:
            self._bring_weight_home(row)
            self._kept.add(row)
        elif not on:
            self._kept.discard(row)
        if self._engine.can_stream:
            self._engine.send_weight(row, on)

    def _leaves_weight(self, row: int) -> bool:
        """Whether the half of the master that is the weight is on the device alone: 2 bytes a parameter less on the way to the host."""
        return self.placement[row] is Placement.STREAM and self._states[row].low is not None and row not in self._kept

    def _bring_weight_home(self, row: int) -> None:
        if self._leaves_weight(row):
            self.in_memory(row).master.copy_(flat_memory(self._weights[row]))

    def follow_weight(self, row: int) -> None:
        """Make the weight, as written from outside, the master; an element that still is its master's rounding keeps the master's bits,
        where what the last update left is known.
        """
        if row in self.copies:
            return self._follow_copied(row)
        weight, states = flat_memory(self._weights[row]), self.in_memory(row)
        if weight.dtype == torch.float32 or self._leaves_weight(row):
            self._load_master(row)
            return
        for begin in range(0, weight.numel(), CHUNK_PARAMS):
            part = slice(begin, begin + CHUNK_PARAMS)
            master = states.master[part]
            written = weight[part].to(master.device)
            kept = master.to(written.dtype).view(torch.int16) == written.view(torch.int16)
            master.copy_(torch.where(kept, master, written.to(master.dtype)))
            if states.low is not None:
                marked = states.marked()[part]
                states.low[part].mul_(kept)
                marked.copy_(torch.where(kept, marked, marked.abs()))

    def take_weight(self, row: int) -> None:
        """Make the weight the master in every element."""
        if row in self.copies:
            return self._follow_copied(row)
        self._load_master(row)

    def follow_memory(self, row: int) -> None:
        """The parameter of an idle row has other memory: an fp32 master on the device is that memory."""
        weight = self.copies[row].weight if row in self.copies else self._weights[row]
        if self.placement[row] is Placement.GPU and weight.dtype == torch.float32:
            self._states[row] = replace(self._states[row], master=flat_memory(weight))
            self._tell_engine([row])

    def _tell_engine(self, rows: Iterable[int]) -> None:
        place = {Placement.CPU: self._engine.place_on_host, Placement.GPU: self._engine.place_on_device,
                 Placement.STREAM: self._engine.place_streamed}
        for row in rows:
            place[self.placement[row]](row, self._states[row])

    def _load_master(self, row: int) -> None:
        states = self.in_memory(row)
        load_masters([(states.master, flat_memory(self._weights[row]))])
        if states.low is not None:
            states.low.zero_()
            states.marked().abs_()

    def _state_bytes(self, row: int) -> int:
        return self._slab_bytes(row) + self._tables[row].own_bytes

    def _slab_bytes(self, row: int) -> int:
        """Of its part of a slab. What another optimizer keeps is no part of it: its step makes those tensors."""
        numel, table = self._weights[row].numel(), self._tables[row]
        return padded_bytes(FP32_BYTES * numel) + sum(padded_bytes(state.itemsize * numel) for state in table.states)

    def _table_bytes(self, row: int) -> int:
        table = self._tables[row]
        return table.bytes_per_param * self._weights[row].numel() + table.own_bytes

    def _slot_bytes(self, row: int) -> int:
        return slab_bytes(self._weights[row].numel(), self._slot_dtype(row)) + self.out_bytes(row)

    @property
    def of_other_optimizer(self) -> bool:
        """Whether they are of an optimizer without a kernel."""
        return any(table.kernel is Kernel.NONE for table in self._tables)

    def out_bytes(self, row: int) -> int:
        """Bytes of host memory for the new weight of a row updated by the CPU, beside master and slot."""
        weight = self._weights[row]
        return slab_bytes(weight.numel(), weight.dtype) if self._has_out(row) else 0

    def _has_out(self, row: int) -> bool:
        dtype = self._weights[row].dtype
        return dtype != torch.float32 and not (dtype == torch.bfloat16 and self._splits(row))

    def _splits(self, row: int) -> bool:
        return self._tables[row].tie is not None and self._engine.splits_masters

    def _slot_dtype(self, row: int) -> torch.dtype:
        return torch.float32 if row in self.copies else self._weights[row].dtype

    def _allocate_host(self, rows: Sequence[int]) -> None:
        slabs: list[HostSlab] = []
        for of_unit in self._by_unit(rows).values():
            slab = HostSlab(sum(map(self._slab_bytes, of_unit)))
            slabs.append(slab)
            for row in of_unit:
                self._states[row] = self._host_states(row, slab)
                self._slabs[row] = slab
        pin_slabs(slabs, self._weights[0].device, self._engine.workers)

    def _arrange_slots(self, rows: Iterable[int]) -> list[int]:
        """Give the units of `rows` slots for their rows on the CPU, one after the other, so that the gradients of a unit go there in one
        copy. Returns the rows that have a new one.
        """
        wanted = {unit: tuple(row for row, of in enumerate(self._unit_of) if of == unit and self.placement[row] is Placement.CPU)
                  for unit in self._by_unit(rows)}
        changed = {unit: of_unit for unit, of_unit in wanted.items() if of_unit != self._slot_rows.get(unit, ())}
        slabs = {unit: HostSlab(sum(map(self._slot_bytes, of_unit))) for unit, of_unit in changed.items() if of_unit}
        pin_slabs(list(slabs.values()), self._weights[0].device, self._engine.workers)  # what may fail comes before anything is changed
        self._slot_rows |= changed
        for row in {*rows} - {row for of_unit in wanted.values() for row in of_unit}:
            self._states[row] = replace(self._states[row], slot=None, out=None)
        for unit, of_unit in changed.items():
            self._slot_slabs.pop(unit, None)
            for row in of_unit:
                slot = slabs[unit].take(self._weights[row].numel(), self._slot_dtype(row))
                self._states[row] = replace(self._states[row], slot=slot)
            for row in filter(self._has_out, of_unit):  # after the slots, which stay neighbours
                weight = self._weights[row]
                self._states[row] = replace(self._states[row], out=slabs[unit].take(weight.numel(), weight.dtype))
        self._slot_slabs |= slabs
        return [row for of_unit in changed.values() for row in of_unit]

    def _by_unit(self, rows: Iterable[int]) -> dict[int, list[int]]:
        by_unit: dict[int, list[int]] = {}
        for row in sorted(rows, key=lambda row: (self._unit_of[row], row)):
            by_unit.setdefault(self._unit_of[row], []).append(row)
        return by_unit

    def _host_states(self, row: int, slab: HostSlab) -> RowStates:
        numel, table = self._weights[row].numel(), self._tables[row]
        master, *states = (slab.take(numel, dtype) for dtype in (torch.float32, *_dtypes(table)))
        if self._splits(row) and self._weights[row].dtype == torch.bfloat16:
            high, low = master.view(torch.bfloat16)[:numel], master.view(torch.int16)[numel:]
            return RowStates(table, high, tuple(states), low=low)
        return _row_states(table, master, states)

    def _device_states(self, row: int) -> RowStates:
        weight, table = self._weights[row], self._tables[row]

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(weight.numel(), dtype=dtype, device=weight.device)

        if row in self.copies:
            self.copies[row].take_memory()
            weight = self.copies[row].weight
        master = flat_memory(weight) if weight.dtype == torch.float32 else zeros(torch.float32)
        return _row_states(table, master, map(zeros, _dtypes(table)))


def _row_states(table: StateTable, master: torch.Tensor, states: Iterable[torch.Tensor]) -> RowStates:
    return RowStates(table, master, tuple(states), own=OwnStates() if table.kernel is Kernel.NONE else None)


def _dtypes(table: StateTable) -> list[torch.dtype]:
    return [getattr(torch, state.dtype) for state in table.states]
