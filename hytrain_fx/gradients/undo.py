"""What `.grad` was before the backward that runs.

A graph of it that ends in an error (Ctrl+C, out of memory) leaves no part.

Autograd adds a compiled graph's gradients when the graph has returned. Ours are in their slots
before that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hytrain_fx.gradients.noted import Noted
from hytrain_fx.gradients.standin import GradStandIn


@dataclass(frozen=True, slots=True)
class Had:
    """A gradient from before the backward.

    How often the row's slot had been written, and a real gradient.
    """

    generation: int
    real: Noted | None

    @classmethod
    def of(cls, held: torch.Tensor, generation: int) -> Had:
        """What to know of `held`."""
        return cls(generation, None if isinstance(held, GradStandIn) else Noted.now(held))

    def is_as_before(self, now: torch.Tensor | None, generation: int) -> bool:
        """Whether nothing was added to it since."""
        if isinstance(now, GradStandIn):
            return generation == self.generation and now.materialized is None
        return self.real is not None and self.real.is_still(now)


class BeforeBackward:
    """By row, of the backward that runs; one that had no gradient costs an entry in a set."""

    def __init__(self) -> None:
        self._backward = -1
        self._had_none: set[int] = set()
        self._had: dict[int, Had] = {}

    def graph_begins(self, backward: int) -> bool:
        """`backward`: number of the one that runs. Whether this is the first graph of it."""
        if backward == self._backward:
            return False
        self._backward = backward
        self._had_none.clear()
        self._had.clear()
        return True

    def note(
        self, rows: Sequence[int], held: Sequence[torch.Tensor | None], again: Collection[int], generation: Sequence[int]
    ) -> None:
        """Parts come for `rows`; `again`: those that have had one in this backward.

        Called `without_torch_function`.
        """
        if not again and all(grad is None for grad in held):
            self._had_none.update(rows)
            return
        for row, grad in zip(rows, held, strict=True):
            if row in again:
                continue
            if grad is None:
                self._had_none.add(row)
            else:
                self._had[row] = Had.of(grad, generation[row])

    def had_none(self, row: int) -> bool:
        """Whether it had no gradient."""
        return row in self._had_none

    def had(self, row: int) -> Had | None:
        """What it had; None where nothing has come for the row in this backward, or it had none."""
        return self._had.get(row)
