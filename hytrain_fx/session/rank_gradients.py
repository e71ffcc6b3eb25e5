"""The gradients of several ranks on their way from the nodes: averaged in one order on all ranks.

    a node runs        its gradients are packed
    its turn comes     they go from rank to rank, and are taken

Turns are in the order of the captured graph. The compiler may run nodes in another, and two graphs
of the same nodes (one for each size of a batch) in two: then a node that runs early is held back,
with its arms. Gradients that eager code makes have no node: they are averaged when the backward
ends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.runtime.engine import Engine
from hytrain_fx.torch_private.autograd import at_end_of_backward, running_backward
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function
from hytrain_fx.weights.gathered import GatheredWeights


class RankGradients:
    """Those of one session."""

    def __init__(
        self, averaged: AveragedGradients, gathered: GatheredWeights | None, gradients: SessionGradients, table: ParameterTable,
        engine: Engine
    ) -> None:
        self._averaged = averaged
        self._gathered = gathered
        self._gradients = gradients
        self._table = table
        self._engine = engine
        self._eager_rows: set[int] = set()  # whose `.grad` eager code has made in the backward that runs
        self._eager_backward = -1

    def take(self, call: Sequence[int], rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """The gradients of one node.

        call   the rows that it names
        rows   those of them whose gradients go to `.grad`
        """
        self._averaged.pack(tuple(call), tuple(rows), grads)
        for turn in self._averaged.due():
            with self._averaged.taken(turn) as (own, taken):
                if own:
                    self._gradients.take(self._gradients.groups[own], taken)
            if turn != tuple(call):
                self._arm(turn)

    def holds(self, rows: Sequence[int]) -> bool:
        """Whether the node of these rows is held back: its arms come with its turn."""
        return self._averaged.holds(tuple(rows))

    def _arm(self, rows: Sequence[int]) -> None:
        group = self._gradients.groups[rows]
        if group.on_host:
            self._engine.arm_cpu(group.pieces)
        if group.on_device:
            with self._averaged.side.inside():
                self._engine.arm_gpu(group.pieces)
        if group.on_host:
            self._engine.arm_reload(group.pieces)

    def average_later(self, row: int, captured: Container[int]) -> None:
        """Eager code has made this row's `.grad`: it is averaged when the backward ends.

        It is not where other parts are in it; `step()` refuses it then.

        captured   rows that graphs make gradients of
        """
        if row in captured or not self._averaged.may_take_eager(row):
            return
        backward = running_backward()
        if backward != self._eager_backward:  # an earlier one may have ended in an error
            self._eager_backward = backward
            self._eager_rows.clear()
            at_end_of_backward(self._average_eager)
        self._eager_rows.add(row)

    def _average_eager(self) -> None:
        rows = tuple(sorted(self._eager_rows))
        self._eager_rows.clear()
        if self._gathered:
            self._gathered.all()
        parameters = [self._table.parameters[row] for row in rows]
        with torch.no_grad(), without_torch_function():
            grads = [grad for grad in map(get_grad, parameters) if grad is not None]
            for parameter in parameters:
                set_grad(parameter, None)
            self._averaged.begin((rows,))
            self._averaged.pack(rows, rows, grads)
            for turn in self._averaged.due():
                with self._averaged.taken(turn) as (own, taken):
                    self._gradients.take_late(own, taken)
            self._averaged.side.join()
            for row in rows:
                self._gradients.shown.fresh.pop(row, None)  # autograd has told of this one
