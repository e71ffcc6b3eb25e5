"""What a session takes: time until full speed, memory by tier. Told in the log `hytrain_fx` (level INFO) and kept for `explain`.

    before states are allocated or moved    the estimate
    after the first full-speed step         the estimate beside what is in use, and the start-up by phase
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import torch

from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.startup import StartupClock
from hytrain_fx.ir.states import StateTable
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.states.memory_estimate import MemoryEstimate, MemoryInUse, RowSize, estimate_memory
from hytrain_fx.runtime.states.slabs import HostSlab, padded_bytes
from hytrain_fx.session.startup_text import estimate_text, memory_text, startup_text

_log = logging.getLogger("hytrain_fx")


class Resources:
    """Time and memory of one session.

    parameters    the managed parameters by row
    tables        by row: the states that it has
    ring_bytes    what the engine's ring takes, by whether states are streamed
    copied        rows of which the device has a bf16 copy, as they come
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        tables: Sequence[StateTable],
        ring_bytes: Callable[[bool], int],
        clock: StartupClock,
        copied: Container[int] = (),
        out_bytes: Sequence[int] | None = None,
    ) -> None:
        self.clock = clock
        out = [0] * len(parameters) if out_bytes is None else out_bytes
        self._sizes = [RowSize(p.numel(), p.element_size(), table, out_bytes=apart)
                       for p, table, apart in zip(parameters, tables, out, strict=True)]
        self._copied = copied
        self._device = parameters[0].device
        self._ring_bytes = ring_bytes

    @property
    def _rows(self) -> list[RowSize]:
        return [replace(of, itemsize=2, copied=True) if row in self._copied else of for row, of in enumerate(self._sizes)]

    def estimate(self, placement: Sequence[Placement]) -> MemoryEstimate:
        """Bytes by tier under this placement."""
        ring_bytes = self._ring_bytes(Placement.STREAM in placement)
        return estimate_memory(self._rows, placement, ring_bytes=ring_bytes, pinned=self._device.type == "cuda")

    def announce(self, placement: Sequence[Placement]) -> None:
        """Say what states will take, before they are allocated or moved."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s", estimate_text(self.estimate(placement)))

    def in_use(self, placement: Sequence[Placement], states: Sequence[RowStates], shadow_bytes: int = 0) -> MemoryInUse:
        """What the tensors of these states take now, by row, beside the estimate for their placement. `shadow_bytes`: as there."""
        estimate = self.estimate(placement)
        on_device = [of for of, place in zip(states, placement, strict=True) if place is Placement.GPU]
        on_host = [of for of, place in zip(states, placement, strict=True) if place is not Placement.GPU]
        host_bytes = sum(padded_bytes(nbytes) for of in on_host for nbytes in _sizes(of))
        fp32_weights = sum(row.weight_bytes for row, place in zip(self._rows, placement, strict=True)
                           if place is Placement.GPU and row.itemsize == 4)
        return MemoryInUse(
            device_states_bytes=sum(nbytes for of in on_device for nbytes in _sizes(of)) - fp32_weights,
            host_bytes=host_bytes,
            ring_bytes=estimate.ring_bytes,
            device_peak_bytes=torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None,
            weights_bytes=sum(row.weight_bytes for row in self._rows),
            staging_bytes=estimate.staging_bytes,
            pinned_bytes=host_bytes - sum(of.own.nbytes for of in on_host if of.own) if self._device.type == "cuda" else 0,
            shadow_bytes=shadow_bytes,
            estimate=estimate,
        )

    def full_speed(self, placement: Sequence[Placement], states: Sequence[RowStates]) -> None:
        """Say what start-up took and what is in use now."""
        if _log.isEnabledFor(logging.INFO):
            _log.info("%s\n\n%s", startup_text(self.clock.report()), memory_text(self.in_use(placement, states)))


def pinning_of(slabs: Iterable[HostSlab]) -> tuple[int, float]:
    """Bytes pinned and microseconds it took, over all batches that these slabs were pinned in."""
    batches = {id(slab.pinning): slab.pinning for slab in slabs if slab.pinning is not None}.values()
    return sum(batch.nbytes for batch in batches), sum(batch.populate_us + batch.register_us for batch in batches)


def _sizes(states: RowStates) -> list[int]:
    """Bytes of each piece of memory; the halves of a master are one."""
    master_bytes = states.master.nbytes + (0 if states.low is None else states.low.nbytes)
    others = (*states.states, states.slot, states.out)
    own_bytes = 0 if states.own is None else states.own.nbytes
    return [master_bytes, own_bytes, *(tensor.nbytes for tensor in others if tensor is not None)]
