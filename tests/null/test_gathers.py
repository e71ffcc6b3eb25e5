"""Gathers of weights in shards, played: a step by hand, the runtime's order, and rules for any."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.budget import Budget
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.fetch_depth import SLOWER, fetch_depth
from hytrain_fx.cost_model.fetches import exposed_fetch_us
from hytrain_fx.cost_model.gathers import collective_order, gathers
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.planner import predict
from hytrain_fx.cost_model.simulate import simulate, slowed
from hytrain_fx.cost_model.step_graph import step_graph
from hytrain_fx.cost_model.windows import early_us, windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.task_graph import ARRIVALS, GATHERS, Resource, TaskId, TaskKind
from hytrain_fx.weights.gather_order import GatherOrder
from tests.null.profiles import prefix, profile_of, steps, uniform, unit

BACKWARD, FORWARD, REDUCE = TaskKind.GATHER_BACKWARD, TaskKind.GATHER_FORWARD, TaskKind.REDUCE_SCATTER
AHEAD = st.integers(0, 9)
Step = tuple[Profile, Plan, Discipline]


def sharded(profile: Profile, gather_us: float, fetch_us: float = 0.0, ranks: int = 1, reduce_us: float = 0.0) -> Profile:
    """The profile as of one of two ranks with weights in shards.

    They rest on the host where a fetch takes time.

    ranks   of one host: with more than one gradients are reduce-scattered
    """
    units = (replace(u, gathered_params=2 * u.params, gather_us=gather_us, reduce_scatter_us=reduce_us,
                     fetched_params=u.params if fetch_us else 0, fetch_us=fetch_us) for u in profile.units)
    return replace(profile, units=tuple(units), node_ranks=ranks)


def without_updates(n: int, gather_us: float, forward: float = 10.0, backward: float = 20.0) -> Profile:
    """Equal units whose updates take no time."""
    return sharded(uniform(n, forward=forward, backward=backward, cpu=0.0, d2h=0.0, h2d=0.0), gather_us)


def played(profile: Profile, ahead: int) -> Schedule:
    return simulate(profile, prefix(profile, 0), Discipline(units_ahead=ahead))


def begins(schedule: Schedule, kind: TaskKind, units: int) -> list[float]:
    return [schedule.of(TaskId(kind, unit))[0].start_us for unit in range(units)]


def test_a_step_with_one_unit_ahead() -> None:
    """Four units of 20 us backward and 10 us forward, gathers of 6 us, reduce-scatters of 2.

    backward      3: 6..26    2: 26..46   1: 46..66   0: 66..86
    collectives   g3 0  g2 6  r3 26  g1 28  r2 46  g0 48  r1 66  r0 86
    forward       0: 94..104  1: 104..114   2: 114..124   3: 124..134
    collectives   g0 88  g1 94  g2 104  g3 114                          each when a slot is free
    """
    plain = uniform(4, forward=10.0, backward=20.0, cpu=0.0, d2h=0.0, h2d=0.0)
    profile = sharded(plain, 6.0, ranks=2, reduce_us=2.0)
    s = played(profile, 1)
    assert begins(s, BACKWARD, 4) == [48.0, 28.0, 6.0, 0.0]
    assert begins(s, REDUCE, 4) == [86.0, 66.0, 46.0, 26.0]
    assert begins(s, FORWARD, 4) == [88.0, 94.0, 104.0, 114.0]
    assert begins(s, TaskKind.FORWARD, 4) == [94.0, 104.0, 114.0, 124.0]
    assert (s.makespan_us, exposed_fetch_us(s)) == (134.0, 12.0)  # of 14 that the device stands still 2 are a reduce-scatter
    assert not s.of(TaskId(TaskKind.ALL_GATHER, 0))


def test_a_forward_waits_for_updates_of_units_that_come_ahead() -> None:
    """The thread that launches waits for them. So with more ahead a step may take longer."""
    profile = sharded(uniform(4, forward=10.0, backward=10.0, cpu=30.0, d2h=0.0, h2d=0.0), 0.0)
    none, two = (played(profile, ahead) for ahead in (0, 2))
    update_ends = [none.of(TaskId(TaskKind.CPU_UPDATE, u))[-1].end_us for u in range(4)]
    assert begins(two, TaskKind.FORWARD, 4)[0] >= update_ends[2] > begins(none, TaskKind.FORWARD, 4)[0]
    assert two.makespan_us > none.makespan_us
    depth = fetch_depth(profile, prefix(profile, 0), Discipline())
    assert depth is not None
    assert depth.ahead == 0
    assert "for weights and updates" in str(depth)


@given(units=st.lists(st.booleans(), min_size=1, max_size=9), ahead=AHEAD)
def test_collectives_have_the_order_of_the_runtime(units: list[bool], ahead: int) -> None:
    """That of `GatherOrder`, told of a backward whose units make gradients last to first.

    Units without weights in shards are gathered after their updates, as before.
    """
    plain = sharded(uniform(len(units)), 1.0, ranks=2)
    profile = replace(plain, units=tuple(u if has else replace(u, gathered_params=0) for u, has in zip(plain.units, units, strict=True)))
    last = len(units) - 1
    read = [u for u in reversed(range(len(units))) if units[u]]
    order, expected = GatherOrder(read, [last - u for u in read], ahead), []
    for u in reversed(range(len(units))):
        if units[u]:
            expected += [(BACKWARD, of) for of in order.needed(u)]
        expected += [(BACKWARD, of) for of in order.before_turn()]
        expected.append((REDUCE, u))
    expected += [(TaskKind.ALL_GATHER, u) for u, has in enumerate(units) if not has]
    expected += [(FORWARD, u) for u, has in enumerate(units) if has]
    assert list(collective_order(profile, gathers(profile, ahead), ahead)) == expected


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=8), gather=st.integers(1, 60).map(float))
@settings(deadline=None)
def test_none_ahead_exposes_all(sizes: list[int], gather: float) -> None:
    """Each pass gathers each unit, and none while the unit before it computes.

    Not even into a slot of another size, which is free: the gather comes to its lane with its unit.
    """
    plain = without_updates(len(sizes), gather)
    profile = replace(plain, units=tuple(replace(u, gathered_params=size * u.gathered_params)
                                         for u, size in zip(plain.units, sizes, strict=True)))
    s = played(profile, 0)
    assert exposed_fetch_us(s) == pytest.approx(2 * len(sizes) * gather)
    assert s.makespan_us == pytest.approx(profile.compute_us + 2 * len(sizes) * gather)


@given(n=st.integers(1, 8), gather=st.floats(0.5, 80), forward=st.floats(1, 40), ahead=AHEAD, more=st.floats(1, 8))
@settings(deadline=None)
def test_more_tokens_or_units_ahead_never_expose_more(n: int, gather: float, forward: float, ahead: int, more: float) -> None:
    """Gathers take as long. Without updates they are all that the device stands still for."""
    profile = without_updates(n, gather, forward, 2 * forward)
    base, tokens, units = played(profile, ahead), played(profile.with_tokens(more), ahead), played(profile, ahead + 1)
    assert exposed_fetch_us(tokens) <= exposed_fetch_us(base) + 1e-6
    assert exposed_fetch_us(units) <= exposed_fetch_us(base) + 1e-6
    assert exposed_fetch_us(base) == pytest.approx(base.stall_us)


@given(of=steps(), ahead=AHEAD, gather=st.floats(0.5, 50), fetch=st.just(0.0) | st.floats(0.5, 50), ranks=st.integers(1, 3),
       reduce=st.floats(0, 20))
@settings(deadline=None)
def test_every_schedule_with_gathers_keeps_the_rules(of: Step, ahead: int, gather: float, fetch: float, ranks: int, reduce: float) -> None:
    """A weight is there before what reads it, and is gathered after its update and its own fetch.

    Collectives never overlap, and each has its place in their order.
    """
    profile, plan, discipline = of
    profile = sharded(profile, gather, fetch, ranks, reduce)
    s = simulate(profile, plan, discipline := replace(discipline, units_ahead=ahead))
    slack_us = 1e-6 + 1e-9 * s.makespan_us
    for u in profile.units:
        for kind, source, reader in ((BACKWARD, TaskKind.FETCH_BACKWARD, TaskKind.BACKWARD),
                                     (FORWARD, TaskKind.FETCH_FORWARD, TaskKind.FORWARD)):
            (found,) = s.of(TaskId(kind, u.index))
            assert found.end_us <= s.of(TaskId(reader, u.index))[0].start_us + slack_us
            assert all(copy.end_us <= found.start_us + slack_us for copy in s.of(TaskId(source, u.index)))
        (found,) = s.of(TaskId(FORWARD, u.index))
        for made in (TaskKind.CPU_UPDATE, TaskKind.GPU_UPDATE, TaskKind.H2D):
            assert all(update.end_us <= found.start_us + slack_us for update in s.of(TaskId(made, u.index)))
    lane = s.on(Resource.COLLECTIVES)
    assert all(before.end_us <= after.start_us + slack_us for before, after in pairwise(lane))
    order = list(collective_order(profile, gathers(profile, ahead), ahead))
    there = {i.task for i in lane}
    assert [i.task for i in lane] == [task for task in order if task in there]  # those that take no time are not shown
    assert exposed_fetch_us(s) <= s.stall_us + slack_us


@given(of=steps(), ahead=AHEAD)
@settings(deadline=None)
def test_shards_that_come_at_once_leave_their_updates_to_wait_for(of: Step, ahead: int) -> None:
    """With free gathers nothing waits for weights; a step is no shorter than with whole weights."""
    profile, plan, discipline = of
    free = simulate(sharded(profile, 0.0), plan, replace(discipline, units_ahead=ahead))
    assert exposed_fetch_us(free) == 0.0
    assert free.makespan_us >= profile.compute_us - 1e-6


def test_shards_on_the_host_cost_their_fetch() -> None:
    """This rank's part of each gather crosses the link and is read of the host's memory."""
    plain = uniform(4, cpu=8.0)
    device, host = sharded(plain, 5.0), sharded(plain, 5.0, fetch_us=3.0)
    graph = step_graph(host, prefix(host, 0), Discipline())
    assert graph.total("bytes", *GATHERS) == 4 * 2 * 4000
    assert graph.total("bytes", TaskKind.FETCH_FORWARD, TaskKind.FETCH_BACKWARD) == 4 * 2 * 2000
    assert graph.total("us", TaskKind.FETCH_FORWARD) == 12.0
    assert TaskId(TaskKind.H2D, 0) not in graph.dag
    found = {of: predict(profile, prefix(profile, 0)) for of, profile in (("device", device), ("host", host))}
    assert found["host"]["step_us"] > found["device"]["step_us"]
    assert (found["device"]["fetch_us"], found["host"]["fetch_us"], found["device"]["gather_us"]) == (0.0, 24.0, 40.0)
    assert found["device"]["weight_slots_bytes"] == found["host"]["weight_slots_bytes"] == 3 * 4000
    resident = step_graph(host, prefix(host, 4), Discipline())  # their shards came to the device with their states
    assert resident.total("bytes", *ARRIVALS) == resident.total("bytes", *GATHERS) > 0


def test_shards_come_to_the_device_with_their_states() -> None:
    """What the device has free takes both; a gather is what it was."""
    host = sharded(uniform(4), 5.0, fetch_us=3.0)
    budget = Budget(device_bytes=32_000, device_state_bytes=14.0)
    assert budget.most_units(host, 0.0, Discipline()) == 2  # 16 bytes a parameter of this rank's
    assert budget.most_units(sharded(uniform(4), 5.0), 0.0, Discipline()) == 2  # 14, and room for a third is short


@given(n=st.integers(1, 6), gather=st.floats(0.5, 60), cpu=st.floats(0, 60), limit=st.none() | st.integers(0, 40_000))
@settings(deadline=None)
def test_the_depth_is_within_a_hundredth_of_the_best_that_fits(n: int, gather: float, cpu: float, limit: int | None) -> None:
    """Of all that the device stands still for; and no smaller one is."""
    profile = sharded(uniform(n, forward=10.0, backward=20.0, cpu=cpu), gather)
    depth = fetch_depth(profile, prefix(profile, 0), Discipline(), limit)
    assert depth is not None
    slower = sharded(profile, SLOWER * gather)
    schedules = {ahead: played(slower, ahead) for ahead in range(n)}
    fit = [ahead for ahead in schedules if limit is None or not ahead or 4000 * min(n, ahead + 1) <= limit]
    best_us = min(schedules[ahead].stall_us for ahead in fit)
    assert schedules[depth.ahead].stall_us <= max(1.01 * best_us, best_us + 0.001 * max(s.makespan_us for s in schedules.values())) + 1e-6
    assert all(schedules[ahead].stall_us > best_us for ahead in fit if ahead < depth.ahead)


def test_windows_end_where_a_unit_is_gathered_ahead() -> None:
    """Two forwards of 10 us earlier. The first gather holds the forward up by its own time."""
    profile, plain = without_updates(5, 4.0), uniform(5, cpu=0.0, d2h=0.0, h2d=0.0)
    assert early_us([10.0] * 5, profile.units, 2) == (0.0, 10.0, 20.0, 20.0, 20.0)
    assert early_us([10.0] * 5, plain.units, 2) == (0.0,) * 5
    made, whole = (windows_of(of, guard=1.0, chunk_params=None, updates_in_backward=True, units_ahead=2) for of in (profile, plain))
    shorter = [w - g for w, g in zip(whole.windows_us["cpu"], made.windows_us["cpu"], strict=True)]
    assert shorter == [0.0, 10.0, 20.0, 20.0, 20.0]


def test_plans_move_states_where_updates_are_late_for_gathers() -> None:
    """The plan that is solved is within a tenth of the best of all k."""
    profile = sharded(uniform(8, forward=10.0, backward=20.0, cpu=60.0, gpu=1.0), 3.0)
    made = solve(profile)
    best_us = min(predict(profile, prefix(profile, k))["step_us"] for k in range(9))
    assert 0 < made.k < 8
    assert made.predicted["step_us"] <= 1.1 * best_us
    assert made.inputs["t_gather_us"] == 24.0


def test_a_slow_ranks_gathers_take_as_long() -> None:
    """What goes from rank to rank is nobody's own work. A profile is the same when it is read."""
    profile = replace(sharded(uniform(3), 5.0, fetch_us=3.0, ranks=2), skew=1.5)
    assert [(u.gather_us, u.fetch_us) for u in slowed(profile).units] == [(5.0, 4.5)] * 3
    assert Profile.from_json(profile.to_json()) == profile
    with pytest.raises(PlanError, match="gathered_params=-1"):
        profile_of([replace(unit(0), gathered_params=-1)])
