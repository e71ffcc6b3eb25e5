"""Whether a step's gradients are finite, as numbers on the device: no wait tells it.

The largest magnitude of a gradient is NaN or infinite where any of its values is. So is its product
with a logged factor where a product of any value is.

    gradients in slots     their magnitudes are taken as they leave the device
    gradients on it        when `step()` asks
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch

from hytrain_fx.gradients.rows import norm_of_each
from hytrain_fx.gradients.shards import GradientShards
from hytrain_fx.runtime.engine import CommitItem


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """What was found of one step.

    rows   of the engine
    bad    by row, on the device: whether its gradient holds a NaN or an infinity
    any    0-dim fp32 on the device: 1 where one does, also on another rank, else 0
    """

    rows: tuple[int, ...]
    bad: torch.Tensor
    any: torch.Tensor

    def first(self) -> int | None:
        """The first row whose gradient is bad; None where none of this rank's is.

        Waits for the device.
        """
        bad = self.bad.nonzero()
        return self.rows[int(bad[0])] if len(bad) else None


class Finiteness:
    """Of one session's gradients.

    wide     rows whose gradients multiply in fp32, though they come in bf16
    shards   of gradients of which other ranks have the rest
    """

    def __init__(self, wide: Container[int], shards: GradientShards | None = None) -> None:
        self._wide = wide
        self._shards = shards
        self._largest: dict[int, torch.Tensor] = {}  # by row: of the gradient that went to its slot last

    def note(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """These gradients go to the slots of these rows."""
        self._largest.update(zip(rows, _largest_of(grads), strict=True))

    def check(self, items: Sequence[CommitItem]) -> FiniteCheck:
        """Of the gradients that a commit of these items would use; there must be one."""
        real = {item.row: item.grad for item in items if item.grad is not None}
        largest = self._largest | dict(zip(real, _largest_of(list(real.values())), strict=True))
        alike: dict[object, list[CommitItem]] = {}  # one chain of operations for all that are
        for item in items:
            factors = tuple(id(factor) if isinstance(factor, torch.Tensor) else factor for factor in item.factors)
            alike.setdefault((largest[item.row].dtype, item.row in self._wide, factors), []).append(item)
        bad = torch.cat([~torch.isfinite(self._scaled(of, largest)) for of in alike.values()])
        any_bad = bad.any().to(torch.float32)
        if self._shards is not None:
            any_bad = self._shards.largest(any_bad)
        return FiniteCheck(tuple(item.row for of in alike.values() for item in of), bad, any_bad)

    def _scaled(self, items: Sequence[CommitItem], largest: dict[int, torch.Tensor]) -> torch.Tensor:
        found = torch.stack([largest[item.row] for item in items])
        if items[0].row in self._wide:
            found = found.float()
        for factor in items[0].factors:
            found = found * factor
        return found


def _largest_of(grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    norms = iter(norm_of_each(filled, filled, float("inf"), foreach=True) if (filled := [grad for grad in grads if grad.numel()]) else ())
    return [next(norms) if grad.numel() else grad.new_zeros(()) for grad in grads]
