"""Several optimizers on one rank of a pipeline, and weights that two ranks have."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from . import several_stages
from .rank_loops import require_bits_by_hand, started

LIMIT_S = 60.0  # of the group


@pytest.mark.sample(0)  # .ci/run names this file
def test_an_optimizer_may_step_in_every_second_iteration(tmp_path: Path) -> None:
    """A GradScaler unscales the gradients of those that step, once: the bits of doing so by hand.

    An inf in any stage leaves the step out in all, also one in gradients that wait for their step.
    """
    ranks = started(several_stages.late, 2, tmp_path)
    require_bits_by_hand(ranks, "seen")


@pytest.mark.sample(0)
def test_stages_of_a_rank_hear_of_a_step_that_was_left_out_together(tmp_path: Path) -> None:
    """One `try:` around all steps or one for each, stepping again or not: no stage parts.

    As on a GPU, where it is told a step later: then either all of a rank's stages step or none.
    """
    ranks = started(several_stages.raised, 2, tmp_path)
    assert all(set(of) == set(several_stages.RAISED) for of in ranks), ranks
    require_bits_by_hand(ranks, "seen")


@pytest.mark.sample(0)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_stage_without_gradients_hears_of_a_step_that_was_left_out(at_once: bool, tmp_path: Path) -> None:
    """All ranks raise at the same step(), or those that do not would wait for the others."""
    told = [False, True, False, False, False] if at_once else [False, False, True, False, False]
    expected = ["NonFiniteGradientError" if here else "no error" for here in told]
    assert started(partial(several_stages.without_gradients, at_once), 2, tmp_path) == [expected] * 2


@pytest.mark.sample(0)
def test_a_hook_on_one_rank_alone_is_told_at_once(tmp_path: Path) -> None:
    """With a GradScaler and `on_nonfinite`: an inf would have one rank step and the other not."""
    for (said, took_s), after in started(several_stages.hooked, 2, tmp_path, timeout_s=LIMIT_S):
        assert re.match(r"RankError: hooks on step\(\) .* differ between ranks: number 0 is none on rank 0 and hooks on rank 1", said), said
        assert took_s < LIMIT_S / 2
        assert after[0] == "no error"


@pytest.mark.sample(0)
def test_states_of_tied_weights_are_compared(tmp_path: Path) -> None:
    """When they are tied, and at the first step after they were loaded. Both ranks are told."""
    first, last = started(several_stages.tied, 2, tmp_path, timeout_s=LIMIT_S)
    differ = r"ConfigError: tie_weights: states of words\.weight differ: .*step 1, .* on rank 0, .*step 1, .* on rank 1; load the same"
    for found in (first, last):
        at_tie, loaded, alike = (said for said, _ in found["said"])
        assert re.match(differ, at_tie), at_tie
        assert re.match(differ, loaded), loaded
        assert alike == "no error"
        assert found["kept"] == 0
        assert "words.weight" in found["names"]
        assert "head.weight" not in found["names"]
    assert torch.equal(first["weight"], last["weight"])


@pytest.mark.sample(0)
def test_a_tied_weight_that_steps_late_is_refused(tmp_path: Path) -> None:
    """Its gradient was added up in the first iteration. The other rank is told at once."""
    first, last = started(several_stages.summed_too_early, 2, tmp_path, timeout_s=LIMIT_S)
    assert [first[0][0], last[0][0]] == ["no error", "no error"]
    assert re.match(r"UnsupportedError: a backward came after the gradients of words\.weight", last[1][0]), last
    assert re.match(r"RankError: .* an error in ", first[1][0]), first
    assert first[1][1] < LIMIT_S / 2


@pytest.mark.sample(0)
@pytest.mark.parametrize("eager", [0, 1])
@pytest.mark.parametrize("loop", ["in turn", "tied clipped"])
def test_stages_of_a_rank_may_run_without_graphs(loop: str, eager: int, tmp_path: Path) -> None:
    """What ranks do together they do as often: gradients that no graph made count as a backward."""
    ranks = started(partial(several_stages.without_graphs, loop, eager), 2, tmp_path, timeout_s=LIMIT_S)
    assert all(isinstance(of, dict) for of in ranks), ranks
    require_bits_by_hand(ranks, "seen")


@pytest.mark.sample(0)
def test_an_error_that_stages_hear_of_together_keeps_no_schedule(tmp_path: Path) -> None:
    """What the others of a rank are to raise has no frames of the loop that has got it first."""
    for said in started(several_stages.kept_by_errors, 2, tmp_path):
        assert said == ["gone: NonFiniteGradientError"] * 2
