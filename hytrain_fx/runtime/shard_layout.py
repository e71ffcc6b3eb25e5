"""How shards of several parameters lie in memory that goes from rank to rank.

Rank by rank, and of each rank parameter by parameter, as `reduce_scatter_tensor` takes and
`all_gather_into_tensor` gives them:

    [rank 0: shard of a, shard of b, ...][rank 1: shard of a, shard of b, ...]

Each rank's part has the same length. What a shorter last shard leaves is not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hytrain_fx.ir.shard import Shard
from hytrain_fx.torch_private.names import private_function

_foreach_copy_ = private_function("_foreach_copy_")


class ShardLayout:
    """Of these shards, one for each parameter.

    each    elements of one rank's part
    numel   of all ranks
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.rank, self.ranks = shards[0].rank, shards[0].ranks
        self.each = sum(shard.each for shard in shards)
        self.numel = self.each * self.ranks
        self._sizes = [shard.sizes for shard in shards]
        ends = [(shard.sizes[rank], shard.each - shard.sizes[rank]) for rank in range(self.ranks) for shard in shards]
        self._runs = [size for of in ends for size in of]  # a shard and what it leaves, in turns

    def pack(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flat whole tensors of one dtype, as new memory."""
        bucket = wholes[0].new_empty(self.numel)
        _foreach_copy_(self._views(bucket), self._parts(wholes))
        return bucket

    def pack_own(self, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """New memory with this rank's part of flat whole tensors filled in, and that part."""
        bucket = wholes[0].new_empty(self.numel)
        own = self._of_rank()
        _foreach_copy_(self._views(bucket)[own], self._parts(wholes)[own])
        return bucket, bucket[self.rank * self.each : (self.rank + 1) * self.each]

    def unpack_others(self, bucket: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        """Write the other ranks' parts of the memory to flat whole tensors."""
        views, parts = self._views(bucket), self._parts(wholes)
        own = self._of_rank()
        del views[own], parts[own]
        _foreach_copy_(parts, views)

    def shards(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's part: one for each parameter."""
        runs = self._runs[2 * self._of_rank().start : 2 * self._of_rank().stop]
        return list(own.split(runs)[::2])

    def _of_rank(self) -> slice:
        return slice(self.rank * len(self._sizes), (self.rank + 1) * len(self._sizes))

    def _views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        return list(bucket.split(self._runs)[::2])

    def _parts(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [whole.split(sizes) for whole, sizes in zip(wholes, self._sizes, strict=True)]
        return [of[rank] for rank in range(self.ranks) for of in parts]


class ShardLayouts:
    """The layouts of one table's parameters, by their rows, made when they are first asked for."""

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self._shards = shards
        self._made: dict[tuple[int, ...], ShardLayout] = {}

    def __getitem__(self, rows: tuple[int, ...]) -> ShardLayout:
        found = self._made.get(rows)
        if found is None:
            found = self._made[rows] = ShardLayout([self._shards[row] for row in rows])
        return found
