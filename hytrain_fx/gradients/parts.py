"""The parts of one backward are added up first, then to `.grad`.

Autograd does it so, and every sum has its bits.

    (model(a) + model(b)).backward()        one backward, two parts for each weight
    .grad = 1st + 2nd                       where there was none: parts may be added as they come
    .grad = .grad + (1st + 2nd)             where there was one: laid aside until the backward ends

Laying aside takes device memory for the sum, and the sum goes to the host only when the backward
ends. So it is done for rows that may get several parts alone: several calls wait for their
backward, or eager code has used the weight, or the row has had several parts before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

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
        self.used_eagerly: set[int] = set()  # rows that eager code may make gradients of, before the next step()
        self.used_in_forward: set[int] = set()  # those that it has used inside the model's call
        self.several: set[int] = set()  # rows that have had several parts, or one of eager code
        self.calls_are_apart = False
        self._arrived: set[int] = set()
        self._on_end = on_end
        self._backward = -1
        self._calls = 0
        self._calls_are_old = False

    def call_begins(self) -> None:
        """The model is called with gradients on."""
        if self._calls_are_old:
            self._calls, self._calls_are_old = 0, False
        self._calls += 1

    def arrive(self, rows: Iterable[int]) -> set[int]:
        """Parts come for `rows`; those that have had one in this backward already."""
        self._calls_are_old = True
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
        return (self._calls > 1 and not self.calls_are_apart) or row in self.several or row in self.used_eagerly

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
