"""What each rank does in test_sharded_weights.py: loops with sharded and with resident weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from . import rank_loops, shard_loops
from .rank_loops import Found


def loops_of_shards(names: Sequence[str], rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """Loops of shard_loops.py in bf16, every second rank slow, with plans of each rank's own."""
    os.environ[NAN_VARIABLE] = "1"
    return {name: [shard_loops.run_ours(rank, shard_loops.LOOPS[name], torch.bfloat16, weights=weights)
                   for weights in ("resident", "sharded")] for name in names}


def loops_of_ranks(names: Sequence[str], rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """Loops of rank_loops.py in bf16: every state on the host, and some on the device."""
    os.environ[NAN_VARIABLE] = "1"
    runs = (("resident", 0), ("sharded", 0), ("sharded", 3))
    return {name: [rank_loops.ours(rank, torch.bfloat16, name, k=k, weights=weights) for weights, k in runs] for name in names}
