"""The gradients of several ranks on their way from the nodes: averaged in one order on all ranks.

    a graph begins        the ranks tell each other which gradients theirs make
    a node runs           its gradients are packed
    its turn comes        they go from rank to rank, and are taken
    the backward ends     what eager code made goes the same way, as do zeros for what other ranks
                          still make, until all ranks are done

Turns are in the order of rank 0's graph. The compiler may run nodes in another, and two graphs of
the same nodes (one for each size of a batch) in two: then a node that runs early is held back, with
its arms. What is not, on this rank, the gradients of one node is taken when the backward ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd.graph import Node

from hytrain_fx.capture.parameters import ParameterTable
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.gradients.turns import Rows
from hytrain_fx.torch_private.autograd import accumulator, at_end_of_backward, running_backward
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function
from hytrain_fx.weights.fetched_units import FetchedUnits
from hytrain_fx.weights.gathered import GatheredWeights
from hytrain_fx.weights.gathered_units import GatheredUnits


class RankGradients:
    """Those of one session.

    arm           called with the rows of a node that was held back: its arms
    end_updates   called with rows whose last updates must have ended: their next gradients come
    fetched       sharded weights are gathered between gradients
    """

    def __init__(
        self, averaged: AveragedGradients, gathered: GatheredWeights | None, gradients: SessionGradients, table: ParameterTable,
        arm: Callable[[Sequence[int]], None], end_updates: Callable[[Sequence[int]], None], fetched: FetchedUnits
    ) -> None:
        self._averaged = averaged
        self._gathered = gathered
        self._gradients = gradients
        self._table = table
        self._arm = arm
        self._end_updates = end_updates
        self._fetched = fetched if isinstance(fetched, GatheredUnits) else None
        self._own: dict[Rows, Rows] = {}  # by the rows that a node names: those whose gradients go to `.grad`
        self._ends: dict[int, _AtEnd] = {}  # by backward: one may run inside another
        self._watched: dict[int, Node] = {}  # by row that eager code may add to: what autograd adds with

    def begin(self, nodes: Sequence[Rows], elsewhere: AbstractSet[int]) -> None:
        """A backward graph begins, whose nodes make gradients of these rows.

        elsewhere   rows whose gradients do not go to `.grad`

        Raises RankError.
        """
        self._own = {node: tuple(row for row in node if row not in elsewhere) for node in nodes}
        own, alike = tuple(filter(None, self._own.values())), True
        if own:
            self._enter_backward()
            alike = self._averaged.begin(own)
        if self._fetched:
            self._fetched.gradients_of_run([bool(self._own[node]) for node in nodes], alike)

    def take(self, node: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """The gradients of one node that go to `.grad`."""
        own = self._own[tuple(node)]
        if own:
            self._averaged.pack(own, grads)
            self._send_due(self._ends[running_backward()], own)

    def holds(self, node: Sequence[int]) -> bool:
        """Whether the gradients of a node are held back: its arms come with them."""
        rows = tuple(node)
        return self._averaged.holds(self._own.get(rows, rows))

    def _send_due(self, end: _AtEnd, running: Rows | None = None) -> None:
        """Send what is due.

        running   the node that runs, whose arms come by themselves; None: the graphs are over
        """
        for turn in self._averaged.due():
            if self._fetched:
                self._fetched.before_turn()
            is_of_node = running is not None and self._averaged.is_of_node(turn)
            with self._averaged.taken(turn) as parts:
                if is_of_node:
                    self._gradients.take(self._gradients.groups[turn], parts)
                else:
                    end.late.append((turn, parts))
            if is_of_node and turn != running:
                self._arm(turn)

    def average_later(self, row: int, captured: Container[int]) -> None:
        """Eager code has made this row's `.grad`: it is averaged when the backward ends.

        It is not where other parts are in it; `step()` refuses it then.

        captured   rows that graphs make gradients of
        """
        if row in captured or not self._averaged.may_take_eager(row):
            return
        self._enter_backward()
        self._ends[running_backward()].eager.add(row)

    def dropped(self) -> None:
        """Nobody has a gradient."""
        self._averaged.dropped()
        self._ends.clear()  # of backwards that have ended in errors

    def zeroed(self) -> None:
        """Every gradient has become zeros."""
        self._averaged.zeroed()

    def _enter_backward(self) -> None:
        backward = running_backward()
        if backward not in self._ends:
            self._averaged.next_backward()
            self._ends[backward] = _AtEnd()
            at_end_of_backward(partial(self._end_backward, backward))

    def _end_backward(self, backward: int) -> None:
        """All gradients of this rank are there."""
        if self._gathered:
            self._gathered.all()
        end = self._ends[backward]
        with torch.no_grad(), without_torch_function():
            if self._begin_eager(end.eager):
                self._send_due(end)
            while not self._averaged.all_done():
                self._send_due(end)
            for rows, parts in end.late:
                self._end_updates(rows)
                with self._averaged.side.beside():
                    self._gradients.take_late(rows, parts)
                for row in rows:
                    self._watch(row)
                    self._gradients.shown.fresh.pop(row, None)  # autograd has told of those of eager code
            self._averaged.side.join()
        del self._ends[backward]

    def _watch(self, row: int) -> None:
        """From now on autograd tells before it adds to this row's `.grad`.

        The last one may have been dropped unseen: by `model.zero_grad()`, or by hand.
        """
        parameter, found = self._table.parameters[row], weakref.ref(self._averaged)
        if row in self._watched or not parameter.requires_grad:
            return

        def before(grads: Sequence[torch.Tensor | None]) -> None:
            averaged = found()
            if averaged is not None and grads[0] is not None:  # of graphs autograd gets None: their nodes have taken it
                averaged.begins(row)

        self._watched[row] = accumulator(parameter)
        self._watched[row].register_prehook(before)

    def _begin_eager(self, rows: AbstractSet[int]) -> bool:
        """Pack what eager code has made, where no hook of the user's has dropped it.

        Gives whether there is any.
        """
        parameters = self._table.parameters
        found = {row: grad for row in sorted(rows) if (grad := get_grad(parameters[row])) is not None}
        for row in found:
            set_grad(parameters[row], None)
        if found:
            self._averaged.begin((tuple(found),))
            self._averaged.pack(tuple(found), list(found.values()))
        return bool(found)


@dataclass
class _AtEnd:
    """What is to be done when a backward ends.

    eager   rows whose `.grad` eager code has made
    late    averaged gradients that are not those of one node here
    """

    eager: set[int] = field(default_factory=set)
    late: list[tuple[Rows, list[torch.Tensor]]] = field(default_factory=list)
