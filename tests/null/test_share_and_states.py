"""Places of states and the CPU's share of a batch, solved together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.cpu_share import LEAST_GAIN, ShareTimes, best_share
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.cost_model.share_and_states import PlanAt, ShareRates, solve_together, times_under
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.planning.watches import FinishedStep
from hytrain_fx.sharing.placing import SharePlacing
from tests.null.profiles import profiles, uniform

US = st.floats(0, 200)
RATES = st.builds(ShareRates, st.integers(1, 12), US, US, st.booleans(), US, US)


def plans_within(profile: Profile, most: int) -> PlanAt:
    """Plans with at most so many units on the device, simulated."""

    def at(k: int) -> Plan:
        if k > most:
            raise PlanError(f"{k} units do not fit")
        return plan(profile, k=k)

    return at


@given(profile=profiles(), rates=RATES, most=st.integers(0, 8), gb_per_s=st.none() | st.floats(0.01, 100))
@settings(deadline=None, max_examples=60)
def test_together_is_never_worse_than_either_alone(profile: Profile, rates: ShareRates, most: int, gb_per_s: float | None) -> None:
    """Not than the plan alone, nor than the share that is solved after it, by the same model.

    Nor, but for a hundredth, than any number of units on the device with its own best share.
    """
    profile = replace(profile, host_memory_gb_per_s=gb_per_s)
    plan_at = plans_within(profile, most)
    alone = plan_at(min(plan(profile).k, most))
    found = solve_together(profile, rates, alone, plan_at)
    after = best_share(times_under(profile, alone, rates))
    assert found.share.step_us <= after.step_us <= after.without_us
    assert found.share.without_us == after.without_us
    for k in range(min(most, len(profile.units)) + 1):
        other = best_share(times_under(profile, plan_at(k), rates))
        assert other.by_cpu == 0 or (1 - LEAST_GAIN) * found.share.step_us <= other.step_us * (1 + 1e-12)
    assert found.share.step_us == best_share(found.times).step_us
    assert found.plan is alone or found.share.by_cpu > 0


@given(profile=profiles(), rates=RATES)
@settings(deadline=None, max_examples=60)
def test_without_a_share_a_step_takes_what_the_plan_predicts(profile: Profile, rates: ShareRates) -> None:
    """The rows of both models are the same: what neither of them has is around them."""
    made = plan(profile)
    times = times_under(profile, made, replace(rates, around_us=0.0))
    assert times.step_us(0) >= made.predicted["step_us"] * (1 - 1e-12)
    assert times.update_us == sum(u.cpu_update_us for u in profile.units[made.k :])


def test_states_move_for_a_share() -> None:
    """Updates that are just hidden keep the cores busy: alone a share pays little.

    On the device the updates take a twentieth of that, and the CPU trains a third of the batch.
    """
    profile = uniform(8, forward=100.0, backward=200.0, cpu=280.0, gpu=4.0, d2h=1.0, h2d=1.0)
    rates = ShareRates(12, cpu_sequence_us=400.0)
    alone = plan(profile)
    found = solve_together(profile, rates, alone, plans_within(profile, 8))
    after = best_share(times_under(profile, alone, rates))
    assert alone.k < found.plan.k
    assert found.share.step_us < 0.9 * after.step_us
    assert found.share.by_cpu > after.by_cpu
    assert found.share.gain > 0.25


class Planned:
    """As much of `Planning` as a share needs. All states are on the host."""

    def __init__(self, profile: Profile | None) -> None:
        self.profile, self.guard, self.discipline, self.held = profile, 1.0, Discipline(), 0
        self.last = FinishedStep(steps_done=7)
        self.plan = plan(uniform(8) if profile is None else profile, k=0)
        self.wanted: list[Plan] = []
        self.solver = SimpleNamespace(solves=True, at=lambda k, profile, guard, discipline: plan(profile, k=k))

    def want(self, made: Plan, why: str) -> None:
        """It is in force from now on."""
        self.plan = replace(made, notes=(*made.notes, why))
        self.wanted.append(self.plan)


TRIED = ShareTimes(12, device_us=2400.0, cpu_sequence_us=400.0, begin_us=2300.0, join_us=10.0, around_us=20.0)


def test_a_session_moves_its_states_and_holds_them() -> None:
    """After the trial, once. Where no share has paid in the end, they go back."""
    planning: Any = Planned(uniform(8, forward=100.0, backward=200.0, cpu=280.0, gpu=4.0, d2h=1.0, h2d=1.0))
    before = planning.plan
    placing = SharePlacing(planning)
    share, around_us = placing.solved(TRIED)
    (wanted,) = planning.wanted
    assert wanted.k > before.k
    assert share.by_cpu > 0
    assert around_us >= 0.0
    assert wanted.notes[-1].startswith("solved with the CPU's share: ")
    placing.hold(True)
    assert planning.held == 8, "the step to come"
    placing.hold(False)
    placing.hold(False)
    assert planning.held == 0
    assert [of.rows for of in planning.wanted[1:]] == [before.rows]


def test_times_that_were_measured_set_the_model() -> None:
    """Of the plan in force the model has them, where they are longer than what it knows of."""
    planning: Any = Planned(uniform(8, forward=100.0, backward=200.0, cpu=2.0, gpu=4.0, d2h=1.0, h2d=1.0))
    found = SharePlacing(planning).together(planning.profile, TRIED)
    assert found.plan is planning.plan, "updates that take nothing are moved"
    assert found.times.begin_us + found.times.update_us == TRIED.begin_us
    assert found.times.join_us == TRIED.join_us
    assert found.plan.numel(Placement.GPU) == 0


def test_without_a_profile_the_share_alone_is_solved() -> None:
    """So it is where the plan was given."""
    planning: Any = Planned(None)
    assert SharePlacing(planning).solved(TRIED) == (best_share(TRIED), TRIED.around_us)
    assert planning.wanted == []
