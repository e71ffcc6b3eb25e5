"""Ranks that update shards have the bits of whole gradients, averaged by hand, in any loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import shard_loops
from .loops import assert_same
from .rank_loops import started
from .shard_loops import LOOPS


@pytest.mark.sample(0)
def test_every_loop_has_the_bits_of_whole_gradients(tmp_path: Path) -> None:
    """Reads, edits, clips, sums: each rank's states move at every step, and one rank is slow."""
    first, second = started(shard_loops.every_loop, 2, tmp_path)
    assert len(first) == 2 * len(LOOPS), first
    for loop, (expected, found) in first.items():
        assert found["shards"] == 6
        for by_hand, ours in ((expected, found), second[loop]):
            assert ours["seen"] == by_hand["seen"], loop
            assert_same(ours["weights"], by_hand["weights"])
