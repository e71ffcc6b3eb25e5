"""Bytes by tier for one placement of the states, known before anything is allocated.

    placed on   device                                          host (pinned for a GPU)
    GPU         weight, gradient until its update, states       -
    CPU         weight (its gradient passes through the ring)   states, slot, and a 16-bit weight
                                                                that is not half of its master
    STREAM      weight, gradient until its update               states (through the staging area)

A streamed weight (CPU alone) is half of its master on the host, and on the device in a slot that it
shares with other units.

An fp32 weight of which the device has a bf16 copy (autocast) counts as 16-bit there, its gradient
and its slot with 4 bytes an element. Its own fp32 memory is the master of a resident row, else
there only while the loop looks at it, and is not counted.

Activations are not part of it: what the compiled graphs keep for the backward is known when a step
has run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain_fx.ir.limits import FP32_BYTES
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import ADAMW_DEFAULT, StateTable
from hytrain_fx.runtime.engine import staging_shape
from hytrain_fx.runtime.states.slabs import padded_bytes


@dataclass(frozen=True, slots=True)
class RowSize:
    """A managed parameter's elements, bytes of each, and its states.

    copied       it is a bf16 copy of an fp32 weight: `itemsize` is the copy's
    out_bytes    of the new weight on the host, where it has its own memory there
                 (`RowStates.out`)
    gradient_stays    on the device, though the CPU updates it: it is a piece of a parameter that is
                      cut
    """

    numel: int
    itemsize: int
    table: StateTable = ADAMW_DEFAULT
    copied: bool = False
    out_bytes: int = 0
    gradient_stays: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return self.numel * self.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its gradient on the device, and of its slot."""
        return self.numel * (FP32_BYTES if self.copied else self.itemsize)

    @property
    def host_bytes(self) -> int:
        """Bytes of master and states on the host, each padded as in a slab."""
        widths = (FP32_BYTES, *(state.itemsize for state in self.table.states))
        return sum(padded_bytes(width * self.numel) for width in widths) + self.table.own_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of master and states on the device; an fp32 weight is its own master."""
        apart = self.table.bytes_per_param - (FP32_BYTES if self.itemsize == FP32_BYTES else 0)
        return apart * self.numel + self.table.own_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by tier; every weight and gradient counts that is in the optimizer.

    device_gradients_bytes    gradients that stay on the device until their update: all of them at
                              once, which is the most
    host_states_bytes         fp32 states of rows updated by the CPU
    host_slots_bytes          their slots for gradients, and new 16-bit weights that have memory of
                              their own
    host_streamed_bytes       fp32 states of streamed rows
    pinned_bytes              how much of the host's bytes is pinned
    all_states_bytes          states of all rows, were they on the device
    weight_slots_bytes        slots of the device that streamed weights pass through, as many as
                              the planned lookahead fills at once; `weights_bytes` is without these
                              weights
    """

    weights_bytes: int
    device_states_bytes: int
    device_gradients_bytes: int
    ring_bytes: int
    staging_bytes: int
    host_states_bytes: int
    host_slots_bytes: int
    host_streamed_bytes: int
    pinned_bytes: int
    all_states_bytes: int
    weight_slots_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All on the device except activations."""
        weights_bytes = self.weights_bytes + self.weight_slots_bytes
        return weights_bytes + self.device_states_bytes + self.device_gradients_bytes + self.ring_bytes + self.staging_bytes

    @property
    def host_bytes(self) -> int:
        """All on the host."""
        return self.host_states_bytes + self.host_slots_bytes + self.host_streamed_bytes


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Bytes in use on both tiers.

    Weights, states that rest on the device, states and slots on the host and how much of that is
    pinned. Also what the engine has on the device: the ring for gradients on their way to the host,
    and the staging area of streamed states.

    unpinned_bytes       what should be pinned on the host and could not be
    shadow_bytes         the most that new states next to old ones took on the host, in updates
                         on a guess; no estimate
    device_peak_bytes    the most that torch has allocated on a CUDA device so far, activations
                         included; None on the CPU
    weight_slots_bytes   slots of the device that streamed weights pass through; `weights_bytes` is
                         without those whose parameters have no memory of their own now
    estimate             what was estimated for the present placement before it was allocated
    """

    device_states_bytes: int
    host_bytes: int
    ring_bytes: int
    device_peak_bytes: int | None = None
    weights_bytes: int = 0
    staging_bytes: int = 0
    pinned_bytes: int = 0
    shadow_bytes: int = 0
    estimate: MemoryEstimate | None = None
    weight_slots_bytes: int = 0
    unpinned_bytes: int = 0


def estimate_memory(rows: Sequence[RowSize], placement: Sequence[Placement], *, ring_bytes: int, pinned: bool) -> MemoryEstimate:
    """What these rows take under this placement.

    `pinned`: whether host memory is, because the device is a GPU.
    """
    of = {place: [row for row, at in zip(rows, placement, strict=True) if at is place] for place in Placement}
    host_states, streamed = (sum(row.host_bytes for row in of[place]) for place in (Placement.CPU, Placement.STREAM))
    slots = sum(padded_bytes(row.gradient_bytes) + row.out_bytes for row in of[Placement.CPU])
    return MemoryEstimate(
        weights_bytes=sum(row.weight_bytes for row in rows),
        device_states_bytes=sum(row.device_bytes for row in of[Placement.GPU]),
        device_gradients_bytes=sum(row.gradient_bytes for row, place in zip(rows, placement, strict=True)
                                   if row.gradient_stays or not place.updates_on_cpu),
        ring_bytes=ring_bytes,
        staging_bytes=staging_bytes(of[Placement.STREAM]),
        host_states_bytes=host_states,
        host_slots_bytes=slots,
        host_streamed_bytes=streamed,
        pinned_bytes=host_states + slots + streamed - sum(row.table.own_bytes for row in of[Placement.CPU]) if pinned else 0,
        all_states_bytes=sum(row.device_bytes for row in rows),
    )


def staging_bytes(streamed: Sequence[RowSize]) -> int:
    """Device memory that the states of these rows pass through.

    Slots for one chunk of the largest; 0 without any row.
    """
    if not streamed:
        return 0
    return math.prod(staging_shape(max(row.numel for row in streamed), max(row.table.tensors for row in streamed))) * FP32_BYTES
