"""The parts of one backward are added up first, then to `.grad`.

Autograd does it so, and every sum has its bits.

    (model(a) + model(b)).backward()        one backward, two parts for each weight
    .grad = 1st + 2nd                       where there was none: parts may be added as they come
    .grad = .grad + (1st + 2nd)             where there was one: laid aside until the backward ends

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
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.graph import Node

from hytrain_fx.torch_private.autograd import at_end_of_backward, running_backward


@dataclass(frozen=True, slots=True)
class OpenSum:
    """What `.grad` was when the backward began, and the parts so far, in the parameter's form."""

    before: torch.Tensor
    parts: torch.Tensor


class BackwardParts:
    """Which rows have had a part in the backward that runs, and which may get more.

    on_end   called when the backward ends, or was found to have ended in an error, if sums are open

    calls_are_apart   whether each call of the model has a backward of its own, as in a pipeline's
                      schedule, however many calls wait for theirs
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.open: dict[int, OpenSum] = {}
        self._used_eagerly: set[int] = set()  # rows that eager code may make gradients of, before the next step()
        self._used_in_forward: set[int] = set()  # those that it has used inside the model's call
        self._used_after_call: set[int] = set()  # and while a call waited for its backward
        self.several: set[int] = set()  # rows that have had several parts, or one of eager code
        self.calls_are_apart = False
        self._arrived: set[int] = set()
        self._on_end = on_end
        self._backward = -1
        self._call = 0  # number of the last one
        self._waiting: WeakKeyDictionary[Node, int] = WeakKeyDictionary()  # by node of a compiled backward: its call
        self._ran: WeakSet[Node] = WeakSet()  # those of them that have run since the last call: some may again (retain_graph)
        self._several_wait = False

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

    def backward_runs(self, node: Node) -> None:
        """A compiled backward begins."""
        self._ran.add(node)
        self._several_wait = not self.calls_are_apart and len(set(self._waiting.values())) > 1

    def use_eagerly(self, rows: Collection[int], *, in_forward: bool) -> None:
        """Eager code has read these weights where gradients are on: some may come from it."""
        self._used_eagerly.update(rows)
        if in_forward:
            self._used_in_forward.update(rows)
        elif any(node not in self._ran for node in self._waiting):
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
            if self.open:
                self._on_end()  # the last backward has not
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

    def lay_aside(self, row: int, before: torch.Tensor, part: torch.Tensor) -> None:
        """Open a sum; `part` is the sum's own."""
        if not self.open:
            at_end_of_backward(self._on_end)
        self.open[row] = OpenSum(before, part)
