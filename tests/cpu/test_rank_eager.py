"""Several ranks: gradients that no captured graph makes, and those that no backward makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from . import rank_eager
from .loops import HYPER, assert_same
from .rank_loops import require_bits_by_hand, started


@pytest.mark.sample(0)  # .ci/run names this file
def test_gradients_of_eager_code_may_be_dropped_by_anybody(tmp_path: Path) -> None:
    """The next are averaged, whoever has dropped or zeroed the last ones, and when."""
    ranks = started(rank_eager.every_drop, 2, tmp_path)
    assert len(ranks[0]) == 2 * len(rank_eager.DROPS), ranks[0]
    require_bits_by_hand(ranks, "losses")


@pytest.mark.sample(0)
def test_gradients_of_eager_code_may_be_dropped_by_hooks(tmp_path: Path) -> None:
    """What no rank has left is no gradient; what one has is averaged with zeros."""
    ranks = started(rank_eager.dropped_by_hooks, 2, tmp_path)
    assert len(ranks[0]) == 2, ranks[0]
    require_bits_by_hand(ranks, "losses")


@pytest.mark.sample(0)
def test_averaged_gradients_that_come_late_are_taken_in_each_step(tmp_path: Path) -> None:
    """Where the nodes are not those of the other rank's graph: autograd adds nothing there."""
    assert started(rank_eager.other_nodes, 2, tmp_path) == [["no error"] * 3] * 2


def test_assigned_gradients_of_one_rank_are_refused(tmp_path: Path) -> None:
    """In the first step, and in one after `model.zero_grad()`."""
    for found in started(partial(rank_eager.assigned, "own"), 2, tmp_path):
        assert all("this rank's own" in said for said in found), found


@pytest.mark.sample(0)
def test_assigned_gradients_that_all_ranks_have_are_taken(tmp_path: Path) -> None:
    """They are their own mean."""
    assert started(partial(rank_eager.assigned, "all"), 2, tmp_path) == [["no error"] * 2] * 2


@pytest.mark.sample(0)
def test_a_step_may_take_the_last_ones_gradients_again(tmp_path: Path) -> None:
    """Also where the loop has read them meanwhile, or made them zeros."""
    assert started(rank_eager.stepped_again, 2, tmp_path) == ["no error"] * 2


@pytest.mark.sample(0)
def test_torchs_checkpoint_functions_work_before_the_first_step(tmp_path: Path) -> None:
    """They step on zeros that they have assigned: no weight, moment or learning rate is another."""
    ranks = started(rank_eager.first_checkpoint, 2, tmp_path)
    for found in ranks:
        assert set(found) == {"resident", "sharded"}, found
        for how, of in found.items():
            assert of["rates"] == [HYPER["lr"]]
            assert set(of["moments"]) == {0.0}
            assert of["empty"]
            assert of["unchanged"]
            assert_same(of["after"], ranks[0][how]["after"])
