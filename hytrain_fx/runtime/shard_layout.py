"""How shards of several parameters lie in memory that goes from rank to rank.

Rank by rank, and of each rank parameter by parameter, as `reduce_scatter_tensor` takes and
`all_gather_into_tensor` gives them:

    [rank 0: shard of a, shard of b, ...][rank 1: shard of a, shard of b, ...]

What a shorter last shard leaves is not read, so parts of cut parameters have one length. Where
parameters have owners, a rank's part is those that it owns, and parts may differ in length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch

from hytrain_fx.ir.shard import Shard
from hytrain_fx.torch_private.names import private_function

_KEPT = 4096  # a loop that drops layers at random asks for many choices of rows
_foreach_copy_ = private_function("_foreach_copy_")


class ShardLayout:
    """Of these shards, one for each parameter.

    lengths   elements of each rank's part
    numel     of all ranks
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.rank, self.ranks = shards[0].rank, shards[0].ranks
        self._sizes = [shard.sizes for shard in shards]
        rooms = [shard.rooms for shard in shards]
        self.lengths = [sum(of[rank] for of in rooms) for rank in range(self.ranks)]
        self.numel = sum(self.lengths)
        ends = [(size[rank], room[rank] - size[rank]) for rank in range(self.ranks) for size, room in zip(self._sizes, rooms, strict=True)]
        self._runs = [size for of in ends for size in of]  # a shard and what it leaves, in turns
        self._filled = [number for number, (size, _) in enumerate(ends) if size]  # shards of owned parameters may be empty
        own = range(self.rank * len(shards), (self.rank + 1) * len(shards))
        begin = bisect_left(self._filled, own.start)
        self._own = slice(begin, bisect_left(self._filled, own.stop, begin))  # of them

    @property
    def is_even(self) -> bool:
        """Whether each rank's part has the same length."""
        return len(set(self.lengths)) == 1

    def pack(self, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Flat whole tensors of one dtype, as new memory."""
        bucket = wholes[0].new_empty(self.numel)
        _foreach_copy_(self._views(bucket), self._parts(wholes))
        return bucket

    def pack_own(self, wholes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """New memory with this rank's part of flat whole tensors filled in, and that part."""
        bucket = wholes[0].new_empty(self.numel)
        if views := self._views(bucket)[self._own]:
            _foreach_copy_(views, self._parts(wholes)[self._own])
        return bucket, self.parts(bucket)[self.rank]

    def unpack_others(self, bucket: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        """Write the other ranks' parts of the memory to flat whole tensors."""
        views, parts = self._views(bucket), self._parts(wholes)
        del views[self._own], parts[self._own]
        if views:
            _foreach_copy_(parts, views)

    def parts(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        """Views of each rank's part."""
        return list(bucket.split(self.lengths))

    def shards(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's part: one for each parameter."""
        runs = 2 * len(self._sizes)
        return list(own.split(self._runs[self.rank * runs : (self.rank + 1) * runs])[::2])

    def _views(self, bucket: torch.Tensor) -> list[torch.Tensor]:
        shards = bucket.split(self._runs)[::2]
        return [shards[number] for number in self._filled]

    def _parts(self, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        parts = [whole.split(sizes) for whole, sizes in zip(wholes, self._sizes, strict=True)]
        return [parts[number % len(parts)][number // len(parts)] for number in self._filled]


class ShardLayouts:
    """The layouts of one table's parameters, by their rows, made when they are first asked for."""

    def __init__(self, shards: Mapping[int, Shard]) -> None:
        self._shards = shards
        self._made: dict[tuple[int, ...], ShardLayout] = {}

    def __getitem__(self, rows: tuple[int, ...]) -> ShardLayout:
        found = self._made.get(rows)
        if found is None:
            if len(self._made) == _KEPT:
                self._made.clear()
            found = self._made[rows] = ShardLayout([self._shards[row] for row in rows])
        return found
