"""Estimators of measured series, and the decision to move to another plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.replan import NORMAL_MAD, planning_guard, should_replan, standard_error


@given(value=st.floats(1, 1e6), spike=st.floats(2e6, 1e9))
def test_spikes_do_not_move_the_median(value: float, spike: float) -> None:
    """Three spikes in seven values leave its error as it was."""
    series = [value, spike, value, spike, value, spike, value]
    assert standard_error(series) == 0.0
    assert planning_guard(series) == 1.05


def test_noise_raises_the_guard() -> None:
    """The guard is 5% to 50%, and grows with how far apart steps are, however many are measured."""
    calm, noisy, wild = ([100.0, 100.0 + by, 100.0 - by] * 3 for by in (1.0, 8.0, 60.0))
    assert planning_guard(calm) == 1.05
    assert planning_guard(noisy) == planning_guard(noisy * 9) == pytest.approx(1 + 2 * NORMAL_MAD * 0.08)
    assert planning_guard(wild) == 1.5
    assert planning_guard([]) == planning_guard([0.0] * 3) == 1.05


def test_small_or_unpaid_gains_do_not_move_states() -> None:
    """A plan changes only for a gain above 1% and above the noise, repaid within the horizon."""
    assert should_replan(1000.0, 950.0, 9000.0, 200)
    assert not should_replan(1000.0, 950.0, 11_000.0, 200)
    assert not should_replan(1000.0, 991.0, 0.0, 200)
    assert not should_replan(1000.0, 950.0, 0.0, 200, standard_error_us=25.0)
    assert not should_replan(1000.0, 1100.0, 0.0, 200)


@given(a=st.floats(1, 1e6), b=st.floats(1, 1e6), migration=st.floats(0, 1e7), horizon=st.integers(1, 1000))
def test_no_flip_and_back(a: float, b: float, migration: float, horizon: int) -> None:
    """From the same numbers it never pays to move and to move back."""
    assert not (should_replan(a, b, migration, horizon) and should_replan(b, a, migration, horizon))
