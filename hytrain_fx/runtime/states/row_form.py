"""What one row of the engine takes of memory.

Its size, its dtypes, its states, and tensors of that form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hytrain_fx.ir.limits import FP32_BYTES
from hytrain_fx.ir.states import Kernel, StateTable
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.own_states import OwnStates
from hytrain_fx.runtime.rounding import NO_PLACE, RoundingPlace
from hytrain_fx.runtime.states.slabs import HostSlab, padded_bytes, slab_bytes


@dataclass(frozen=True, slots=True)
class RowForm:
    """One row.

    numel    elements
    dtype    of its weight on the device
    table    the states that it has
    copied   the weight is a bf16 copy of an fp32 one
    splits   whether masters of bf16 weights are in two halves on the host
    place    of its states in the model
    """

    numel: int
    dtype: torch.dtype
    table: StateTable
    copied: bool
    splits: bool
    place: RoundingPlace = NO_PLACE

    @property
    def table_bytes(self) -> int:
        """Bytes of master and states, wherever they rest."""
        return self.table.bytes_per_param * self.numel + self.table.own_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of master and states on the device, where an fp32 weight is its own master."""
        return self.table_bytes - (FP32_BYTES * self.numel if self.dtype == torch.float32 else 0)

    @property
    def slab_bytes(self) -> int:
        """Bytes of its part of a slab.

        What another optimizer keeps is no part of it: its step makes those tensors.
        """
        return padded_bytes(FP32_BYTES * self.numel) + sum(padded_bytes(state.itemsize * self.numel) for state in self.table.states)

    @property
    def slot_dtype(self) -> torch.dtype:
        """Dtype of a gradient in its slot; in a row with a copy it may come in fp32 or bf16."""
        return torch.float32 if self.copied else self.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of its slot, and of the new weight next to it."""
        return slab_bytes(self.numel, self.slot_dtype) + self.out_bytes

    @property
    def has_out(self) -> bool:
        """Whether a new weight has its own memory on the host: it is not half of its master."""
        return self.dtype != torch.float32 and not (self.dtype == torch.bfloat16 and self.splits)

    @property
    def out_bytes(self) -> int:
        """Bytes of that memory."""
        return slab_bytes(self.numel, self.dtype) if self.has_out else 0

    def on_host(self, slab: HostSlab) -> RowStates:
        """Master and states out of a slab, zero where it is fresh."""
        master, *states = (slab.take(self.numel, dtype) for dtype in (torch.float32, *self._dtypes))
        if self.splits and self.dtype == torch.bfloat16:
            high, low = master.view(torch.bfloat16)[: self.numel], master.view(torch.int16)[self.numel :]
            return RowStates(self.table, high, tuple(states), low=low, place=self.place)
        return self._states(master, states)

    def on_device(self, device: torch.device, weight: torch.Tensor) -> RowStates:
        """Master and states there, zero; an fp32 `weight` [numel] is the master."""

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(self.numel, dtype=dtype, device=device)

        master = weight if weight.dtype == torch.float32 else zeros(torch.float32)
        return self._states(master, map(zeros, self._dtypes))

    def _states(self, master: torch.Tensor, states: Iterable[torch.Tensor]) -> RowStates:
        own = OwnStates() if self.table.kernel is Kernel.NONE else None
        return RowStates(self.table, master, tuple(states), own=own, place=self.place)

    @property
    def _dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, state.dtype) for state in self.table.states]
