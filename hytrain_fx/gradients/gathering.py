"""Gradients of a step that has several micro-batches: they gather on the device and leave once.

    all micro-batches but the last    `.grad` is a real tensor on the device, whatever the plan
    the last one                      added to it; sums of rows on the host go to their slots
    where memory is short             those of each micro-batch leave, and come back for the next

How many there are a pipeline's schedule says. Where a loop makes more or fewer backwards, sums stay
on the device until `step()`, or come back from their slots: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.ahead import EarlierGradients
from hytrain_fx.gradients.parts import BackwardParts
from hytrain_fx.gradients.rows import RowGroup, RowGroups
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.gradients.slots import GradientSlots
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.runtime.states.store import StateStore
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function


class GatheredGradients(SessionGradients):
    """The gradients of one session whose steps have `micro_batches` backwards."""

    def __init__(
        self, table: ParameterTable, engine: Engine, states: StateStore, shards: GradientShards | None, micro_batches: int
    ) -> None:
        super().__init__(table, engine, states, shards)
        self.parts.calls_are_apart = True
        self._earlier = _GatheredBefore(self.slots, self.groups, self.parts, self._in_last_backward)
        self._count = micro_batches
        self._number = 0  # of the micro-batch, in its step

    def stream_out(self) -> bool:
        """As that of `GradientsAtHand`: from now on they leave after each micro-batch."""
        gathered, self._count = self._count > 1, 1
        return gathered

    def _backward_begins(self) -> None:
        super()._backward_begins()
        with without_torch_function():
            step_begins = all(grad is None for grad in map(get_grad, self.table.parameters))
        self._number = 0 if step_begins else min(self._number + 1, self._count - 1)
        self.stay = self._number + 1 < self._count

    def take(self, group: RowGroup, grads: Sequence[torch.Tensor]) -> None:
        """As that of `SessionGradients`. Before the last micro-batch all of them stay here."""
        super().take(group.all_on_device() if self.stay else group, grads)

    def _in_last_backward(self, row: int, held: torch.Tensor | None) -> torch.Tensor | None:
        """What has gathered of a row, where it is to leave now."""
        return None if self.stay else self.untouched(row, held)


class _GatheredBefore(EarlierGradients):
    """Earlier gradients from slots, and those that have gathered on the device."""

    def __init__(
        self, slots: GradientSlots, groups: RowGroups, parts: BackwardParts,
        gathered: Callable[[int, torch.Tensor | None], torch.Tensor | None]
    ) -> None:
        super().__init__(slots, groups, parts)
        self._gathered = gathered

    def of(self, group: RowGroup, held: Sequence[torch.Tensor | None], again: Collection[int]) -> Mapping[int, torch.Tensor]:
        """Also of rows on the host whose `.grad` is real and as the graphs have made it."""
        found = dict(super().of(group, held, again))
        for i in group.on_host.positions:
            row = group.rows[i]
            gathered = self._gathered(row, held[i])
            if gathered is not None and self._parts.adds_at_once(row, again):
                found[row] = gathered
        return found


def gradients_of(
    table: ParameterTable, engine: Engine, states: StateStore, shards: GradientShards | None, micro_batches: int
) -> SessionGradients:
    """The gradients of a session. `micro_batches`: of each of its steps; 1 where nobody says so."""
    if micro_batches == 1:
        return SessionGradients(table, engine, states, shards)
    return GatheredGradients(table, engine, states, shards, micro_batches)
