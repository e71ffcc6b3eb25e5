"""A plan whose steps are longer than all states on the device would take is measured again, then that is tried; it never goes round."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.planning.plan_check import Advice, CheckState, PlanCheck

ALL_US = 200.0


def plan_at(place: Placement, step_us: float) -> Plan:
    return Plan((PlanRow(0, "unit", 0, 10, place, "test"),), int(place is Placement.GPU), "test", predicted={"step_us": step_us})


ON_HOST, ON_DEVICE = plan_at(Placement.CPU, 150.0), plan_at(Placement.GPU, ALL_US)


def advice_after(check: PlanCheck, plan: Plan, step_us: Callable[[], float], all_us: float | None, steps: int = 30) -> Advice:
    """The first advice that is not to do nothing."""
    for _ in range(steps):
        advice = check.saw(step_us(), plan, all_us)
        if advice is not Advice.NOTHING:
            return advice
    return Advice.NOTHING


def test_a_plan_that_keeps_its_promise_is_left_alone() -> None:
    """Steps no longer than all states on the device were predicted to take raise no doubt; nor where they do not fit there."""
    check = PlanCheck()
    assert advice_after(check, ON_HOST, lambda: 205.0, ALL_US, 200) is Advice.NOTHING
    assert advice_after(check, ON_HOST, lambda: 900.0, None, 200) is Advice.NOTHING
    assert check.state is CheckState.TRUSTED
    assert check.note == ""


def test_all_states_on_the_device_stay_where_their_steps_are_shorter() -> None:
    """Measured again, tried, kept; from then on predictions of states on the host are scaled by what they were off."""
    check = PlanCheck()
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US) is Advice.MEASURE
    assert "measured again" in check.note
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US) is Advice.TRY
    check.restart()
    assert advice_after(check, ON_DEVICE, lambda: 210.0, None) is Advice.NOTHING
    assert check.state is CheckState.SETTLED
    assert "210 us a step instead of 400 us" in check.note
    assert check.expected_us(ON_HOST) == 150.0 * 400.0 / 150.0
    assert check.expected_us(ON_DEVICE) == ALL_US


def test_all_states_on_the_device_go_back_where_their_steps_are_no_shorter() -> None:
    """The plan before comes back, and is not doubted again for a while."""
    check = PlanCheck()
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US) is Advice.MEASURE
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US) is Advice.TRY
    check.restart()
    assert advice_after(check, ON_DEVICE, lambda: 395.0, None) is Advice.BACK
    assert check.before == ON_HOST
    assert "went back" in check.note
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US, 400) is Advice.NOTHING
    assert check.expected_us(ON_HOST) == 150.0


def test_a_second_plan_that_keeps_its_promise_ends_the_doubt() -> None:
    """Where times measured again gave a plan with shorter steps, nothing is tried."""
    check = PlanCheck()
    assert advice_after(check, ON_HOST, lambda: 400.0, ALL_US) is Advice.MEASURE
    check.restart()
    assert advice_after(check, ON_HOST, lambda: 160.0, ALL_US, 100) is Advice.NOTHING
    assert check.state is CheckState.TRUSTED


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=50), st.floats(1.0, 1e6))
def test_few_moves_whatever_the_steps_take(lengths: list[float], all_us: float) -> None:
    """In 400 steps states move to the device and back at most once each."""
    check, plan, moves = PlanCheck(), ON_HOST, []
    for step in range(400):
        advice = check.saw(lengths[step % len(lengths)], plan, all_us if plan is ON_HOST else None)
        if advice in (Advice.TRY, Advice.BACK):
            plan = ON_DEVICE if advice is Advice.TRY else ON_HOST
            moves.append(advice)
            check.restart()
    assert moves in ([], [Advice.TRY], [Advice.TRY, Advice.BACK])
