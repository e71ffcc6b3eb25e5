"""The parts of one backward are added up first, then to `.grad`.

Autograd does it so, and every sum has its bits.

    (model(a) + model(b)).backward()        one backward, two parts for each weight
    .grad = 1st + 2nd                       where there was none: parts may be added as they come
    .grad = .grad + (1st + 2nd)             where there was one: parts wait for the backward's end

Laying aside takes device memory for the sum, and the sum goes to the host only when the backward
ends. So it is done for rows that may get several parts alone: several calls wait for their
backward, or eager code has used the weight, or the row has had several parts before. A call waits
until its backward has run or its graph is gone.

    model(a) + model(b) + penalty(w)        autograd adds the last one first: penalty + 2nd + 1st

So where eager code may make a part that comes before or between those of graphs, autograd is given
all of them, to add up in its order. A part of one call and one of eager code have the same sum
either way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.autograd.graph import Node

from hytrain_fx.torch_private.autograd import around_accumulation, at_end_of_backward, running_backward
from hytrain_fx.torch_private.tensors import get_grad, set_grad, without_torch_function


@dataclass(slots=True)
class OpenSum:
    """The parts of a row so far.

    before     what `.grad` was when the backward began, and is until it ends
    graphs     the sum of the graphs' parts, in the parameter's form
    backward   gives None once it is over
    eager      what autograd has made of eager code's parts
    """

    parameter: torch.Tensor
    before: torch.Tensor
    graphs: torch.Tensor
    backward: Callable[[], object]
    eager: torch.Tensor | None = None
    end: Callable[[], None] = field(init=False)
    _hidden: bool = False

    def __post_init__(self) -> None:
        self.end = around_accumulation(self.parameter, self._hide, self._show)

    def _hide(self) -> None:
        if self.backward() is not None:
            self._hidden = True
            with without_torch_function():
                set_grad(self.parameter, None)

    def _show(self) -> None:
        if self._hidden:
            self._hidden = False
            with without_torch_function():
                self.eager = get_grad(self.parameter)
                set_grad(self.parameter, self.before)


class BackwardParts:
    """Which rows have had a part in the backward that runs, and which may get more.

    on_end   called when the backward ends, if sums are open

    ranks_average     whether ranks average gradients, all the same ones: what one of them reads
                      alone, between calls, then gives no gradient to autograd
    calls_are_apart   whether each call of the model has a backward of its own, as in a pipeline's
                      schedule, however many calls wait for theirs
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.open: dict[int, OpenSum] = {}
        self._used_eagerly: set[int] = set()  # rows that eager code may make gradients of, before the next step()
        self._used_in_forward: set[int] = set()  # those that it has used inside the model's call
        self._used_after_call: set[int] = set()  # and while a call waited for its backward
        self.several: set[int] = set()  # rows that have had several parts, or one of eager code
        self.calls_are_apart = self.ranks_average = False
        self._arrived: set[int] = set()
        self._on_end = on_end
        self._end: Callable[[], object] = lambda: None  # None once the backward with the sums that are open is over
        self._backward = -1
        self._call = 0  # number of the last one
        self._waiting: WeakKeyDictionary[Node, int] = WeakKeyDictionary()  # by node of a compiled backward: its call
        self._ran: WeakSet[Node] = WeakSet()  # those of them that have run since the last call: some may again (retain_graph)
        self._several_wait = False
        self._counted = -1  # number of the backward for which that was last looked at, with no forward since

    def call_begins(self) -> None:
        """The model is called with gradients on."""
        self._call += 1
        for node in self._ran:
            self._waiting.pop(node, None)
        self._ran.clear()

    def forward_ran(self, node: Node | None) -> None:
        """A compiled forward has; `node` is to run its backward."""
        if node is not None:
            self._waiting[node] = self._call
            self._counted = -1

    def backward_runs(self, node: Node) -> None:
        """A compiled backward begins."""
        self._ran.add(node)
        if (backward := running_backward()) != self._counted:  # once: the nodes are as many as graphs
            self._counted = backward
            self._several_wait = not self.calls_are_apart and len(set(self._waiting.values())) > 1

    def use_eagerly(self, rows: Collection[int], *, in_forward: bool) -> None:
        """Eager code has read these weights where gradients are on: some may come from it."""
        self._used_eagerly.update(rows)
        if in_forward:
            self._used_in_forward.update(rows)
        elif not self.ranks_average and any(node not in self._ran for node in self._waiting):
            self._used_after_call.update(rows)

    def step_ends(self) -> None:
        """No backward is to come of what eager code has read until now."""
        for used in (self._used_eagerly, self._used_in_forward, self._used_after_call):
            used.clear()

    @property
    def of_autograd(self) -> set[int]:
        """Rows whose parts the graphs that run hand to autograd."""
        return self._used_in_forward | self._used_after_call if self._several_wait else self._used_in_forward

    def arrive(self, rows: Iterable[int]) -> set[int]:
        """Parts come for `rows`; those that have had one in this backward already."""
        backward = running_backward()
        if backward != self._backward:
            self._backward = backward
            self._arrived.clear()
            self.settle()
        again = self._arrived.intersection(rows) if self._arrived else set()
        self.several |= again
        self._arrived.update(rows)
        return again

    def may_get_more(self, row: int) -> bool:
        """Whether the backward that runs may bring another part for a row that has one."""
        return self._several_wait or row in self.several or row in self._used_eagerly

    def adds_at_once(self, row: int, again: Collection[int]) -> bool:
        """Whether a part is added to `.grad` as it comes.

        `again`: rows whose `.grad` is of this backward.
        """
        return row not in self.open and (row in again or not self.may_get_more(row))

    def lay_aside(self, row: int, parameter: torch.Tensor, before: torch.Tensor, part: torch.Tensor) -> None:
        """Open a sum; `part` is the sum's own."""
        if not self.open:
            on_end = partial(self._on_end)  # nobody but the backward has it
            at_end_of_backward(on_end)
            self._end = ref(on_end)
        self.open[row] = OpenSum(parameter, before, part, self._end)

    def settle(self) -> None:
        """End the sums that are open, or forget them where their backward has ended in an error."""
        if self.open and self._end() is not None:
            self._on_end()
        self.close()

    def close(self) -> dict[int, OpenSum]:
        """No sum is open from now on. Gives those that were."""
        return {row: self.drop(row) for row in tuple(self.open)}

    def drop(self, row: int) -> OpenSum:
        """Its sum is not open from now on: `.grad` is what it was."""
        self.open[row].end()
        return self.open.pop(row)
