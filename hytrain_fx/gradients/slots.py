"""The slots of one session: which gradient each has, and how it comes back.

    a gradient is sent       another generation of the row, neither taken nor gone
    step(), zero_grad()      taken: the slot still has it, for whoever kept the stand-in
    slots move, a close      gone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.interrupts import whole
from hytrain_fx.runtime.states.slabs import padded_bytes
from hytrain_fx.runtime.states.store import StateStore

Norm = tuple[float, bool, float]
"""Order of a norm, whether torch's foreach kernel computes it, and what the gradient is scaled by.

On CUDA the kernels differ in the last bits.
"""


class SlotReader:
    """Brings gradients from their slots to the device, in their parameters' form, or the shards'.

    slot_dtypes   dtypes of gradients in slots, where they are not the parameters' own (rows with
                  copies)
    """

    def __init__(self, table: ParameterTable, engine: Engine) -> None:
        self.slot_dtypes: dict[int, torch.dtype] = {}
        self._forms = [(p.shape, p.stride(), p.dtype, p.numel()) for p in table.homes]  # whatever becomes of the model
        self._device = table.device
        self._engine = engine

    def read(self, row: int) -> torch.Tensor:
        """One gradient, as a tensor of its own."""
        shape, strides, dtype, _ = self._forms[row]
        gradient = torch.empty_strided(shape, strides, dtype=self.slot_dtypes.get(row, dtype), device=self._device)
        self._engine.fetched(self._engine.fetch([row], gradient))
        return gradient.to(dtype)  # one that came in bf16 is an fp32 one all the same

    def begin(self, rows: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Put gradients on their way.

        Gives the number to `finish` with, and where they come to: views of one block of memory.
        """
        places, end = [], 0
        for row in rows:
            shape, strides, dtype, numel = self._forms[row]
            dtype = self.slot_dtypes.get(row, dtype)
            places.append((shape, strides, dtype, end // dtype.itemsize))
            end += padded_bytes(numel * dtype.itemsize)
        memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        number = self._engine.fetch(rows, memory)
        typed = {dtype: memory.view(dtype) for dtype in {place[2] for place in places}}
        return number, [torch.as_strided(typed[dtype], shape, strides, begin) for shape, strides, dtype, begin in places]

    def finish(self, number: int, rows: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What `begin` gave, for the compute stream to read from now on."""
        self._engine.fetched(number)
        if not self.slot_dtypes:
            return list(gradients)
        return [gradient.to(self._forms[row][2]) for row, gradient in zip(rows, gradients, strict=True)]


class GradientSlots:
    """What each slot has, by row.

    generation       how often a gradient was sent to it
    taken            rows whose gradient step() has taken or zero_grad() has dropped
    gone             rows whose slot is another's memory since
    steps_may_write  to the gradients that they are given, as in torch
    norms_wanted     of every gradient, when it is sent
    on_offload       called with gradients that are about to go to their slots
    shards           what other ranks have of gradients that come in shards; None without ranks
    """

    def __init__(self, table: ParameterTable, engine: Engine, states: StateStore, shards: GradientShards | None = None) -> None:
        self.shards = shards
        self.generation = [0] * len(table)
        self.taken: set[int] = set()
        self.gone: set[int] = set()
        self.steps_may_write = states.of_other_optimizer
        self.on_offload: Callable[[Sequence[int], Sequence[torch.Tensor]], None] = nobody_asks
        self.norms_wanted: set[Norm] = set()
        self.reader = SlotReader(table, engine)
        self._names = table.names
        self._engine = engine
        self._copies = states.copies

    def name(self, row: int) -> str:
        """The parameter's name."""
        return self._names[row]

    def shards_of(self, row: int) -> GradientShards | None:
        """Where the rest of the row's gradient is; None where it is whole."""
        return self.shards if self.shards is not None and row in self.shards else None

    @whole()
    def fetch(self, row: int) -> torch.Tensor:
        """What the slot of `row` has, brought back to the device."""
        if row in self.taken and self.steps_may_write:
            self._engine.wait([row])
        return self.reader.read(row)

    def send(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Gradients in the parameters' form are copied to their slots."""
        generation = self.generation
        for row in rows:
            generation[row] += 1
        for marked in (self.taken, self.gone):
            if marked:
                marked.difference_update(rows)
        if self._copies:
            self.reader.slot_dtypes.update((row, grad.dtype) for row, grad in zip(rows, grads, strict=True) if row in self._copies)
        self.on_offload(rows, grads)
        self._engine.grad_offload(rows, grads)


def nobody_asks(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
    """What is called with gradients that leave, where nobody wants to know."""
