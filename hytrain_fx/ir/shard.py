"""Which part of a parameter each rank updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain_fx.ir.plan import CUT_ALIGN_PARAMS


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one parameter.

    It is the elements `begin..end`, in the order of the parameter's memory. A shard has `each`
    elements. The last one may have fewer. Where the first dimension divides by the number of ranks,
    shards are slices of it.

    numel   of the whole parameter
    """

    numel: int
    rank: int
    ranks: int

    @property
    def each(self) -> int:
        """Elements of one shard."""
        return math.ceil(self.numel / self.ranks / CUT_ALIGN_PARAMS) * CUT_ALIGN_PARAMS

    @property
    def begin(self) -> int:
        """The first element."""
        return self.rank * self.each

    @property
    def end(self) -> int:
        """One behind the last."""
        return min(self.begin + self.each, self.numel)

    @property
    def sizes(self) -> list[int]:
        """Elements of every rank's shard."""
        return [min(self.each, self.numel - rank * self.each) for rank in range(self.ranks)]


def shard_of(shape: Sequence[int], rank: int, ranks: int) -> Shard | None:
    """The part of a parameter that this rank updates; None for one that every rank updates whole.

    Those are vectors (norms, biases), and what is too small to be cut at cache lines.
    """
    shard = Shard(math.prod(shape), rank, ranks)
    return shard if len(shape) > 1 and shard.sizes[-1] > 0 else None
