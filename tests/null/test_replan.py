"""When a running program's plan is looked at again, and when states move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.replan import HORIZON_STEPS, LATEST, Agenda, drifted, judge, planning_guard
from hytrain_fx.errors import PlanError

US = st.floats(1, 1e7)
STEPS = st.lists(US, min_size=1, max_size=9)


@given(present=US, new=US, steps=STEPS, migration=st.floats(0, 1e9))
def test_a_move_gains_more_than_noise_and_repays_itself(present: float, new: float, steps: list[float], migration: float) -> None:
    """Moving needs a gain above 1% of the step and two standard errors that repays the migration; the same numbers never move it back."""
    verdict = judge(present, new, steps, migration)
    if verdict.moves:
        assert verdict.gain_us > 0.01 * present
        assert verdict.gain_us > 2 * verdict.noise_us
        assert verdict.gain_us * HORIZON_STEPS > migration
        assert not judge(new, present, steps, migration).moves
    assert ("moved" in str(verdict)) is verdict.moves


def test_what_holds_a_move_back() -> None:
    """From 1000 us: 950 us moves; not with noisy steps, not when the move takes 200 times the gain, not for 0.5%."""
    calm, noisy = [1000.0] * 5, [1000.0, 1200.0, 800.0, 1000.0, 1100.0]
    assert judge(1000.0, 950.0, calm, 9_000.0).moves
    assert not judge(1000.0, 950.0, noisy, 9_000.0).moves
    assert not judge(1000.0, 950.0, calm, 10_000.0).moves
    assert not judge(1000.0, 995.0, calm, 0.0).moves
    with pytest.raises(PlanError, match="expected times >= 0"):
        judge(-1.0, 1.0, calm, 0.0)


@given(steps=STEPS)
def test_the_guard_is_at_least_5_percent(steps: list[float]) -> None:
    """Noise of the CPU's time raises the guard; nothing measured gives the guard of the planner."""
    assert planning_guard(steps) >= 1.05
    assert planning_guard([]) == planning_guard([0.0]) == 1.05
    assert planning_guard([100.0, 160.0, 40.0]) > 1.2


@given(before=st.lists(st.floats(900, 1100), min_size=3, max_size=9), spike=US, at=st.integers(0, LATEST - 1))
def test_one_odd_step_is_no_drift(before: list[float], spike: float, at: int) -> None:
    """A single step of any length among the last three starts nothing; three of twice the length do."""
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


def decisions(steps_us: list[float], every: int, window: int, moves: set[int]) -> list[int]:
    """Counts of finished steps at which decisions fall when the program runs like this; those numbered in `moves` move."""
    agenda, measured, found = Agenda(every, window, 2 + window), 0, []
    for done in range(1, len(steps_us) + 1):
        latest = steps_us[max(0, done - window) : done]
        if measured:
            measured += 1
        elif agenda.begins(done, latest):
            measured = 1
        if measured > window:
            found.append(done)
            agenda, measured = agenda.after(done, len(found) - 1 in moves, latest), 0
    return found


@given(every=st.integers(1, 30), window=st.integers(1, 8), steps=st.integers(60, 120), moves=st.integers(0, 3))
def test_steady_steps_are_measured_once_for_each_plan(every: int, window: int, steps: int, moves: int) -> None:
    """The first decision comes after the cold steps and one window; after each move there is one more; then nothing is measured."""
    found = decisions([1000.0] * steps, every, window, set(range(moves)))
    wanted = [2 + window + i * max(every // 2, window + 1, 1) for i in range(moves + 1)]
    assert found == [done for done in wanted if done <= steps]


@given(change=st.integers(8, 60), factor=st.sampled_from([0.94, 1.06]))
def test_a_small_change_waits_for_the_regular_look(change: int, factor: float) -> None:
    """6% is no drift; the look at most every 20 steps, less the window, sees it once its median is new, and a window later it is judged."""
    found = decisions([1000.0] * change + [factor * 1000.0] * 60, 20, 5, set())
    assert any(change < done <= change + 15 + 3 + 5 for done in found)
    assert len(found) <= 3  # a window that was half old is judged once more


@given(change=st.integers(8, 100), factor=st.sampled_from([0.3, 0.7, 1.3, 3.0]), moves=st.sets(st.integers(0, 12)))
def test_a_change_is_followed_within_20_steps(change: int, factor: float, moves: set[int]) -> None:
    """Most of the window of some decision lies behind any large change within 20 steps, also where plans moved just before."""
    found = decisions([1000.0] * change + [factor * 1000.0] * 40, 20, 5, moves)
    assert any(change + 3 <= done <= change + 20 for done in found)


def test_a_plan_that_is_to_stay_is_not_looked_at_again() -> None:
    """With `every` 0 there is one decision, whatever the steps do."""
    assert decisions([1000.0] * 30 + [5000.0] * 30, 0, 5, set()) == [7]


@given(done=st.integers(0, 100), every=st.integers(1, 50), window=st.integers(1, 8), due=st.none() | st.integers(0, 200))
def test_measuring_that_is_asked_for_begins_with_the_next_step(done: int, every: int, window: int, due: int | None) -> None:
    """Whatever was due; not where the plan is to stay."""
    assert Agenda(every, window, due).soon(done).begins(done + 1, [1.0] * window)
    assert Agenda(0, window, due).soon(done) == Agenda(0, window, due)
