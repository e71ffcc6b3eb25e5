"""A large first parameter is cut between the CPU and streaming, where the simulator gains by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.balance import streamed_share, with_share
from hytrain_fx.cost_model.cuts import cuts_of, level_params
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.pieces import with_more_on_device
from hytrain_fx.cost_model.planner import Stream, plan
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.explain.plan.text import place_of, reason_of
from hytrain_fx.ir.limits import CHUNK_PARAMS, SMALL_PARAMETER_SHARE
from hytrain_fx.ir.plan import Placement, Plan, pieces_of_unit, validate
from hytrain_fx.ir.profile import Profile, UnitProfile
from hytrain_fx.ir.task_graph import Unit

from .profiles import profile_of, unit

H = 1600
BLOCK = (H, H, 3 * H * H, 3 * H, H * H, H, H, H, 4 * H * H, 4 * H, 4 * H * H, H)
EMBEDDING = 50_257 * H
AHEAD = Discipline(runs_ahead=True)
BIG = 256  # elements of the random profiles' grain and slots: pieces are then cut where the plan says


def gpt2_xl(cpu_params_per_s: float, tokens: float = 1.0, grain: int = CHUNK_PARAMS) -> Profile:
    """GPT-2 XL on an H100: forward 66 ms, backward 125 ms, links of 44 GB/s in and 50 GB/s out.

    tokens   so many times as many take forward and backward
    """
    def of(index: int, name: str, numels: tuple[int, ...], forward: float, backward: float) -> UnitProfile:
        """With these shares of forward and backward."""
        params = sum(numels)
        return UnitProfile(index, name, params, 2 * params, tokens * 66e3 * forward, tokens * 125e3 * backward,
                           1e6 * params / cpu_params_per_s, params / 50e3, 2 * params / 50e3, 2 * params / 44e3, 10 * params / 44e3,
                           10 * params / 50e3, numels, grain_params=grain)

    blocks = [of(2 + i, f"h.{i}", BLOCK, 0.947 / 48, 0.937 / 48) for i in range(48)]
    ends = of(0, "wte", (EMBEDDING,), 0.002, 0.03), of(1, "wpe", (1024 * H,), 0.001, 0.003), of(50, "ln_f", (H, H), 0.05, 0.03)
    return replace(profile_of([ends[0], ends[1], *blocks, ends[2]]), launching_us=60e3)


def on_host(profile: Profile, discipline: Discipline = AHEAD, stream: Stream = "auto") -> Plan:
    """The plan with every state on the host."""
    return plan(profile, stream=stream, budget_bytes=0, budget_counts_streamed=False, discipline=discipline)


def whole(profile: Profile) -> Profile:
    """The same with parameters that may not be cut."""
    return replace(profile, units=tuple(replace(u, grain_params=0) for u in profile.units))


def inner_cuts(p: Plan, of: UnitProfile) -> list[int]:
    """Where shares of a unit end inside a parameter."""
    return [row.end for row in p.shares(of.index) if row.end not in set(accumulate(of.param_numels))]


@st.composite
def with_large_first(draw: st.DrawFn) -> Profile:
    """Any profile whose first unit has a parameter that is large beside the others."""
    rates = st.floats(1, 5)
    units = []
    for index in range(draw(st.integers(1, 6))):
        numels = tuple(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4)))
        if index == 0:
            at = draw(st.integers(0, len(numels)))
            numels = (*numels[:at], draw(st.integers(2 * BIG, 20_000)), *numels[at:])
        params = sum(numels)
        cpu, gpu, to_host, to_device, states = (draw(rates) for _ in range(5))
        of = unit(index, params=params, forward=draw(st.floats(10, 5e3)), backward=draw(st.floats(10, 1e4)), cpu=params / cpu,
                  gpu=params / gpu / 20, d2h=params / to_host / 5, h2d=params / to_device / 5, stream=params / states, numels=numels)
        units.append(replace(of, grain_params=BIG))
    return replace(profile_of(units), commit_us=draw(st.just(0.0) | st.floats(0, 1e4)))


@given(profile=with_large_first(), stream=st.just("auto") | st.floats(0, 1))
@settings(max_examples=40)
def test_pieces_of_a_solved_plan_cover_every_parameter_once(profile: Profile, stream: Stream) -> None:
    """Only the first unit's largest parameter is cut, at chunks, and prefixes stream the share.

    To within half of the largest parameter and the small ones, or what the cut is off, which the
    units after it make up for.
    """
    p = on_host(profile, Discipline(chunk_params=BIG, staging_params=BIG), stream)
    validate(p, profile.units)
    assert all(not inner_cuts(p, of) for of in profile.units[1:])
    first = profile.units[0]
    largest = max(first.param_numels)
    begin = sum(first.param_numels[: first.param_numels.index(largest)])
    for cut in inner_cuts(p, first):
        assert begin < cut < begin + largest
        assert (cut - begin) % BIG == 0
    for of in profile.units:
        placed = pieces_of_unit(p, of.index, list(enumerate(of.param_numels)), lambda _: False)
        for number, numel in enumerate(of.param_numels):
            mine = [piece.piece for piece in placed if piece.piece.parameter == number]
            assert (mine[0].begin, mine[-1].end) == (0, numel)
            assert all(a.end == b.begin for a, b in pairwise(mine))
    streamed = [sum(row.numel for row in p.shares(of.index) if row.placement.visits_device) for of in profile.units]
    share = p.inputs["stream_share"]
    if inner_cuts(p, first) and not sum(streamed[1:]) and stream == "auto":
        share = 0.0  # of the first unit alone
    off = [abs(sum(streamed[:n]) - share * sum(of.params for of in profile.units[:n])) for n in range(1, len(streamed) + 1)]
    small = sum(numel for of in profile.units for numel in of.param_numels if numel < SMALL_PARAMETER_SHARE * max(of.param_numels))
    most = max(max(of.param_numels) for of in profile.units) / 2 + small
    if inner_cuts(p, first):
        most = max(off[0], small + max((max(of.param_numels) for of in profile.units[1:]), default=0) / 2)
    assert max(off) <= most + 1


@given(profile=with_large_first(), stream=st.just("auto") | st.floats(0, 1))
@settings(max_examples=40)
def test_a_step_with_the_cut_is_no_longer(profile: Profile, stream: Stream) -> None:
    """The plan that may cut is predicted as fast as the one that may not.

    A cut gains 1%, unless it has nothing else streamed. Played again, it takes what was predicted.
    """
    discipline = Discipline(chunk_params=BIG, staging_params=BIG)
    may, may_not = on_host(profile, discipline, stream), on_host(whole(profile), discipline, stream)
    step_us, whole_us = may.predicted["step_us"], may_not.predicted["step_us"]
    assert step_us <= whole_us
    assert simulate(profile, may, discipline).makespan_us == pytest.approx(step_us)
    if inner_cuts(may, profile.units[0]):
        alone = may.numel(Placement.STREAM) == sum(row.numel for row in may.shares(0) if row.placement.visits_device)
        assert alone or step_us <= 0.99 * whole_us + 1e-6
    elif stream != "auto":
        assert may.rows == may_not.rows


@given(cpu=st.floats(1, 1e5), weights=st.floats(0, 1e4), states=st.floats(1, 1e5))
def test_the_level_share_ends_both_kinds_together(cpu: float, weights: float, states: float) -> None:
    """The CPU's time for the rest is the link's for the states of the streamed part and weights.

    Where weights alone take longer than the CPU, nothing is streamed.
    """
    of = replace(unit(0, params=1_000_000, cpu=cpu, stream=states), h2d_us=weights)
    streamed = level_params(of) / of.params
    if cpu <= weights:
        assert streamed == 0
    else:
        assert (1 - streamed) * cpu == pytest.approx(streamed * states + (1 - streamed) * weights)


@pytest.mark.parametrize(("cpu_params_per_s", "tokens", "step_gain_us", "wait_gain_us"), [
    (4.0e9, 1, 6e3, 7e3), (4.35e9, 1, 5.5e3, 6.5e3), (4.7e9, 1, 4.5e3, 5.5e3), (4.35e9, 2, 8e3, 9e3), (4.35e9, 4, 8e3, 9e3)])
def test_gpt2_xl_waits_less_for_its_embedding(cpu_params_per_s: float, tokens: float, step_gain_us: float, wait_gain_us: float) -> None:
    """Its tied embedding is cut, and step and first wait become shorter by milliseconds.

    With twice as many tokens nothing else of it is streamed.
    """
    profile = gpt2_xl(cpu_params_per_s, tokens)
    before, after = on_host(whole(profile)), on_host(profile)
    assert not inner_cuts(before, profile.units[0])
    assert inner_cuts(after, profile.units[0])[0] % CHUNK_PARAMS == 0
    assert all(not inner_cuts(after, of) for of in profile.units[1:])
    was, now = (simulate(profile, p, AHEAD) for p in (before, after))
    assert was.makespan_us - now.makespan_us > step_gain_us
    assert was.stalls_us[0] - now.stalls_us[0] > wait_gain_us
    assert (tokens > 1) == (after.numel(Placement.STREAM) < EMBEDDING)
    assert before.numel(Placement.STREAM) == 0 or tokens == 1


def test_what_is_cut_says_so() -> None:
    """The streamed range comes first; both parts have one reason, with both times."""
    p = on_host(gpt2_xl(4.0e9))
    assert [row.placement for row in p.shares(0)] == [Placement.STREAM, Placement.CPU]
    assert place_of(p, 0) == "42% streamed + 58% CPU"
    assert reason_of(p, 0) == ("cut: the device updates 42% of it, whose states come in 7.63 ms, beside the CPU, which takes 11.7 ms for "
                               "the rest; its gradient comes last and its weight is needed first")


def test_what_stays_whole() -> None:
    """Nothing is cut that may not be, or for nothing.

    Weights that rest on the host, shares of 0 and 1, a first unit on the device, middle-sized
    matrices.
    """
    profile = gpt2_xl(4.35e9)
    first, *others = profile.units
    assert cuts_of(profile, 0.4)
    for changed in (replace(first, fetched_params=1), replace(first, gathered_params=1), replace(first, stream_in_us=0.0),
                    replace(first, grain_params=0), replace(first, param_numels=BLOCK, params=sum(BLOCK))):
        assert cuts_of(replace(profile, units=(changed, *others)), 0.4) == ()
    of_given = (on_host(profile, AHEAD, 0.0), on_host(profile, AHEAD, 1.0), plan(profile, k=1, stream=0.4))
    assert not any(inner_cuts(p, of) for p in of_given for of in profile.units)


def test_memory_for_the_cut_is_asked_for() -> None:
    """The whole gradient stays on the device, and states are copied on the host: else no cut."""
    profile = gpt2_xl(4.35e9, tokens=4)
    staging_bytes, host_bytes = 12 * 6 * CHUNK_PARAMS, 14 * profile.params

    def cuts(device_bytes: int, host_bytes: int) -> list[int]:
        p = plan(profile, stream="auto", budget_bytes=device_bytes, host_budget_bytes=host_bytes, discipline=AHEAD,
                 state_bytes_per_param=1e6)
        return inner_cuts(p, profile.units[0])

    assert cuts(staging_bytes + 2 * EMBEDDING, host_bytes + 12 * EMBEDDING)
    assert not cuts(staging_bytes + 2 * EMBEDDING, host_bytes + 12 * EMBEDDING - 1)
    assert not cuts(staging_bytes + 2 * EMBEDDING - 1, host_bytes + 12 * EMBEDDING)


XL = gpt2_xl(4.7e9)
CUT = on_host(XL)


@given(share=st.floats(0.05, 0.95))
def test_another_share_keeps_the_cut(share: float) -> None:
    """Moved by the ends of running steps, the share of all is what was asked for, the cut stays.

    Where all are to be streamed, or none, the cut goes. What is on the device stays there.
    """
    units = [Unit(u.index, u.name, u.params, tuple(map(str, range(len(u.param_numels)))), u.grad_bytes, param_numels=u.param_numels,
                  grain_params=u.grain_params) for u in XL.units]
    moved = with_share(CUT, units, share, "test")
    validate(moved, XL.units)
    assert inner_cuts(moved, XL.units[0]) == inner_cuts(CUT, XL.units[0])
    assert streamed_share(moved) == pytest.approx(share, abs=0.01)
    for end in (0.0, 1.0):
        assert len(with_share(CUT, units, end, "test").shares(0)) == 1
    filled = with_more_on_device(CUT, XL.units[0], 2 * EMBEDDING + 20 * CHUNK_PARAMS, 12, "filled")
    for end in (0.0, share, 1.0):
        resident, *others = with_share(filled, units, end, "test").shares(0)
        assert (resident.placement, resident.end) == (Placement.GPU, 2 * CHUNK_PARAMS)
        assert len(others) == (2 if 0 < end < 1 else 1)
