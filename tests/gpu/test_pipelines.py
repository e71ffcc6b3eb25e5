"""Two stages with a GPU each, over NCCL: the loops of tests/cpu/test_pipelines.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ..cpu import pipeline_loops
from ..cpu.pipeline_loops import SCHEDULES
from ..cpu.rank_loops import require_bits_by_hand, started
from ..cpu.test_pipelines import KINDS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_have_the_bits_of_the_schedule_by_hand(schedule: str, tmp_path: Path) -> None:
    """Whatever the plan of each stage, which moves at every step; one rank is slow."""
    ranks = started(partial(pipeline_loops.every_loop, schedule, KINDS[schedule]), 2, tmp_path, backend="nccl")
    assert all(len(loops) == len(KINDS[schedule]) for loops in ranks), ranks
    require_bits_by_hand(ranks, "seen")
