"""How many processes train the model, and what each of them keeps.

Each has one GPU, the whole weights and micro-batches of its own. Of every parameter it updates a
shard (ZeRO-2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hytrain_fx.errors import ConfigError
from hytrain_fx.ir.shard import Shard

MOST_RANKS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Ranks:
    """`gpus` ranks on each of `nodes` machines.

    skew    how many times as long as the others one rank takes for all that it does itself

    Raises ConfigError for fewer than one of either or too many, and for a skew below 1 or of one
    rank alone.
    """

    gpus: int = 1
    nodes: int = 1
    skew: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.gpus <= MOST_RANKS and 0 < self.nodes <= MOST_RANKS):
            raise ConfigError(f"found gpus={self.gpus} and nodes={self.nodes}, expected 1 to {MOST_RANKS} of both")
        if not (math.isfinite(self.skew) and self.skew >= 1):
            raise ConfigError(f"found a skew of {self.skew:g}, expected a finite factor >= 1: how many times as long the slowest rank "
                              "takes")
        if self.skew > 1 and self.count == 1:
            raise ConfigError(f"found a skew of {self.skew:g} with one rank, expected several: set the number of GPUs or of machines")

    @property
    def count(self) -> int:
        """All ranks."""
        return self.gpus * self.nodes

    @property
    def words(self) -> str:
        """As people say it: "8 GPUs", "16 GPUs of 2 machines"."""
        gpus = f"{self.count} GPU{'s' if self.count > 1 else ''}"
        return gpus if self.nodes == 1 else f"{gpus} of {self.nodes} machines"

    def shard(self, params: int) -> int:
        """Elements of so many parameters that one rank updates, its largest shard.

        Vectors, which every rank updates whole, are counted as cut: they are few.
        """
        return params if self.count == 1 else Shard(params, 0, self.count).end

    def shards(self, params: Sequence[int]) -> list[int]:
        """`shard` of each; equal ones, as most layers are, are counted once."""
        shard_of = {size: self.shard(size) for size in set(params)}
        return [shard_of[size] for size in params]


ONE_RANK: Final = Ranks()
