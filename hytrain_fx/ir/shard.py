"""Which part of a parameter each rank updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hytrain_fx.ir.plan import CUT_ALIGN_PARAMS


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of one parameter.

    It is the elements `begin..end`, in the order of the parameter's memory. A shard has `each`
    elements. The last one may have fewer. Where the first dimension divides by the number of ranks,
    shards are slices of it.

    numel   of the whole parameter
    owner   the rank that updates all of it, so that others have empty shards; None: it is cut
    """

    numel: int
    rank: int
    ranks: int
    owner: int | None = None

    @property
    def each(self) -> int:
        """Elements of one shard of a parameter that is cut."""
        return _aligned(self.numel / self.ranks)

    @property
    def begin(self) -> int:
        """The first element."""
        return self.rank * self.each if self.owner is None else 0

    @property
    def end(self) -> int:
        """One behind the last."""
        return self.begin + self.sizes[self.rank]

    @property
    def sizes(self) -> list[int]:
        """Elements of every rank's shard."""
        if self.owner is not None:
            return [self.numel if rank == self.owner else 0 for rank in range(self.ranks)]
        return [min(self.each, self.numel - rank * self.each) for rank in range(self.ranks)]

    @property
    def rooms(self) -> list[int]:
        """Elements that every rank's shard takes of memory that goes from rank to rank."""
        return [self.each] * self.ranks if self.owner is None else list(map(_aligned, self.sizes))

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank updates none of it."""
        return self.owner not in (None, self.rank)


def shard_of(shape: Sequence[int], rank: int, ranks: int) -> Shard | None:
    """The part of a parameter that this rank updates; None for one that every rank updates whole.

    Those are vectors (norms, biases), and what is too small to be cut at cache lines.
    """
    shard = Shard(math.prod(shape), rank, ranks)
    return shard if len(shape) > 1 and shard.sizes[-1] > 0 else None


def owners(nbytes: Mapping[int, int], ranks: int) -> dict[int, int]:
    """The rank that updates each parameter whole, by the parameters' numbers.

    nbytes   of each parameter

    The largest come first, each to the rank that has the fewest bytes by then. So the ranks differ
    by no more than the largest parameter, and each of them finds the same owners.
    """
    bytes_of_rank, found = [0] * ranks, dict[int, int]()
    for number in sorted(nbytes, key=lambda number: (-nbytes[number], number)):
        found[number] = owner = bytes_of_rank.index(min(bytes_of_rank))
        bytes_of_rank[owner] += nbytes[number]
    return found


def _aligned(params: float) -> int:
    return math.ceil(params / CUT_ALIGN_PARAMS) * CUT_ALIGN_PARAMS
