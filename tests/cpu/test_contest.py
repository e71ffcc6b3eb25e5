"""The ways of beginning updates are timed, and the fastest stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.session.contest import _REST, _SETTLING, _TIMED, Contest, Way, middle_mean


class Loop:
    """Steps whose length depends on the way that is in force."""

    def __init__(self, early_s: float, with_step_s: float, by_half_s: float | None = None) -> None:
        self.now_s = 0.0
        self.took_s = {Way.EARLY: early_s, Way.WITH_STEP: with_step_s, Way.EARLY_BY_HALF: by_half_s or 0.0}
        self.contest = Contest(by_half_s is not None, lambda: self.now_s)

    def step(self, extra_s: float = 0.0) -> bool:
        """One step; whether its updates were early."""
        early = self.contest.early
        self.now_s += self.took_s[self.contest.way] + extra_s
        self.contest.stepped()
        return early

    def until_decided(self) -> int:
        """Steps until the ways have been timed."""
        steps = 0
        while self.contest.why is None:
            self.step()
            steps += 1
        return steps


@pytest.mark.parametrize(("early_s", "stays"), [(0.30, False), (0.20, True), (0.249, False)])
def test_the_faster_way_stays(early_s: float, stays: bool) -> None:
    """Early updates stay where they gain more than 1% of a step; the sentence names both times."""
    loop = Loop(early_s, 0.25)
    assert loop.until_decided() == 2 * (_SETTLING + _TIMED) + 1  # the first step only starts the clock
    assert loop.contest.early is stays
    assert loop.contest.why is not None
    assert "250 ms" in loop.contest.why
    assert loop.contest.why.endswith("they begin before it" if stays else "they begin with it")
    assert [loop.step() for _ in range(_REST - 1)] == [stays] * (_REST - 1)


@pytest.mark.parametrize(("by_half_s", "stays"), [(0.22, Way.EARLY_BY_HALF), (0.26, Way.WITH_STEP)])
def test_half_of_the_workers_are_tried_where_all_have_lost(by_half_s: float, stays: Way) -> None:
    """They slow the backward less. The sentence names all three times."""
    loop = Loop(0.30, 0.25, by_half_s)
    assert loop.until_decided() == 3 * (_SETTLING + _TIMED) + 1
    assert loop.contest.way is stays
    assert loop.contest.why is not None
    assert f"300 ms a step, {by_half_s * 1e3:.0f} ms by half of the workers, 250 ms where they begin with it" in loop.contest.why
    assert loop.contest.early_workers(12) == (6 if stays is Way.EARLY_BY_HALF else 12)


def test_half_of_the_workers_are_not_tried_where_all_win() -> None:
    """Or where there is one."""
    for loop in (Loop(0.20, 0.25, 0.10), Loop(0.30, 0.25)):
        assert loop.until_decided() == 2 * (_SETTLING + _TIMED) + 1
        assert loop.contest.early_workers(12) == 12


def test_a_loop_that_changes_is_timed_again() -> None:
    """After its rest the other way is tried again, and may win then."""
    loop = Loop(0.30, 0.25)
    loop.until_decided()
    loop.took_s[Way.EARLY] = 0.20
    for _ in range(_REST + _SETTLING + _TIMED):
        loop.step()
    assert loop.contest.early


def test_what_is_tried_first_is_timed_first() -> None:
    """Until the first step has been timed; what is found does not depend on it."""
    loop = Loop(0.30, 0.25)
    loop.contest.try_first(True)
    assert loop.step()
    loop.contest.try_first(False)
    assert loop.step()
    loop.until_decided()
    assert not loop.contest.early
    loop.contest.try_first(True)
    assert not loop.step()


def test_steps_of_another_loop_are_not_timed() -> None:
    """After a pause the way in force is timed from nothing: an evaluation between is no step."""
    loop = Loop(0.20, 0.25)
    for _ in range(_SETTLING + _TIMED):
        loop.step()
    loop.contest.pause()
    loop.now_s += 100.0
    assert loop.until_decided() == 2 * (_SETTLING + _TIMED) + 1
    assert loop.contest.early


@given(hitches=st.lists(st.integers(0, _TIMED - 1), max_size=_TIMED // 4, unique=True))
def test_hitches_decide_nothing(hitches: list[int]) -> None:
    """A quarter of the steps may take ten times as long."""
    loop = Loop(0.20, 0.25)
    for step in range(2 * (_SETTLING + _TIMED) + 1):
        loop.step(extra_s=2.0 if step % _TIMED in hitches else 0.0)
    assert loop.contest.early


@given(values=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=40))
def test_the_middle_mean_lies_among_the_values(values: list[float]) -> None:
    """And equal values have it for their mean."""
    assert min(values) <= middle_mean(values) * (1 + 1e-12)
    assert middle_mean(values) <= max(values) * (1 + 1e-12)
    assert middle_mean([values[0]] * 7) == pytest.approx(values[0])
