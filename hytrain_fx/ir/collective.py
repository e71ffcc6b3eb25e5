"""What goes from rank to rank in a step."""

from __future__ import annotations

import enum


class CollectiveKind(enum.StrEnum):
    """What a rank sends and gets.

    REDUCE_SCATTER   gradients: a shard of the mean of each matrix, vectors whole
    ALL_GATHER       new weights: every rank's shard of each matrix
    """

    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
