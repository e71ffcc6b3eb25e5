"""Stages whose plans stay: all states on the host, or some in each place; 3 or 4 micro-batches.

Loops may run by hand twice, so that what differs from run to run without us is seen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from .pipeline_loops import Found, trained
from .rank_loops import require_bits_by_hand

LOOPS: Final = (("GPipe", "clipped", torch.bfloat16, 3), ("1F1B", "scaler", torch.float32, 3), ("1F1B", "plain", torch.bfloat16, 4))
_PLANS: Final[tuple[dict[str, Any], ...]] = ({"k": 0, "stream": 0.0}, {"k": 1, "stream": 0.5})


def fixed_plans(loops: Sequence[tuple[str, str, torch.dtype, int]], by_hand: int, rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """By loop: so many runs by hand, ours with all states on the host, ours with a mixed plan."""
    found = {}
    for schedule, loop, dtype, micro_batches in loops:
        plain = [trained(schedule, loop, dtype, None, False, micro_batches=micro_batches) for _ in range(by_hand)]
        ours = [trained(schedule, loop, dtype, None, True, micro_batches=micro_batches, **plan) for plan in _PLANS]
        found[f"{schedule} {loop} {dtype} {micro_batches}"] = (*plain, *ours)
    return found


def require_fixed_plans(ranks: Sequence[dict[str, tuple[Found, ...]]], loops: int) -> None:
    """Every run has the bits of the first, and ours the plan that it was given."""
    assert [len(found) for found in ranks] == [loops] * len(ranks), ranks
    require_bits_by_hand(ranks, "seen")
    for found in ranks:
        for *_, host, mixed in found.values():
            assert host["places"] == {"cpu"}
            assert mixed["places"] == {"cpu", "gpu", "stream"}
