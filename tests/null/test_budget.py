"""What the two memories hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.cost_model.budget import ROUNDED, Budget
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.errors import PlanError
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
    assert wide.staging_bytes(profile, DISCIPLINE) == Budget().staging_bytes(profile, DISCIPLINE)
    assert narrow.staging_bytes(profile, DISCIPLINE) == pytest.approx(8 / 12 * wide.staging_bytes(profile, DISCIPLINE))
    less = Budget(max(budget - int(wide.staging_bytes(profile, DISCIPLINE) - narrow.staging_bytes(profile, DISCIPLINE)), 0), 0, 8, 8)
    if share and budget > wide.staging_bytes(profile, DISCIPLINE):
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
