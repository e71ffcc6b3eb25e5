"""Streamed shares: how they play, how much is streamed, and of which parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.planner import Rule, Stream, plan, prefix_plan, streamed_k
from hytrain_fx.cost_model.rules import STREAMED, compare
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.cost_model.streaming import best_share, ranges_of
from hytrain_fx.cost_model.windows import windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.explain.plan.text import headline, place_of
from hytrain_fx.forecast.device import analytic_profile
from hytrain_fx.forecast.named_devices import find_device
from hytrain_fx.forecast.shapes import read_shape
from hytrain_fx.ir.plan import Placement, Plan, PlanRow, validate
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Interval, Schedule
from hytrain_fx.ir.task_graph import Resource, TaskId, TaskKind
from tests.null.profiles import profile_of, profiles, streaming_profiles, uniform, unit

SHARES = st.floats(0, 1)
RULES: tuple[Rule, ...] = ("seed", "windowed")
STREAMS: tuple[Stream, ...] = (0.0, "auto")
DISCIPLINES = st.builds(
    Discipline, barrier=st.sampled_from(["none", "before_forward"]),
    commit_at=st.sampled_from(["backward_start", "backward_end"]), chunk_params=st.sampled_from([None, 100, 1000]),
    staging_params=st.sampled_from([100, 1000]), staging_slots=st.integers(1, 6))


def stream_plan(profile: Profile, k: int, share: float) -> Plan:
    """The first `k` units on the device, of the others `share` streamed."""
    return prefix_plan(profile.units, k, source="test", reason=lambda _: "test", share=share)


def pieces(schedule: Schedule, unit: int, *kinds: TaskKind) -> list[Interval]:
    return [piece for kind in kinds for piece in schedule.of(TaskId(kind, unit))]


def work_us(profile: Profile, plan: Plan, *parts: tuple[str, Placement]) -> float:
    """What these times of the shares placed there sum to."""
    return sum(row.numel / profile.units[row.unit].params * float(getattr(profile.units[row.unit], name))
               for name, place in parts for row in plan.rows if row.placement == place)


@given(profile=streaming_profiles(), discipline=DISCIPLINES, share=SHARES, data=st.data())
@settings(deadline=None)
def test_every_streamed_schedule_keeps_the_rules(profile: Profile, discipline: Discipline, share: float, data: st.DataObject) -> None:
    """All work is done once, and the step is work plus stalls.

    A streamed unit is updated after its gradient and before its forward. Only copies of states back
    to the host may run on beyond the step.
    """
    p = stream_plan(profile, data.draw(st.integers(0, len(profile.units))), share)
    s = simulate(profile, p, discipline)
    update_us = work_us(profile, p, ("gpu_update_us", Placement.GPU), ("gpu_update_us", Placement.STREAM))
    assert s.busy_us(Resource.GPU) == pytest.approx(profile.forward_us + profile.backward_us + update_us)
    assert s.busy_us(Resource.CPU) == pytest.approx(work_us(profile, p, ("cpu_update_us", Placement.CPU)))
    assert s.busy_us(Resource.H2D) == pytest.approx(work_us(profile, p, ("h2d_us", Placement.CPU), ("stream_in_us", Placement.STREAM)))
    out_us = work_us(profile, p, ("d2h_us", Placement.CPU), ("stream_out_us", Placement.STREAM))
    assert work_us(profile, p, ("d2h_us", Placement.CPU)) - 1e-6 <= s.busy_us(Resource.D2H) <= out_us + 1e-6
    assert s.makespan_us == pytest.approx(s.busy_us(Resource.GPU) + s.stall_us)
    for u in profile.units:
        backward, forward = pieces(s, u.index, TaskKind.BACKWARD), pieces(s, u.index, TaskKind.FORWARD)
        for update in pieces(s, u.index, TaskKind.GPU_UPDATE):
            assert backward[-1].end_us - 1e-9 <= update.start_us
            assert update.end_us <= forward[0].start_us + 1e-9
        if discipline.commit_at == "backward_end":
            last_us = pieces(s, 0, TaskKind.BACKWARD)[-1].end_us
            assert all(load.start_us >= last_us - 1e-9 for load in pieces(s, u.index, TaskKind.STREAM_IN))


def test_a_slot_is_taken_until_the_states_are_back() -> None:
    """With one slot, chunks of 2 us follow: in, update, out.

    The first is fetched ahead, and ten are updated 4.2 us apart.
    """
    profile = uniform(1, backward=10.0, forward=10.0, gpu=2.0, stream=20.0)
    p = stream_plan(profile, 0, 1.0)
    one = simulate(profile, p, Discipline(staging_params=100, staging_slots=1))
    assert one.makespan_us == pytest.approx(10.2 + 9 * 4.2 + 10)
    many = simulate(profile, p, Discipline(staging_params=100, staging_slots=6))
    assert many.makespan_us < 0.7 * one.makespan_us


def test_states_are_fetched_ahead_highest_unit_first_and_then_lowest_gradient_first() -> None:
    """Before a gradient is there, the last unit's states come in.

    With all gradients there, the first unit goes first.
    """
    profile = profile_of([unit(i, backward=20.0, stream=30.0, gpu=1.0) for i in range(3)])
    discipline = Discipline(staging_params=500, staging_slots=2)
    ahead = simulate(profile, stream_plan(profile, 0, 1.0), discipline)
    loads = sorted((i.start_us, i.task.unit) for i in ahead.on(Resource.H2D))
    assert loads[0][1] == 2
    late = simulate(profile, stream_plan(profile, 0, 1.0), replace(discipline, commit_at="backward_end"))
    loads = sorted((i.start_us, i.task.unit) for i in late.on(Resource.H2D))
    assert [unit for _, unit in loads] == [0, 1, 2]


@given(n=st.integers(2, 8), cpu=st.floats(10, 150), stream=st.floats(10, 150), share=SHARES, forward=st.floats(1, 20),
       backward=st.floats(1, 40), data=st.data())
@settings(deadline=None, max_examples=60)
def test_windows_bound_the_streamed_step(
    n: int, cpu: float, stream: float, share: float, forward: float, backward: float, data: st.DataObject
) -> None:
    """The simulated step is not shorter than capacities allow.

    T >= t_f + t_b + max(A, C of the CPU - windows).
    """
    numels = (10,) * 100
    profile = profile_of([unit(i, cpu=cpu, stream=stream, forward=forward, backward=backward, gpu=0.5, numels=numels) for i in range(n)])
    p = stream_plan(profile, data.draw(st.integers(0, n - 1)), share)
    discipline = Discipline(chunk_params=10, staging_params=10, staging_slots=100)
    windows = windows_of(profile, guard=1.0, chunk_params=1, updates_in_backward=True).streaming(share)
    cpu_only = replace(windows, costs_us={"cpu": windows.costs_us["cpu"]})
    slack = 0.02 * (cpu + stream) + forward / 100 + backward / 100
    assert simulate(profile, p, discipline).makespan_us >= profile.forward_us + profile.backward_us + cpu_only.exposed_us(p.k) - slack


@given(profile=streaming_profiles(), k=st.integers(0, 7))
@settings(deadline=None)
def test_no_other_share_exposes_less(profile: Profile, k: int) -> None:
    """The chosen share is within 1.2% of the step of the best of a grid.

    It is 0 only where no share shortens the step by 1%.
    """
    k = min(k, len(profile.units))
    compute_us = profile.forward_us + profile.backward_us
    windows = windows_of(profile, guard=1.0, chunk_params=100, updates_in_backward=True)
    share = best_share(windows, k, compute_us)
    assert 0 <= share <= 1
    steps = [compute_us + windows.streaming(i / 100).exposed_us(k) for i in range(101)]
    chosen = compute_us + windows.streaming(share).exposed_us(k)
    assert chosen <= min(steps) + 0.012 * steps[0]
    assert share == 0 or chosen < steps[0]


@given(profile=streaming_profiles(), share=SHARES)
def test_every_prefix_streams_near_the_share(profile: Profile, share: float) -> None:
    """After each unit the streamed parameters are near the share.

    They are within half of the largest parameter, with small parameters left out.
    """
    wanted, streamed, small, largest = 0.0, 0, 0, 0
    for of_unit, ranges in zip(profile.units, ranges_of(profile.units, share), strict=True):
        biggest = max(of_unit.param_numels)
        largest = max(largest, biggest)
        small += sum(numel for numel in of_unit.param_numels if numel < biggest / 1024)
        wanted += share * of_unit.params
        streamed += sum(end - begin for begin, end, place in ranges if place is Placement.STREAM)
        assert abs(streamed - wanted) <= largest / 2 + small + 1e-6


@given(profile=streaming_profiles(), share=SHARES, k=st.integers(0, 7))
def test_ranges_are_whole_parameters(profile: Profile, share: float, k: int) -> None:
    """Every boundary is one between parameters, neighbours differ in placement, the plan fits.

    A share of 0 streams nothing.
    """
    p = stream_plan(profile, min(k, len(profile.units)), share)
    validate(p, profile.units)
    for u in profile.units:
        shares = p.shares(u.index)
        assert {row.end for row in shares} <= set(accumulate(u.param_numels))
        assert all(a.placement != b.placement for a, b in pairwise(shares))
    assert share > 0 or not p.numel(Placement.STREAM)


def test_all_but_small_parameters_are_streamed_with_a_share_of_one() -> None:
    """A norm of 10 elements beside a matrix of 20 000 stays on the CPU."""
    profile = profile_of([unit(0, params=20_020, numels=(10, 20_000, 10))])
    assert [(row.numel, row.placement) for row in stream_plan(profile, 0, 1.0).rows] == [
        (10, Placement.CPU), (20_000, Placement.STREAM), (10, Placement.CPU)]


@given(profile=streaming_profiles(), budget=st.one_of(st.none(), st.integers(0, 200_000)), rule=st.sampled_from(RULES))
@settings(deadline=None)
def test_streaming_is_never_predicted_to_lose(profile: Profile, budget: int | None, rule: Rule) -> None:
    """A solved share shortens the simulated step by 1%, or is 0.

    Resident states, streamed gradients and staging slots fit the budget.
    """
    discipline = Discipline(chunk_params=100, staging_params=100)
    without, solved = (plan(profile, rule=rule, budget_bytes=budget, stream=stream, discipline=discipline) for stream in STREAMS)
    validate(solved, profile.units)
    share = solved.inputs["stream_share"]
    if not share:
        assert solved.rows == without.rows
        return
    assert rule == "windowed"
    assert solved.predicted["step_us"] <= 0.99 * without.predicted["step_us"]
    assert any("without streaming the step would take" in note for note in solved.notes)
    if budget is not None:
        rest = sum(u.grad_bytes for u in profile.units[solved.k :])
        largest = max(max(u.param_numels) for u in profile.units)
        assert 12 * solved.numel(Placement.GPU) + share * rest + 12 * 6 * min(100, largest) <= budget + 1e-6


@given(profile=streaming_profiles(), share=SHARES, k=st.integers(0, 7))
@settings(deadline=None)
def test_bytes_of_a_given_share(profile: Profile, share: float, k: int) -> None:
    """The host has 14 bytes a parameter that the CPU updates, and 12 for a streamed one.

    Of the 12, 10 cross the link each way.
    """
    p = plan(profile, k=min(k, len(profile.units)), stream=share)
    by_cpu, streamed = p.numel(Placement.CPU), p.numel(Placement.STREAM)
    assert p.predicted["host_bytes"] == pytest.approx(14 * by_cpu + 12 * streamed)
    assert p.predicted["stream_bytes"] == pytest.approx(10 * streamed)
    assert p.inputs["stream_share"] == share
    assert {row.reason for row in p.rows if row.placement == Placement.STREAM} <= {
        "streamed: the share of streamed parameters was given"}


@pytest.mark.parametrize(("tokens", "without", "with_streams"), [(4096, 3.90, 2.44), (8192, 1.96, 1.24), (16384, 1.02, 1.02)])
def test_the_measured_machine_gains_what_the_theory_says(tokens: int, without: float, with_streams: float) -> None:
    """With 7 G parameters and a quarter of the states on an H200, steps are the study's.

    Without streaming, step over compute time is within 4% of the study of the LP. With streaming it
    is at most the study's: host DRAM, its narrowest resource, is no resource here, and a streamed
    16-bit parameter takes 10 bytes each way, not 12.
    """
    shape = read_shape("llama-7b")
    studied = replace(find_device("h200"), cpu_update_params_per_s=4.1e9, host_memory_gb_per_s=None)
    profile = replace(analytic_profile(shape, studied, tokens), commit_us=0.0)
    compute_us = profile.forward_us + profile.backward_us
    plain, streamed = (plan(profile, budget_bytes=3 * shape.params, budget_counts_streamed=False, stream=s) for s in STREAMS)
    assert plain.predicted["step_us"] / compute_us == pytest.approx(without, rel=0.04)
    assert 0.85 * with_streams <= streamed.predicted["step_us"] / compute_us <= 1.02 * with_streams
    if tokens < 16384:
        reasons = Counter(row.reason.split(":")[0] for row in streamed.rows)
        assert set(reasons) == {"on the device", "on the CPU", "streamed"}
        assert all("% streamed" in row.reason for row in streamed.rows if row.placement == Placement.STREAM)


@pytest.mark.parametrize("tokens", [4096, 8192, 12288])
def test_no_share_that_is_given_is_predicted_much_shorter(tokens: int) -> None:
    """Where host memory is shared, the solved share is within 1% of the best of a fine grid."""
    profile = analytic_profile(read_shape("llama-3.1b"), find_device("h200"), tokens)
    assert profile.host_memory_gb_per_s is not None

    def step_us(stream: Stream) -> float:
        return plan(profile, budget_bytes=0, budget_counts_streamed=False, stream=stream).predicted["step_us"]

    assert step_us("auto") <= 1.01 * min(step_us(percent / 100) for percent in range(10, 60, 2))


def test_where_only_streaming_fits_the_host_states_are_streamed() -> None:
    """What is streamed has no slot there: 12 bytes a parameter, not 14.

    A share that fits is taken, the fastest of those tried, and the plan says why. Where not even
    that fits, the error is that of the plan without streaming.
    """
    profile = profile_of([unit(i, cpu=10.0, stream=60.0, numels=(100,) * 10) for i in range(6)])
    def made(stream: Stream, host_bytes: int) -> Plan:
        return plan(profile, stream=stream, budget_bytes=3_000, budget_counts_streamed=False, host_budget_bytes=host_bytes)

    assert made("auto", 6 * 14_000).numel(Placement.STREAM) == 0
    streamed = made("auto", 6 * 12_600)
    assert streamed.k == 0
    assert 0.7 * 6000 <= streamed.numel(Placement.STREAM) < 6000
    assert "the host's memory holds the states only with a share streamed" in streamed.notes
    too_much: tuple[tuple[Stream, int], ...] = ((0.0, 6 * 12_600), ("auto", 6 * 11_900))
    for stream, host_bytes in too_much:
        with pytest.raises(PlanError, match="no plan fits the memory"):
            made(stream, host_bytes)


def test_compare_shows_both_where_states_can_be_streamed() -> None:
    """The plan with streaming stands beside the one without.

    Profiles without streaming times have no such entry.
    """
    slow = profile_of([unit(i, cpu=200.0, stream=60.0, numels=(100,) * 10) for i in range(6)])
    plans = compare(slow, 24_000)
    assert list(plans) == ["seed", "cotrain", "windowed", STREAMED, "k=0", "k=n"]
    assert plans[STREAMED].predicted["step_us"] < plans["windowed"].predicted["step_us"]
    assert not any(plans[rule].numel(Placement.STREAM) for rule in ("seed", "cotrain", "windowed", "k=0", "k=n"))


@given(profile=profiles(), share=st.floats(0.001, 1))
def test_streaming_without_its_times_is_refused(profile: Profile, share: float) -> None:
    """A given share needs times for streaming; without them a solved share is 0.

    Shares outside 0..1 are errors.
    """
    with pytest.raises(PlanError, match="no times for streaming"):
        plan(profile, stream=share)
    assert plan(profile, stream="auto").inputs["stream_share"] == 0
    with pytest.raises(PlanError, match=r"stream=1\.5"):
        plan(profile, stream=1.5)


def test_what_cannot_be_streamed_is_refused() -> None:
    """A share under the plain offload's barrier, and gradients that do not fit, are errors.

    So are units without sizes.
    """
    profile = uniform(1, stream=5.0)
    streamed = Plan((PlanRow(0, "layer.0", 0, 1000, Placement.STREAM, ""),), 0, "test")
    with pytest.raises(PlanError, match="nothing is streamed under the barrier"):
        simulate(profile, streamed, Discipline(barrier="zero_offload"))
    with pytest.raises(PlanError, match="do not hold the gradients and the staging slots"):
        plan(profile, k=0, stream=1.0, budget_bytes=10)


def test_a_page_tells_the_streamed_share() -> None:
    """The headline has the share of what is not resident.

    A unit has the sizes of its parts, each once.
    """
    units = [unit(i, params=1000, stream=1.0, numels=(100, 300, 100, 500)) for i in range(3)]
    p = stream_plan(profile_of(units), 1, 0.4)
    assert "k = 1 of 3 units (the first k are updated on the device), 40% of the rest is streamed" in headline(p)
    assert [place_of(p, i) for i in range(3)] == ["device", "60% CPU + 40% streamed", "60% CPU + 40% streamed"]


def with_slow_cpu(profile: Profile) -> Profile:
    """So that streaming pays more often than not."""
    return profile_of([replace(u, cpu_update_us=20 * u.cpu_update_us) for u in profile.units])


@given(profile=streaming_profiles().map(with_slow_cpu), budget=st.integers(0, 60_000), host=st.integers(200_000, 10**6),
       guard=st.floats(1, 1.5))
@settings(deadline=None)
def test_whether_another_k_is_due_needs_no_simulation(profile: Profile, budget: int, host: int, guard: float) -> None:
    """Wherever the solved plan streams, its k is the one that the windows alone give.

    Where they give no share, it does not stream. States that fit no memory without streaming are
    left out: there the windows are not asked.
    """
    within = {"budget_bytes": budget, "host_budget_bytes": host, "state_bytes_per_param": 12.0, "host_state_bytes_per_param": 12.0,
              "budget_counts_streamed": False, "guard": guard, "discipline": Discipline(commit_at="backward_start")}
    try:
        plan(profile, stream=0.0, **within)  # type: ignore[arg-type]
    except PlanError:
        return
    solved = plan(profile, stream="auto", **within)  # type: ignore[arg-type]
    k = streamed_k(profile, **within)  # type: ignore[arg-type]
    if solved.inputs["stream_share"] > 0:
        assert k == solved.k
    if k is None:
        assert solved.inputs["stream_share"] == 0


@given(n=st.integers(2, 8), backward=st.floats(5, 40), slots=st.integers(3, 16), late=st.floats(0, 0.5))
@settings(deadline=None)
def test_states_come_while_the_factor_is_on_its_way(n: int, backward: float, slots: int, late: float) -> None:
    """As many as have slots, from the call of step() on; their updates wait for the factor.

    So a step takes no longer, and with a slot for each unit all have come by then.
    """
    equal = uniform(n, forward=5.0, backward=backward, gpu=1.0, stream=2.0)
    profile = replace(equal, commit_us=late * n * backward)
    rows = tuple(PlanRow(u.index, u.name, 0, u.params, Placement.STREAM, "test") for u in profile.units)
    plan, step = Plan(rows, 0, "test"), Discipline(commit_at="backward_end", staging_params=1000, staging_slots=slots)
    early, behind = (simulate(profile, plan, replace(step, early_weights=of)) for of in (True, False))
    end_us = n * backward
    loads, updates = ([i.start_us for i in early.intervals if i.task.kind is kind] for kind in (TaskKind.STREAM_IN, TaskKind.GPU_UPDATE))
    assert min(loads) < end_us <= min(i.start_us for i in behind.intervals if i.task.kind is TaskKind.STREAM_IN) + 1e-6
    assert min(loads) >= profile.commit_us - 1e-6
    assert min(updates) >= end_us - 1e-6
    assert early.makespan_us <= behind.makespan_us + 1e-6
    if slots >= n and (1 - late) * end_us >= 2.0 * (n + 1) + backward:
        assert max(loads) < end_us
