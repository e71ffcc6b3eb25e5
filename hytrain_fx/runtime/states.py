"""The optimizer states of every row: where they rest, what they hold, and moving them between host and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import CHUNK_PARAMS, Engine, RowStates
from hytrain_fx.runtime.slabs import HostSlab, pin_slabs, require_host_memory, slab_bytes


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
    """Master weights and moments by row; slabs by unit.

    weights   the parameters' own tensors by row
    unit_of   unit of each row: the rows of a unit share one slab
    amsgrad   by row: whether the running maximum of `exp_avg_sq` is kept too
    """

    def __init__(self, weights: Sequence[torch.Tensor], unit_of: Sequence[int], amsgrad: Sequence[bool], engine: Engine) -> None:
        self._weights = tuple(weights)
        self._amsgrad = tuple(amsgrad)
        self._engine = engine
        self._states: dict[int, RowStates] = {}
        self._slabs: dict[int, HostSlab] = {}  # by row; the rows of a unit share one
        self._unit_of = tuple(unit_of)
        self.placement: list[Placement] = [Placement.CPU] * len(self._weights)

    def __getitem__(self, row: int) -> RowStates:
        return self._states[row]

    def host_bytes(self, rows: Iterable[int]) -> int:
        """Bytes of host memory the states of these rows take there."""
        return sum(self._host_bytes(row) for row in rows)

    def device_bytes(self, rows: Iterable[int]) -> int:
        """Bytes of device memory the states of these rows take there (fp32 weights are their own masters)."""
        return sum(4 * self._weights[row].numel() * self._device_tensors(row) for row in rows)

    def allocate(self, placement: Sequence[Placement], limit_bytes: int | None) -> None:
        """Allocate every row where `placement` says, masters from the weights, moments zero. Raises HostMemoryError."""
        on_host = [row for row, place in enumerate(placement) if place is Placement.CPU]
        require_host_memory(self.host_bytes(on_host), limit_bytes)
        self._allocate_host(on_host)
        for row, place in enumerate(placement):
            if place is Placement.GPU:
                self._states[row] = self._device_states(row)
            self._load_master(row)
            self._tell_engine(row, place)

    def move(self, rows: Sequence[int], place: Placement, limit_bytes: int | None) -> None:
        """Move the states of idle rows; their bits do not change. Raises HostMemoryError."""
        rows = [row for row in rows if self.placement[row] is not place]
        if not rows:
            return
        before = {row: self._states[row] for row in rows}
        if place is Placement.CPU:
            require_host_memory(self.host_bytes(rows), limit_bytes)
            self._allocate_host(rows)
        for row in rows:
            if place is Placement.GPU:
                self._states[row] = self._device_states(row)
            _copy_states(before[row], self._states[row])
            self._tell_engine(row, place)
        if place is Placement.GPU:
            for row in rows:
                self._slabs.pop(row)  # the last row of a slab frees it

    def follow_weight(self, row: int) -> None:
        """Make the weight, as written from outside, the master; an element that still is its master's rounding keeps the master's bits."""
        weight = flat_memory(self._weights[row])
        if weight.dtype == torch.float32:
            self._load_master(row)
            return
        for master, of_device in zip(self._states[row].master.split(CHUNK_PARAMS), weight.split(CHUNK_PARAMS), strict=True):
            written = of_device.to(master.device)
            master.copy_(torch.where(master.to(written.dtype) == written, master, written.float()))

    def take_weight(self, row: int) -> None:
        """Make the weight the master in every element."""
        self._load_master(row)

    def follow_memory(self, row: int) -> None:
        """The parameter of an idle row has other memory: an fp32 master on the device is that memory."""
        states = self._states[row]
        if self.placement[row] is Placement.GPU and self._weights[row].dtype == torch.float32:
            self._states[row] = replace(states, master=flat_memory(self._weights[row]))
            self._tell_engine(row, Placement.GPU)

    def _tell_engine(self, row: int, place: Placement) -> None:
        self.placement[row] = place
        (self._engine.place_on_host if place is Placement.CPU else self._engine.place_on_device)(row, self._states[row])

    def _load_master(self, row: int) -> None:
        master, weight = self._states[row].master, flat_memory(self._weights[row])
        if master.data_ptr() != weight.data_ptr():
            master.copy_(weight)

    def _host_bytes(self, row: int) -> int:
        weight = self._weights[row]
        fp32_tensors = 4 if self._amsgrad[row] else 3
        return fp32_tensors * slab_bytes(weight.numel(), torch.float32) + slab_bytes(weight.numel(), weight.dtype)

    def _device_tensors(self, row: int) -> int:
        return 2 + self._amsgrad[row] + (self._weights[row].dtype != torch.float32)

    def _allocate_host(self, rows: Sequence[int]) -> None:
        slabs: list[HostSlab] = []
        for unit in sorted({self._unit_of[row] for row in rows}):
            of_unit = [row for row in rows if self._unit_of[row] == unit]
            slab = HostSlab(self.host_bytes(of_unit))
            slabs.append(slab)
            # Slots one after the other, so that the gradients of a unit go to them in one copy.
            slots = [slab.take(self._weights[row].numel(), self._weights[row].dtype) for row in of_unit]
            for row, slot in zip(of_unit, slots, strict=True):
                self._states[row] = self._host_states(row, slab, slot)
                self._slabs[row] = slab
        pin_slabs(slabs, self._weights[0].device)

    def _host_states(self, row: int, slab: HostSlab, slot: torch.Tensor) -> RowStates:
        numel = self._weights[row].numel()

        def fp32() -> torch.Tensor:
            return slab.take(numel, torch.float32)

        master, exp_avg, exp_avg_sq = fp32(), fp32(), fp32()
        maximum = fp32() if self._amsgrad[row] else None
        return RowStates(master, exp_avg, exp_avg_sq, maximum, slot)

    def _device_states(self, row: int) -> RowStates:
        weight = self._weights[row]

        def zeros() -> torch.Tensor:
            return torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)

        master = flat_memory(weight) if weight.dtype == torch.float32 else zeros()
        return RowStates(master, zeros(), zeros(), zeros() if self._amsgrad[row] else None, None)


def _copy_states(source: RowStates, target: RowStates) -> None:
    if target.master.data_ptr() != source.master.data_ptr():
        target.master.copy_(source.master)
    target.exp_avg.copy_(source.exp_avg)
    target.exp_avg_sq.copy_(source.exp_avg_sq)
    if source.max_exp_avg_sq is not None and target.max_exp_avg_sq is not None:
        target.max_exp_avg_sq.copy_(source.max_exp_avg_sq)
