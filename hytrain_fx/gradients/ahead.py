"""Gradients of earlier micro-batches on their way back from their slots.

They come one `grad_offload` ahead of the node that adds to them.

    the backward begins      the gradients of the first node's rows are put on the lane
    grad_offload             the compute stream waits for its rows', adds, sends the sums; then
                             those of the next node are put on the lane

So they come while the unit's backward runs. One node's gradients are alive, in one block of memory:
what the sums would take anyway, from the end of the node before on. What was brought and is not
used any more (`.grad` was edited, dropped, or is another's) is let go, once the compute stream
waits for the copy, which may not overtake the memory's next use. Nothing outlives the run of its
graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from hytrain_fx.errors import EngineError
from hytrain_fx.gradients.parts import BackwardParts
from hytrain_fx.gradients.rows import RowGroup, RowGroups
from hytrain_fx.gradients.slots import GradientSlots
from hytrain_fx.gradients.sources import RowGradient, clean_in_slot
from hytrain_fx.torch_private.tensors import get_grad, without_torch_function

_NOTHING: Final[Mapping[int, torch.Tensor]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """What was put on the lane for one node."""

    rows: tuple[int, ...]  # of the node
    sources: Mapping[int, RowGradient]  # of those of its rows that had a gradient in the slot
    number: int
    gradients: Sequence[torch.Tensor]


class EarlierGradients:
    """What rows had in their slots before this backward, brought for the nodes that add to it."""

    def __init__(self, slots: GradientSlots, groups: RowGroups, parts: BackwardParts) -> None:
        self._slots = slots
        self._reader = slots.reader
        self._groups = groups
        self._parts = parts
        self._to_come: deque[tuple[int, ...]] = deque()  # the rows of nodes that have not run, nor had their gradients fetched
        self._coming: _Coming | None = None

    @contextmanager
    def ahead(self, calls: Sequence[tuple[int, ...]]) -> Iterator[None]:
        """Around one run of a graph: meanwhile gradients are fetched ahead.

        `calls`: the rows of its `grad_offload` nodes, in their order.

        A node that runs out of order fetches its own, and the others' stay on their way.
        """
        self._to_come = deque(calls)
        try:
            with without_torch_function():
                self.go_ahead()
            yield
        finally:
            self._to_come.clear()
            with suppress(EngineError):  # a closed engine has finished all copies
                self._drop()

    @property
    def to_come(self) -> bool:
        """Whether nodes may still ask for what they had.

        False in a backward that began without gradients.
        """
        return self._coming is not None or bool(self._to_come)

    def go_ahead(self) -> None:
        """Put the gradients of the next node that adds to any on the lane, if none are.

        Called `without_torch_function`.
        """
        while self._to_come and self._coming is None:
            rows = self._to_come.popleft()
            group = self._groups[rows]
            sources = self._wanted(group, list(map(get_grad, group.parameters)), ())
            if sources:
                self._coming = _Coming(rows, sources, *self._reader.begin(tuple(sources)))

    def of(self, group: RowGroup, held: Sequence[torch.Tensor | None], again: Collection[int]) -> Mapping[int, torch.Tensor]:
        """By row: what rows of this node have in their slots, unedited, and are to add to now.

        New tensors, of the parameters' dtypes.

        `held`: the rows' `.grad`. `again`: rows whose `.grad` is of this backward.
        """
        coming = self._coming
        if coming is not None and coming.rows == group.rows:
            self._coming = None
        else:
            coming = None
            if group.rows in self._to_come:
                self._to_come.remove(group.rows)
        sources = self._wanted(group, held, again)
        found: dict[int, torch.Tensor] = {}
        if coming is not None:
            brought = self._finish(coming)
            found = {row: gradient for row, gradient in brought.items() if sources.get(row) is coming.sources[row]}
        missing = {row: source for row, source in sources.items() if row not in found}
        if missing:
            found |= self._finish(_Coming(group.rows, missing, *self._reader.begin(tuple(missing))))
        return found or _NOTHING

    def _wanted(self, group: RowGroup, held: Sequence[torch.Tensor | None], again: Collection[int]) -> dict[int, RowGradient]:
        """The sources of gradients in slots that the next ones of these rows are added to."""
        found: dict[int, RowGradient] = {}
        if all(grad is None for grad in held):
            return found
        for row, grad in zip(group.rows, held, strict=True):
            source = clean_in_slot(grad, self._slots, row)
            if source is not None and self._parts.adds_at_once(row, again):
                found[row] = source
        return found

    def _finish(self, coming: _Coming) -> dict[int, torch.Tensor]:
        rows = tuple(coming.sources)
        return dict(zip(rows, self._reader.finish(coming.number, rows, coming.gradients), strict=True))

    def _drop(self) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self._finish(coming)
