"""Two processes train one model on GPUs: the loops of tests/cpu/test_ranks.py.

Over NCCL with a GPU each; over gloo with one GPU between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main

from ..cpu import owner_loops, rank_loops, shard_loops, sharded_loops
from ..cpu.loops import assert_same
from ..cpu.rank_loops import LOOPS, ONE_GPU, require_bits_by_hand, started
from ..cpu.sharded_loops import require_resident_bits
from ..cpu.test_rank_timeline import Recorded, recorded, require_order, require_whole_lane

ROOT = Path(__file__).parents[2]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
BACKENDS = [pytest.param("nccl", marks=two_gpus), ONE_GPU]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_have_the_bits_of_averaging_by_hand(backend: str, tmp_path: Path) -> None:
    """As on CPUs: every loop and placement, with one rank slow."""
    first, second = started(partial(rank_loops.every_loop, LOOPS), 2, tmp_path, backend=backend)
    assert len(first) == len(LOOPS), first
    require_bits_by_hand((first, second), "losses")
    for loop in first:
        assert all(map(torch.equal, first[loop][1]["states"], second[loop][1]["states"]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_have_plans_of_their_own(backend: str, tmp_path: Path) -> None:
    """Whatever the plan of each of them, weights and states have the same bits."""
    ranks = started(rank_loops.two_plans, 2, tmp_path, backend=backend)
    for found in ranks:
        for of in found:
            assert_same(of["weights"], ranks[0][0]["weights"])
            assert all(map(torch.equal, of["states"], ranks[0][0]["states"]))


@two_gpus
def test_the_example_ends_with_equal_weights() -> None:
    """As its text says, started by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(ROOT / "examples" / "train_ranks.py"), "--steps", "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250, env=environment)
    assert run.returncode == 0, run.stderr
    assert "2 ranks: all ranks have the same weights" in run.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_loop_has_the_bits_of_whole_gradients(backend: str, tmp_path: Path) -> None:
    """Reads, edits, clips, sums: each rank's states move at every step, and one rank is slow."""
    first, second = started(partial(shard_loops.every_loop, shard_loops.IN_BOTH), 2, tmp_path, backend=backend)
    assert len(first) == 2 * len(shard_loops.LOOPS), first
    require_bits_by_hand((first, second), "seen")


@two_gpus
def test_sharded_weights_have_the_bits_of_resident_ones(tmp_path: Path) -> None:
    """As on CPUs, each slot NaN once it was read: other plans on each rank, one rank slow."""
    of_ranks = started(partial(sharded_loops.loops_of_ranks, ("accumulated", "clipped", "evaluated")), 2, tmp_path, backend="nccl")
    require_resident_bits(of_ranks, "losses")
    loops = ("plain", "edited", "weights_used", "broken", "partly_eager")
    require_resident_bits(started(partial(sharded_loops.loops_of_shards, loops), 2, tmp_path, backend="nccl"))


@two_gpus
def test_sharded_weights_of_a_model_that_recomputes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The compiler likes to fuse kernels of two of a Llama's layers. The bits are those by hand."""
    rows = [f"{row} 125m --batch 1 --sequence 128 --bits 3 --checkpointing" for row in ("by_hand", "sharded", "sharded --option k=3")]
    asked = tmp_path / "asked.rows"
    asked.write_text("\n".join(rows))
    assert main(["ranks", "--gpus", "2", "--file", str(asked), "--together", "3", "--out", str(tmp_path / "ranks.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("its bits") == 3, printed


@two_gpus
@pytest.mark.parametrize("name", owner_loops.KINDS)
def test_owners_have_the_bits_of_averaging_by_hand(name: str, tmp_path: Path) -> None:
    """Every state on the device, where an optimizer without a kernel has the plain loop's bits."""
    ranks = started(partial(owner_loops.every_loop, name), 2, tmp_path, backend="nccl")
    require_bits_by_hand(ranks, "seen")


@pytest.mark.parametrize("backend", BACKENDS)
def test_owners_keep_ranks_alike_whatever_the_plans(backend: str, tmp_path: Path) -> None:
    """Some states on the host of one rank, and on the device of the other."""
    first, second = started(owner_loops.four, 2, tmp_path, backend=backend)
    assert first["seen"] == second["seen"]
    assert_same(first["weights"], second["weights"])


@two_gpus
def test_recorded_steps_show_what_goes_from_rank_to_rank(tmp_path: Path) -> None:
    """As on CPUs. Bars lie inside the steps of the device's lane, and none overlaps another.

    The profile has times of them, which on a CPU are part of forward and backward.
    """
    for found in started(recorded, 2, tmp_path, backend="nccl"):
        assert isinstance(found, Recorded), found
        assert found.recording is not None
        require_whole_lane(found.recording.timeline, found, 2)
        require_order(found.recording.timeline, slack_us=1.0)  # events have half a microsecond
        assert found.after == 0
        assert all(reduce_us > 0 and gather_us > 0 for reduce_us, gather_us in found.measured)
