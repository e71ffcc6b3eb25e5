"""Plans and profiles as text, and the check that a plan fits a model."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow, renumbered, validate
from hytrain_fx.ir.profile import Profile
from tests.null.profiles import prefix, profiles, streaming_profiles, subset, uniform, unit

FIGURES = st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False), max_size=3)
ROWS = st.builds(PlanRow, unit=st.integers(0, 9), unit_name=st.text(max_size=8), begin=st.integers(0, 9), end=st.integers(0, 99),
                 placement=st.sampled_from(Placement), reason=st.text(max_size=20), rank=st.integers(0, 3))
PLANS = st.builds(Plan, rows=st.lists(ROWS, max_size=5).map(tuple), k=st.integers(0, 9), source=st.text(max_size=8), inputs=FIGURES,
                  predicted=FIGURES, notes=st.lists(st.text(max_size=8), max_size=3).map(tuple))


@given(plan=PLANS)
def test_plan_round_trip(plan: Plan) -> None:
    """A plan read back from its text equals the plan."""
    assert Plan.from_json(plan.to_json()) == plan


@given(profile=st.one_of(profiles(), streaming_profiles()))
def test_profile_round_trip(profile: Profile) -> None:
    """A profile read back from its text equals the profile."""
    assert Profile.from_json(profile.to_json()) == profile


@given(profile=profiles())
def test_a_profile_saved_with_device_bytes_still_loads(profile: Profile) -> None:
    """Figures that profiles no longer have are left out."""
    raw = json.loads(profile.to_json()) | {"peak_bytes": 3, "free_device_bytes": None}
    assert Profile.from_json(json.dumps(raw)) == profile


@given(profile=profiles())
def test_a_profile_saved_before_streaming_still_loads(profile: Profile) -> None:
    """Without streaming times and parameter sizes a unit cannot be streamed and is never split."""
    raw = json.loads(profile.to_json())
    for of_unit in raw["units"]:
        for name in ("stream_in_us", "stream_out_us", "param_numels"):
            del of_unit[name]
    loaded = Profile.from_json(json.dumps(raw))
    assert loaded == profile
    assert not loaded.can_stream


@pytest.mark.parametrize("text", ["", "3", "[]", "null", "{}", '{"rows": 1}', '{"rows": ["a"], "k": 0, "source": ""}',
                                  '{"rows": [], "k": 0, "source": "", "extra": 1}',
                                  '{"rows": [{"unit": 0, "placement": "disk"}], "k": 0, "source": ""}',
                                  '{"rows": [], "k": "a", "source": ""}', '{"rows": [], "k": -1, "source": ""}',
                                  '{"rows": [], "k": true, "source": ""}', '{"rows": [], "k": 0, "source": "", "inputs": 3}',
                                  '{"rows": [], "k": 0, "source": "", "predicted": []}'])
def test_bad_plan_text_is_refused(text: str) -> None:
    """Text that is no saved plan is a PlanError, whatever is wrong with it."""
    with pytest.raises(PlanError, match="not a saved plan"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"units": [{}], "device": "", "host": ""}', '{"units": 2}'])
def test_bad_profile_text_is_refused(text: str) -> None:
    """Text that is no saved profile is a PlanError."""
    with pytest.raises(PlanError, match="not a saved profile"):
        Profile.from_json(text)


def test_bad_figures_in_a_profile_are_refused() -> None:
    """A negative time, a unit without parameters, or a gap in the numbers names the unit."""
    with pytest.raises(PlanError, match="forward_us=-1"):
        unit(0, forward=-1.0)
    with pytest.raises(PlanError, match="stream_in_us=-1"):
        unit(0, stream=-1.0)
    with pytest.raises(PlanError, match="has 1000 parameters, those of its tensors sum to 900"):
        unit(0, numels=(400, 500))
    with pytest.raises(PlanError, match="0 parameters"):
        unit(0, params=0)
    with pytest.raises(PlanError, match=r"found \[1\]"):
        Profile((unit(1),), "d", "h")


@given(profile=profiles(), data=st.data())
def test_any_tiling_is_valid(profile: Profile, data: st.DataObject) -> None:
    """Any cut of every unit into ranges that follow each other fits, in any order of rows."""
    rows = []
    for u in profile.units:
        cuts = sorted({0, u.params, *data.draw(st.lists(st.integers(0, u.params), max_size=3))})
        rows += [PlanRow(u.index, u.name, begin, end, Placement.CPU, "") for begin, end in pairwise(cuts)]
    validate(Plan(tuple(data.draw(st.permutations(rows))), 0, "test"), profile.units)


@pytest.mark.parametrize(("begin", "end"), [(0, 999), (1, 1000), (0, 1001), (0, 0)])
def test_gap_and_overhang_are_refused(begin: int, end: int) -> None:
    """A unit whose rows leave a gap at either end, reach past it or are empty is an error."""
    with pytest.raises(PlanError, match=r"unit 0 \(layer.0\)"):
        validate(Plan((PlanRow(0, "layer.0", begin, end, Placement.CPU, ""),), 0, "test"), uniform(1).units)


def test_overlap_and_absence_are_refused() -> None:
    """Rows that overlap, a unit without rows, and a row of a unit the model lacks are errors."""
    two = (PlanRow(0, "layer.0", 0, 600, Placement.CPU, ""), PlanRow(0, "layer.0", 500, 1000, Placement.GPU, ""))
    with pytest.raises(PlanError, match=r"500\.\.1000, expected one that starts at 600"):
        validate(Plan(two, 0, "test"), uniform(1).units)
    with pytest.raises(PlanError, match="rows end at 0"):
        validate(Plan((), 0, "test"), uniform(1).units)
    with pytest.raises(PlanError, match="places unit 2"):
        validate(prefix(uniform(3), 1), uniform(2).units)


@given(profile=profiles(), data=st.data())
def test_units_in_another_order_are_found_by_name(profile: Profile, data: st.DataObject) -> None:
    """Each unit keeps its shares, k counts in the new order, and the way back is the plan."""
    plan = prefix(profile, data.draw(st.integers(0, len(profile.units))))
    order = data.draw(st.permutations(profile.units))
    units = [replace(unit, index=index) for index, unit in enumerate(order)]
    found = renumbered(plan, units)
    validate(found, units)
    place = {row.unit_name: (row.begin, row.end, row.placement) for row in plan.rows}
    assert {row.unit_name: (row.begin, row.end, row.placement) for row in found.rows} == place
    assert renumbered(found, profile.units) == plan
    assert renumbered(plan, profile.units) is plan


def test_a_plan_of_other_units_stays_as_it_is() -> None:
    """`validate` is to say what does not fit."""
    plan = prefix(uniform(3), 1)
    assert renumbered(plan, uniform(2).units) is plan
    with pytest.raises(PlanError, match="places unit 2"):
        validate(plan, uniform(2).units)


def test_names_and_k_must_agree() -> None:
    """A plan with other layer names, or with a k that contradicts its rows, is an error."""
    profile = uniform(2)
    plan = prefix(profile, 1)
    with pytest.raises(PlanError, match="made for another model"):
        validate(replace(plan, rows=tuple(replace(row, unit_name="block") for row in plan.rows)), profile.units)
    with pytest.raises(PlanError, match="k=2, but its rows place the first 1"):
        validate(replace(plan, k=2), profile.units)


def test_placements_are_counted() -> None:
    """`numel` sums parameters by placement, `shares` lists a unit's rows by range."""
    plan = subset(uniform(3), {0, 2})
    assert (plan.numel(Placement.GPU), plan.numel(Placement.CPU), plan.numel(Placement.STREAM)) == (2000, 1000, 0)
    assert [row.placement for row in plan.shares(1)] == [Placement.CPU]
