"""Trainer, Accelerate, Lightning with two processes: the bits of their DistributedDataParallel."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from . import rank_frameworks
from .loops import assert_same
from .rank_loops import Found, started

pytestmark = pytest.mark.sample(0)


def moments(found: Found) -> dict[str, torch.Tensor]:
    """The states that torch's AdamW has, too."""
    return {f"{number}.{name}": entry[name] for number, entry in found["states"].items() for name in ("step", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("framework", [rank_frameworks.trainer, rank_frameworks.accelerated])
def test_two_processes_have_the_bits_of_distributed_data_parallel(framework: Any, tmp_path: Path) -> None:
    """Losses, weights and the checkpoint, also of a training that goes on from DDP's."""
    pytest.importorskip("transformers")
    for found in started(partial(framework, tmp_path), 2, tmp_path):
        assert isinstance(found, list), found
        plain, ours, *resumed = found
        assert ours["losses"] == plain["losses"]
        for of in (ours, *resumed):
            assert_same(of["weights"], plain["weights"])
            assert_same(moments(of), moments(plain))


def test_lightning_with_two_processes_has_the_plain_bits(tmp_path: Path) -> None:
    """Losses, validations, weights and the checkpoint, also of a fit that goes on from it.

    Plain is Lightning's DistributedDataParallel, in "bf16-true" with an optimizer that has fp32
    masters. Where two batches are accumulated and clipped, gradients are averaged by hand.
    """
    pytest.importorskip("lightning")
    ranks = started(partial(rank_frameworks.lit_cases, tmp_path), 2, tmp_path)
    for of_rank in ranks:
        assert isinstance(of_rank, dict), of_rank
        assert list(of_rank) == ["32-true", "bf16-true", "bf16-mixed", "clipped"]
        for case, found in of_rank.items():
            for plain, ours in (found[:2], found[2:]):
                assert ours["losses"] == plain["losses"], case
                assert_same(ours["weights"], plain["weights"])
                assert_same(ours["saved"], plain["saved"])
                if case != "bf16-true":  # the plain optimizer has other names there
                    assert_same(moments(ours), moments(plain))
    for case, found in ranks[0].items():
        assert found[0]["losses"] != ranks[1][case][0]["losses"]  # each has batches of its own


def test_a_process_that_fails_in_lightning_shows_its_own_error(tmp_path: Path) -> None:
    """It waits for no other, though weights were not gathered yet; the others are told."""
    pytest.importorskip("lightning")
    other, failed = started(rank_frameworks.lit_fails, 2, tmp_path)
    assert failed == "ZeroDivisionError: of this rank"
    assert other.startswith(("RankError", "RuntimeError"))
