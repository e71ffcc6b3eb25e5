"""What the two memories hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.budget import ROUNDED, Budget, UnitBytes
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import plan, prefix_plan
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from tests.null.profiles import profile_of, profiles, streaming_profiles, uniform, unit

DISCIPLINE = Discipline(staging_params=100, staging_slots=2)


def device_bytes(profile: Profile, k: int, share: float) -> float:
    """Bytes on the device of k resident units, with a share of the others streamed.

    States of the first k units, gradients of the streamed share, and two slots of 100 parameters
    (or of the largest).
    """
    streamed = share * sum(u.grad_bytes for u in profile.units[k:])
    largest = max(max(u.param_numels) for u in profile.units)
    return 12 * sum(u.params for u in profile.units[:k]) + streamed + (2 * 12 * min(100, largest) if share else 0)


@given(profile=streaming_profiles(), budget=st.integers(0, 200_000), share=st.floats(0, 1))
def test_the_most_units_are_the_longest_prefix_that_fits(profile: Profile, budget: int, share: float) -> None:
    """The most units fit beside what is streamed, and one more does not.

    -1 comes only where not even k = 0 fits.
    """
    k = Budget(budget).most_units(profile, share, DISCIPLINE)
    if k >= 0:
        assert device_bytes(profile, k, share) <= budget + 1e-6
    if k < len(profile.units):
        assert device_bytes(profile, k + 1, share) > budget - 1e-6
    assert Budget().most_units(profile, share, DISCIPLINE) == len(profile.units)
    assert share > 0 or k >= 0


@given(profile=streaming_profiles(), budget=st.integers(0, 200_000), share=st.floats(0, 1))
def test_a_bound_on_resident_states_leaves_streamed_ones_out(profile: Profile, budget: int, share: float) -> None:
    """Where the budget does not count streamed states, as many units fit as without streaming."""
    bound = Budget(budget, counts_streamed=False)
    assert bound.most_units(profile, share, DISCIPLINE) == Budget(budget).most_units(profile, 0.0, DISCIPLINE)


@given(profile=profiles(), budget=st.integers(0, 200_000), share=st.floats(0, 1))
def test_the_least_units_leave_what_the_host_holds(profile: Profile, budget: int, share: float) -> None:
    """The units after the first `least` fit the host, and one more does not.

    Each takes 12 bytes of states, and a slot for what is not streamed.
    """
    least = Budget(host_bytes=budget).least_units(profile, share)
    on_host = [12 * u.params + (1 - share) * u.grad_bytes for u in profile.units]
    assert sum(on_host[least:]) <= budget + 1e-6
    assert least == 0 or sum(on_host[least - 1 :]) > budget - 1e-6
    assert Budget().least_units(profile, share) == 0


@given(profile=streaming_profiles(), budget=st.integers(0, 200_000), share=st.floats(0, 1))
def test_staging_slots_may_be_wider_than_the_states(profile: Profile, budget: int, share: float) -> None:
    """Slots of 12 bytes a parameter hold states of 8, and take from the device what they are."""
    wide, narrow = Budget(budget, 0, 8, 8, staged_bytes=12), Budget(budget, 0, 8, 8)
    assert wide.staging_bytes(profile.units, DISCIPLINE) == Budget().staging_bytes(profile.units, DISCIPLINE)
    assert narrow.staging_bytes(profile.units, DISCIPLINE) == pytest.approx(8 / 12 * wide.staging_bytes(profile.units, DISCIPLINE))
    slots = wide.staging_bytes(profile.units, DISCIPLINE)
    less = Budget(max(budget - int(slots - narrow.staging_bytes(profile.units, DISCIPLINE)), 0), 0, 8, 8)
    if share and budget > slots:
        assert wide.most_units(profile, share, DISCIPLINE) == less.most_units(profile, share, DISCIPLINE)


def test_negative_memory_is_refused() -> None:
    """Negative bytes of either tier are errors that name both."""
    for budget in ({"device_bytes": -1}, {"host_bytes": -1}, {"device_state_bytes": -1}, {"host_state_bytes": -1},
                   {"staged_bytes": -1}):
        with pytest.raises(PlanError, match="expected all >= 0"):
            Budget(**budget)  # type: ignore[arg-type]  # a float where an int or None would do
    assert Budget(100).most_units(uniform(2), 1.0, DISCIPLINE) == -1


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(0, 10**6))
def test_all_states_fit_as_many_bytes(sizes: list[int], fraction: int) -> None:
    """Bytes of a parameter are a mean, whose multiples round."""
    profile = profile_of([unit(i, params=params) for i, params in enumerate(sizes)])
    each = 12 + 4 * fraction / sum(sizes)
    whole = 12 * sum(sizes) + 4 * fraction  # without rounding
    assert Budget(whole, device_state_bytes=each).most_units(profile, 0.0, DISCIPLINE) == len(sizes)
    assert int(each * sum(sizes) * ROUNDED) >= whole


UNITS = st.lists(st.builds(UnitBytes, st.integers(20, 5_000), st.integers(0, 20), st.integers(1, 5_000), st.integers(0, 500)),
                 min_size=8, max_size=8)


@given(profile=streaming_profiles(), sizes=UNITS, budget=st.integers(0, 20_000), host=st.integers(0, 20_000), share=st.floats(0, 1))
def test_units_count_with_their_own_bytes(profile: Profile, sizes: list[UnitBytes], budget: int, host: int, share: float) -> None:
    """The most and the least units are as their own bytes say, wider gradients and slots too."""
    of, n = Budget(budget, host, of_units=tuple(sizes), staged_bytes=0), len(profile.units)
    k = of.most_units(profile, share, DISCIPLINE)

    def there(k: int) -> float:
        return sum(unit.device for unit in sizes[:k]) + share * sum(unit.gradients for unit in sizes[k:n])

    assert k < 0 or there(k) <= budget + 1e-6
    assert k == n or there(k + 1) > budget - 1e-6
    least = of.least_units(profile, share)
    left = [unit.host + (1 - share) * unit.slots for unit in sizes[:n]]
    assert sum(left[least:]) <= host + 1e-6
    assert least == 0 or sum(left[least - 1 :]) > host - 1e-6


@given(profile=streaming_profiles(), sizes=UNITS, k=st.integers(0, 8), share=st.floats(0, 1), counts=st.booleans())
def test_what_a_plan_needs_is_what_its_rows_do(profile: Profile, sizes: list[UnitBytes], k: int, share: float, counts: bool) -> None:
    """Of both memories. Whole units need what `most_units` and `least_units` compare."""
    of, k = Budget(of_units=tuple(sizes), staged_bytes=1, counts_streamed=counts), min(k, len(profile.units))
    made = prefix_plan(profile.units, k, source="test", reason=lambda _: "", share=share)
    parts = [(row.placement, row.numel / profile.units[row.unit].params, sizes[row.unit]) for row in made.rows]
    device = sum(part * (unit.device if place is Placement.GPU else unit.gradients if counts else 0)
                 for place, part, unit in parts if place is not Placement.CPU)
    staging = of.staging_bytes(profile.units, DISCIPLINE) if counts and made.numel(Placement.STREAM) else 0
    assert of.device_needs(profile.units, made, DISCIPLINE) == pytest.approx(device + staging)
    host = sum(part * (unit.host + (unit.slots if place is Placement.CPU else 0))
               for place, part, unit in parts if place is not Placement.GPU)
    assert of.host_needs(profile.units, made) == pytest.approx(host)


def test_plans_and_predictions_follow_each_units_bytes() -> None:
    """Of four equal units two have twice the states: under half of all the first one alone fits.

    By the mean two would. The host holds the other three, which need more than three means.
    """
    profile, sizes = uniform(4), [UnitBytes(2000, 100, 2000, 100), UnitBytes(1000, 100, 1000, 100)] * 2
    made = plan(profile, unit_bytes=sizes, budget_bytes=2_999, host_budget_bytes=4_300, k=4)
    assert made.k == 1
    assert made.predicted["gpu_states_bytes"] == 2000
    assert made.predicted["host_bytes"] == 4_300
    with pytest.raises(PlanError, match="no plan fits"):
        plan(profile, unit_bytes=sizes, budget_bytes=2_999, host_budget_bytes=4_299, k=4)


def test_a_rest_is_filled_with_a_part_only_where_the_host_holds_its_copy() -> None:
    """States of a parameter that is cut are on the host twice for a moment, slots of its unit too.

    Else a move to that plan is refused, and the whole units' plan is not in force either.
    """
    units = [unit(number, numels=(1000,), cpu=1000.0, forward=1.0, backward=1.0) for number in range(3)]
    profile = profile_of([replace(of, grain_params=100) for of in units])
    sizes = [UnitBytes(14_000, 2_000, 12_000, 2_000)] * 3

    def made(host_bytes: int) -> Plan:
        return plan(profile, unit_bytes=sizes, budget_bytes=22_000, host_budget_bytes=host_bytes, budget_counts_streamed=False)

    whole, cut = made(28_000), made(100_000)
    assert whole.k == cut.k == 1
    assert whole.numel(Placement.GPU) == 1000
    on_host = 2000 - cut.numel(Placement.GPU) % 1000 - 1000  # of the parameter that is cut
    assert 0 < on_host < 1000
    enough = 28_000 + 14 * on_host
    assert made(enough).rows == cut.rows
    assert made(enough - 1).rows == whole.rows
