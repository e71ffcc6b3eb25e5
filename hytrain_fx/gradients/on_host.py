"""Gradients that are made on the host, added to those in slots: they never go to the device.

Where that may be: whole rows that the CPU updates, whose gradient is in its slot, unedited. Sums
are those of the device, as both round a sum of two numbers to nearest.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hytrain_fx.gradients.slots import nobody_asks
from hytrain_fx.gradients.sources import RowGradient, clean_in_slot
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import get_grad


def add_in_slots(
    gradients: SessionGradients, states: StateStore, engine: Engine, made: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Add what was made on the host, by row, to the slots. Gives what has to go to the device.

    Called `without_torch_function`, between a backward and its `step()`, where no update has begun.

    Norms that were taken on the way to the slots are no longer the gradients'. Who asks for one has
    the sum brought to the device. Where each gradient is looked at as it leaves the device
    (`on_nonfinite`), the sums are to be looked at too, and all go there.
    """
    if gradients.slots.on_offload is not nobody_asks:
        return dict(made)
    sources = {row: source for row, grad in made.items() if (source := _source(gradients, states, row, grad)) is not None}
    engine.landed(list(sources))
    for row, source in sources.items():
        home, slot = gradients.table.homes[row], states.in_memory(row).slot
        assert slot is not None
        slot.as_strided(home.shape, home.stride()).add_(made[row])
        source.renew(None)
    return {row: grad for row, grad in made.items() if row not in sources}


def _source(gradients: SessionGradients, states: StateStore, row: int, grad: torch.Tensor) -> RowGradient | None:
    """What shows the gradient in the row's slot; None where the sum is not for the host."""
    elsewhere = row in states.pieces.cut or row in gradients.table.shards or row in gradients.parts.open
    if elsewhere or states.placement.get(row) is not Placement.CPU or grad.layout != torch.strided:
        return None
    slot, held = states.in_memory(row).slot, get_grad(gradients.table.parameters[row])
    return clean_in_slot(held, gradients.slots, row) if slot is not None and slot.dtype == grad.dtype else None
