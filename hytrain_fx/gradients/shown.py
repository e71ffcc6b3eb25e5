"""What `.grad` shows of gradients that the graphs have made.

    in its slot          a stand-in
    kept on the device   a real tensor: a copy, as the graph's own memory is used again

A node's code and data have left the caches when the next one runs, with a layer's kernels launched
in between. So where no row had a gradient when a graph began, its nodes only send the gradients on
their way, and what they came to is shown when the graph has run: in one loop, in less than half the
time. Nobody can look meanwhile: within a graph no other code runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch

from hytrain_fx.gradients.noted import Noted
from hytrain_fx.gradients.rows import Part, RowGroup, in_same_order, norm_of_each, norm_of_shard
from hytrain_fx.gradients.slots import GradientSlots, Norm
from hytrain_fx.gradients.sources import HeldGradient, StandIns
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.state import GradState
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.torch_private.names import private_function
from hytrain_fx.torch_private.tensors import get_grad, set_grad

_foreach_copy_: Final = private_function("_foreach_copy_")
_Norms = Sequence[dict[Norm, torch.Tensor] | None]


class _Taken(NamedTuple):
    """What one node has taken: its rows, copies of those on the device, norms of those in slots."""

    group: RowGroup
    kept: Sequence[torch.Tensor]
    norms: _Norms


class ShownGradients:
    """Shows gradients in `.grad`, of one session. All methods are called `without_torch_function`.

    own      by row: real gradients made here
    fresh    by row: stand-ins that autograd has not yet looked at in this backward
    """

    def __init__(self, engine: Engine, slots: GradientSlots) -> None:
        self.standins = StandIns()
        self.own: dict[int, Noted] = {}
        self.fresh: dict[int, GradState] = {}
        self._engine = engine
        self._slots = slots
        self._taken: list[_Taken] = []
        self._later = False

    def begin(self, parameters: Iterable[torch.Tensor]) -> None:
        """A graph begins that makes gradients of these.

        Where none of them has one, what its nodes `take` is shown at its `end`.
        """
        self._taken.clear()
        self._later = all(grad is None for grad in map(get_grad, parameters))

    @property
    def shows_later(self) -> bool:
        """Whether no row of the graph that runs had a gradient when it began."""
        return self._later

    def take(self, group: RowGroup, grads: Sequence[torch.Tensor]) -> None:
        """Send a node's gradients on their way.

        They have the parameters' form, and the rows had none.
        """
        on_host, on_device = group.on_host, group.on_device
        sent = on_host.of(grads)
        norms = self.norms_of(on_host, sent) if on_host else ()
        kept = self.copies(on_device, on_device.of(grads)) if on_device else ()
        # Noted first: what the engine refuses half-way is undone with the rest.
        self._taken.append(_Taken(group, kept, norms))
        if on_host:
            self._slots.send(on_host.rows, sent)

    def end(self) -> list[RowGroup]:
        """Show what nodes have taken; their groups, in the order of the nodes."""
        taken, self._taken, self._later = self._taken, [], False
        for of in taken:
            if of.kept:
                self.on_device(of.group.on_device, of.kept)
            if of.norms:
                self.in_slots(of.group.on_host, of.norms)
        return [of.group for of in taken]

    def norms_of(self, part: Part, grads: Sequence[torch.Tensor]) -> _Norms:
        """By gradient: the norms that somebody has asked for."""
        norms = [(norm, self._norm_of_each(part, grads, *norm)) for norm in self._slots.norms_wanted]
        return [{norm: values[i] for norm, values in norms} if norms else None for i in range(len(part.rows))]

    def _norm_of_each(self, part: Part, grads: Sequence[torch.Tensor], order: float, foreach: bool, scale: float) -> Sequence[torch.Tensor]:
        """Those of shards are in fp32, as they are not the last rounding."""
        if scale != 1.0:
            each = (self._scaled(part, i, grad, scale) for i, grad in enumerate(grads))  # one at a time: they take memory
            return [self._norm_of_each(part.only(i), [grad], order, foreach, 1.0)[0] for i, grad in enumerate(each)]
        if self._slots.shards is None:
            return norm_of_each(grads, part.homes, order, foreach)
        return [norm_of_shard(grad, order) if row in self._slots.shards else norm_of_each([grad], [home], order, foreach)[0]
                for row, grad, home in zip(part.rows, grads, part.homes, strict=True)]

    @staticmethod
    def _scaled(part: Part, i: int, grad: torch.Tensor, scale: float) -> torch.Tensor:
        return grad.to(part.homes[i].dtype).mul(scale)

    def in_slots(self, part: Part, norms: _Norms) -> None:
        """Stand-ins of gradients that have gone to their slots."""
        standins = self.standins.in_slots(part.rows, part.parameters, self._slots, norms)
        for parameter, standin in zip(part.parameters, standins, strict=True):
            set_grad(parameter, standin)
        self.fresh.update((row, standin.grad_state) for row, standin in zip(part.rows, standins, strict=True))

    def copies(self, part: Part, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the device, in the parameters' order of memory."""
        kept = [torch.empty_like(home, device=grad.device) for home, grad in zip(part.homes, grads, strict=True)]
        if in_same_order(kept, grads):
            self._engine.keep_grads(kept, grads)
        else:
            _foreach_copy_(kept, grads)
        return kept

    def on_device(self, part: Part, kept: Sequence[torch.Tensor]) -> None:
        """Real gradients that nobody else has."""
        for row, parameter, grad in zip(part.rows, part.parameters, kept, strict=True):
            shards = self._slots.shards_of(row)
            shown = grad if shards is None else GradStandIn(parameter, HeldGradient(row, grad, shards))
            set_grad(parameter, shown)
            if isinstance(shown, GradStandIn):
                self.fresh[row] = shown.grad_state
            self.own[row] = Noted.now(grad)
