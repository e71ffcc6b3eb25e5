"""Two stages on GPUs: the loops of tests/cpu/test_pipelines.py.

Over NCCL with a GPU each; over gloo with one GPU between them. gloo sends from host memory alone,
so there what goes from stage to stage is on the CPU, and each stage brings it to the GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from ..cpu import pipeline_loops, pipeline_plans
from ..cpu.pipeline_loops import SCHEDULES
from ..cpu.pipeline_plans import require_fixed_plans
from ..cpu.rank_loops import ONE_GPU, require_bits_by_hand, started
from ..cpu.test_pipelines import KINDS

BACKENDS = [pytest.param("nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")), ONE_GPU]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_have_the_bits_of_the_schedule_by_hand(schedule: str, backend: str, tmp_path: Path) -> None:
    """Whatever the plan of each stage, which moves at every step; one rank is slow."""
    ranks = started(partial(pipeline_loops.every_loop, schedule, KINDS[schedule]), 2, tmp_path, backend=backend)
    assert all(len(loops) == len(KINDS[schedule]) for loops in ranks), ranks
    require_bits_by_hand(ranks, "seen")


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixed_plans_have_the_bits_of_the_schedule_by_hand(backend: str, tmp_path: Path) -> None:
    """All states on the host, or some in each place. The schedule by hand repeats its own bits."""
    loops = pipeline_plans.LOOPS
    require_fixed_plans(started(partial(pipeline_plans.fixed_plans, loops, 2), 2, tmp_path, backend=backend), len(loops))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_goes_to_the_host_once_in_a_step(backend: str, tmp_path: Path) -> None:
    """With three micro-batches and with four: what the schedule divides by brings none back."""
    for found in started(pipeline_loops.copies, 2, tmp_path, backend=backend):
        for loop, steps in found.items():
            rows = steps[0][0]
            assert steps[1:] == [(rows, rows, 0)] * 2, loop
