"""Whether steps have changed, and whether a new plan is worth a move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.replan import HORIZON_STEPS, LATEST, drifted, judge, planning_guard
from hytrain_fx.errors import PlanError

US = st.floats(1, 1e7)
STEPS = st.lists(US, min_size=1, max_size=9)


@given(present=US, new=US, steps=STEPS, migration=st.floats(0, 1e9))
def test_a_move_gains_more_than_noise_and_repays_itself(present: float, new: float, steps: list[float], migration: float) -> None:
    """Moving needs a gain above 1% of the step and two standard errors, which repays it.

    The same numbers never move it back.
    """
    verdict = judge(present, new, steps, migration)
    if verdict.moves:
        assert verdict.gain_us > 0.01 * present
        assert verdict.gain_us > 2 * verdict.noise_us
        assert verdict.gain_us * HORIZON_STEPS > migration
        assert not judge(new, present, steps, migration).moves
    assert ("moved" in str(verdict)) is verdict.moves


def test_what_holds_a_move_back() -> None:
    """From 1000 us, 950 us are worth a move.

    They are not with noisy steps, or if the move takes 200 times the gain. Nor is 0.5%.
    """
    calm, noisy = [1000.0] * 5, [1000.0, 1200.0, 800.0, 1000.0, 1100.0]
    assert judge(1000.0, 950.0, calm, 9_000.0).moves
    assert not judge(1000.0, 950.0, noisy, 9_000.0).moves
    assert not judge(1000.0, 950.0, calm, 10_000.0).moves
    assert not judge(1000.0, 995.0, calm, 0.0).moves
    with pytest.raises(PlanError, match="expected times >= 0"):
        judge(-1.0, 1.0, calm, 0.0)


@given(steps=STEPS)
def test_the_guard_is_5_to_50_percent(steps: list[float]) -> None:
    """Noise of the CPU's time raises the guard; nothing measured gives the guard of the planner."""
    assert 1.05 <= planning_guard(steps) <= 1.5
    assert planning_guard([]) == planning_guard([0.0]) == 1.05
    assert planning_guard([100.0, 110.0, 90.0]) > 1.2


@given(before=st.lists(st.floats(900, 1100), min_size=3, max_size=9), spike=US, at=st.integers(0, LATEST - 1))
def test_one_odd_step_is_no_drift(before: list[float], spike: float, at: int) -> None:
    """A single step of any length starts nothing; three of twice the length do.

    The last three steps count.
    """
    middle = sorted(before)[len(before) // 2]
    latest = [middle] * LATEST
    latest[at] = spike
    assert not drifted(before, latest)
    assert drifted([middle] * 5, [2.0 * middle] * LATEST)
    assert drifted([middle] * 5, [0.5 * middle] * LATEST)


def test_nothing_drifts_from_nothing() -> None:
    """Without steps to compare with, or with too few new ones, there is no drift."""
    assert not drifted([], [1.0] * LATEST)
    assert not drifted([1.0] * 5, [9.0] * (LATEST - 1))
