"""Pieces of a plan: where parameters may be cut.

Also how exactly a bound on resident states is filled.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.pieces import joined, pieces_of
from hytrain_fx.cost_model.planner import plan
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow, validate
from hytrain_fx.ir.profile import Profile, UnitProfile

from .profiles import profile_of, streaming_profiles, unit

GRAINS = st.integers(1, 100)


def with_grain(profile: Profile, grain: int) -> Profile:
    """The same model, whose parameters may be cut."""
    return profile_of([replace(u, grain_params=grain) for u in profile.units])


@given(profile=streaming_profiles())
def test_without_a_grain_parameters_are_whole(profile: Profile) -> None:
    """The pieces of a plan are the parameters, wherever its shares end."""
    for of in profile.units:
        shares = (PlanRow(of.index, of.name, 0, 1, Placement.GPU, ""), PlanRow(of.index, of.name, 1, of.params, Placement.CPU, ""))
        placed = pieces_of(Plan(shares if of.params > 1 else shares[:1], 0, "loaded"), of)
        assert tuple(piece.numel for piece in placed) == of.param_numels


@given(profile=streaming_profiles(), grain=GRAINS, data=st.data())
def test_pieces_give_the_plan_back(profile: Profile, grain: int, data: st.DataObject) -> None:
    """Where parameters may be cut, a unit's joined pieces are its shares, wherever they end."""
    of = with_grain(profile, grain).units[0]
    cuts = sorted({0, of.params, *data.draw(st.lists(st.integers(0, of.params), max_size=3))})
    places = data.draw(st.permutations(list(Placement)))
    shares = [PlanRow(0, of.name, begin, end, places[i % 3], "") for i, (begin, end) in enumerate(pairwise(cuts))]
    assert joined(pieces_of(Plan(tuple(shares), 0, "loaded"), of)) == shares


@given(profile=streaming_profiles(), grain=st.integers(1, 20), budget=st.integers(0, 100_000))
@settings(deadline=None)
def test_a_bound_on_resident_states_is_filled_to_a_chunk(profile: Profile, grain: int, budget: int) -> None:
    """Beside whole units and whole pieces a part of one more rests on the device.

    That is not so if less than a chunk of it fits, or if the whole is not predicted to be faster. A
    cut parameter keeps its whole gradient on the device, and that counts.
    """
    cut = with_grain(profile, grain)
    p = plan(cut, budget_bytes=budget, budget_counts_streamed=False)
    validate(p, cut.units)
    on_device = [row for row in p.rows if row.placement is Placement.GPU and row.unit == p.k]
    kept_bytes = 0.0
    for row in on_device:
        of = cut.units[row.unit]
        for begin, end in pairwise(accumulate(of.param_numels, initial=0)):
            if begin < row.end < end:
                kept_bytes += (end - row.end) * of.grad_bytes / of.params
    assert p.predicted["gpu_states_bytes"] + kept_bytes <= budget + 1e-6


def test_a_quarter_of_one_large_tensor_rests_on_the_device() -> None:
    """Where all of a unit is one tensor, a bound is filled inside it, at a chunk."""
    one = replace(unit(0, params=1000, cpu=1000.0), param_numels=(1000,), grain_params=10)
    p = plan(profile_of([one]), budget_bytes=12 * 250, budget_counts_streamed=False)
    (resident,) = [row for row in p.rows if row.placement is Placement.GPU]
    gradient_bytes = one.grad_bytes / one.params
    expected = (12 * 250 - 1000 * gradient_bytes) / (12 - gradient_bytes)
    assert (resident.begin, resident.end) == (0, int(expected) - int(expected) % 10)


def test_a_negative_grain_is_refused() -> None:
    """The error says which unit has it."""
    with pytest.raises(PlanError, match=r"unit 0 .* grain_params=-1"):
        replace(unit(0), grain_params=-1)


def test_units_keep_their_grain_as_json() -> None:
    """A saved profile says where parameters may be cut; in an older one they are whole."""
    profile = profile_of([replace(unit(0, params=8), param_numels=(8,), grain_params=4)])
    assert Profile.from_json(profile.to_json()) == profile
    assert Profile.from_json(profile.to_json().replace('"grain_params": 4', '"grain_params": 0')).units[0].grain_params == 0
    assert isinstance(profile.units[0], UnitProfile)
