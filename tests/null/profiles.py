"""Profiles for the tests of the planning half: hypothesis strategies and nets of equal units."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.ir.plan import Placement, Plan, PlanRow, leading_device_units
from hytrain_fx.ir.profile import Profile, UnitProfile


def unit(
    index: int, *, params: int = 1000, forward: float = 10.0, backward: float = 20.0, cpu: float = 30.0, gpu: float = 1.0,
    d2h: float = 1.0, h2d: float = 1.0, stream: float = 0.0, numels: tuple[int, ...] = (),
) -> UnitProfile:
    """One unit; times in microseconds, `stream` each way."""
    return UnitProfile(index, f"layer.{index}", params, 2 * params, forward, backward, cpu, gpu, d2h, h2d, stream, stream, numels)


def profile_of(units: list[UnitProfile]) -> Profile:
    """A profile of these units."""
    return Profile(tuple(units), device="test device", host="test host", versions={"torch": "none"})


def uniform(n: int, **times: float) -> Profile:
    """`n` equal units."""
    return profile_of([unit(i, **times) for i in range(n)])  # type: ignore[arg-type]  # params stays the default


def prefix(profile: Profile, k: int) -> Plan:
    """The first `k` units on the device."""
    return prefix_plan(profile.units, k, source="test", reason=lambda _: "test")


def subset(profile: Profile, on_device: set[int]) -> Plan:
    """Any set of whole units on the device."""
    rows = tuple(PlanRow(u.index, u.name, 0, u.params, Placement.GPU if u.index in on_device else Placement.CPU, "test")
                 for u in profile.units)
    k = next((i for i in range(len(profile.units)) if i not in on_device), len(profile.units))
    return Plan(rows, k, "test")


# Whole numbers: sums of these are exact, so equal things compare equal.
TIMES = st.integers(0, 100).map(float)
WORK = st.integers(1, 100).map(float)


@st.composite
def profiles(draw: st.DrawFn, max_units: int = 8) -> Profile:
    """Any small profile."""
    n = draw(st.integers(1, max_units))
    return profile_of([
        unit(i, params=draw(st.integers(1, 5000)), forward=draw(WORK), backward=draw(WORK), cpu=draw(TIMES), gpu=draw(TIMES),
             d2h=draw(TIMES), h2d=draw(TIMES))
        for i in range(n)
    ])


@st.composite
def streaming_profiles(draw: st.DrawFn, max_units: int = 8) -> Profile:
    """Any small profile with times for streaming and the sizes of each unit's parameters."""
    plain = draw(profiles(max_units))
    units = []
    for u in plain.units:
        cuts = sorted({0, u.params, *draw(st.lists(st.integers(0, u.params), max_size=5))})
        numels = tuple(end - begin for begin, end in pairwise(cuts))
        units.append(replace(u, stream_in_us=draw(WORK), stream_out_us=draw(WORK), param_numels=numels))
    return profile_of(units)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Profile, Plan, Discipline]:
    """Any small profile, any ranges of its units placed anywhere, under any discipline.

    The discipline is one under which that may run.
    """
    profile = replace(draw(streaming_profiles()), commit_us=draw(st.just(0.0) | st.floats(0, 800)),
                      launching_us=draw(st.just(0.0) | st.floats(0, 800)), host_memory_gb_per_s=draw(st.none() | st.floats(1e-3, 10)))
    discipline = draw(st.builds(
        Discipline, barrier=st.sampled_from(["none", "before_forward", "zero_offload"]),
        commit_at=st.sampled_from(["backward_start", "backward_end"]), chunk_params=st.sampled_from([None, 100, 1000]),
        staging_params=st.sampled_from([50, 300, 1000]), staging_slots=st.integers(1, 6), early_updates=st.booleans(),
        early_weights=st.booleans(), runs_ahead=st.booleans()))
    places = [place for place in Placement if discipline.barrier != "zero_offload" or place is not Placement.STREAM]
    rows = []
    for u in profile.units:
        cuts = sorted({0, u.params, *draw(st.lists(st.integers(0, u.params), max_size=3))})
        rows += [PlanRow(u.index, u.name, begin, end, draw(st.sampled_from(places)), "test") for begin, end in pairwise(cuts)]
    plan = Plan(tuple(rows), 0, "test")
    return profile, replace(plan, k=leading_device_units(plan, profile.units)), discipline
