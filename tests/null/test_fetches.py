"""Fetches of weights that rest on the host, played: hand-computed steps, and rules for any."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.budget import Budget
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.fetch_depth import SLOWER, fetch_depth
from hytrain_fx.cost_model.fetches import exposed_fetch_us, fetches, weight_slots_bytes
from hytrain_fx.cost_model.host_memory import cpu_bytes
from hytrain_fx.cost_model.planner import plan as solve
from hytrain_fx.cost_model.planner import predict
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.cost_model.step_graph import step_graph
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.schedule import Schedule
from hytrain_fx.ir.task_graph import FETCHES, TaskId, TaskKind
from tests.null.profiles import prefix, profile_of, profiles, steps, uniform, unit

BACKWARD, FORWARD = TaskKind.FETCH_BACKWARD, TaskKind.FETCH_FORWARD
AHEAD = st.integers(0, 9)


def streamed(profile: Profile, fetch_us: float = 6.0, share: float = 1.0) -> Profile:
    """The profile with that share of every unit's weights on the host."""
    return replace(profile, units=tuple(replace(u, fetched_params=int(share * u.params), fetch_us=fetch_us) for u in profile.units))


def without_updates(n: int, fetch_us: float, forward: float = 10.0, backward: float = 20.0) -> Profile:
    """Equal units whose updates take no time."""
    return streamed(uniform(n, forward=forward, backward=backward, cpu=0.0, d2h=0.0, h2d=0.0), fetch_us)


def played(profile: Profile, ahead: int, plan: Plan | None = None) -> Schedule:
    return simulate(profile, plan or prefix(profile, 0), Discipline(units_ahead=ahead))


def begins(schedule: Schedule, kind: TaskKind, units: int) -> list[float | None]:
    """When each unit's task of the kind begins; None where it has none."""
    found = [schedule.of(TaskId(kind, unit)) for unit in range(units)]
    return [of[0].start_us if of else None for of in found]


def test_a_step_with_one_unit_ahead() -> None:
    """Four units of 20 us backward and 10 us forward, fetches of 6 us, two slots.

    backward   3: 0..20   2: 20..40   1: 40..60   0: 60..80      3 and 2 are there since the forward
    fetches             1: 20..26  0: 40..46                     each when the slot's unit is done
    forward    0: 86..96  1: 96..106  2: 106..116  3: 116..126   unit 0 waits for its fetch
    fetches    0: 80..86  1: 86..92  2: 96..102  3: 106..112
    """
    s = played(without_updates(4, 6.0), 1)
    assert begins(s, BACKWARD, 4) == [40.0, 20.0, None, None]
    assert begins(s, FORWARD, 4) == [80.0, 86.0, 96.0, 106.0]
    assert begins(s, TaskKind.FORWARD, 4) == [86.0, 96.0, 106.0, 116.0]
    assert (s.makespan_us, exposed_fetch_us(s), s.stall_us) == (126.0, 6.0, 6.0)


def test_copies_that_are_longer_than_computing() -> None:
    """Three units, fetches of 30 us, two slots: the lane of the fetches sets the pace.

    backward   2: 0..20   1: 20..40   0: 50..70                  0 fetched 20..50
    fetches    0: 70..100   1: 100..130   2: 130..160            2 in unit 0's slot, free at 110
    forward    0: 100..110   1: 130..140   2: 160..170
    """
    s = played(without_updates(3, 30.0), 1)
    assert begins(s, BACKWARD, 3) == [20.0, None, None]
    assert begins(s, TaskKind.FORWARD, 3) == [100.0, 130.0, 160.0]
    assert exposed_fetch_us(s) == s.stall_us == 10.0 + 30.0 + 20.0 + 20.0


def test_a_fetch_waits_for_its_update_and_no_new_weight_is_sent() -> None:
    """One unit: backward 0..20, gradient 20..23, update 23..53, fetch 53..59, forward 59..69."""
    profile = streamed(uniform(1, forward=10.0, backward=20.0, cpu=30.0, d2h=3.0, h2d=5.0))
    s = simulate(profile, prefix(profile, 0), Discipline(chunk_params=None))
    assert begins(s, FORWARD, 1) == [53.0]
    assert s.makespan_us == 69.0
    assert TaskId(TaskKind.H2D, 0) not in step_graph(profile, prefix(profile, 0), Discipline()).dag
    assert (s.stall_us, exposed_fetch_us(s)) == (39.0, 6.0)  # 33 of gradient and update


def test_what_is_not_fetched_is_sent_after_its_update() -> None:
    """Of a unit whose vectors stay on the device only these travel then."""
    profile = streamed(uniform(2, h2d=8.0), share=0.75)
    graph = step_graph(profile, prefix(profile, 0), Discipline())
    assert graph.dag.nodes[TaskId(TaskKind.H2D, 1)]["us"] == 2.0
    assert graph.total("bytes", FORWARD) == graph.total("bytes", TaskKind.H2D) * 3 == 2 * 1500


def test_units_on_the_device_fetch_nothing() -> None:
    """Their weights are there; of a unit that is half there half is fetched."""
    profile = streamed(uniform(3))
    half = prefix(profile, 1)
    rows = [row for row in half.rows if row.unit != 1]
    rows += [replace(half.rows[1], end=500), replace(half.rows[1], begin=500, placement=Placement.STREAM)]
    profile = replace(profile, units=tuple(replace(u, stream_in_us=1.0, stream_out_us=1.0) for u in profile.units))
    graph = step_graph(profile, replace(half, rows=tuple(rows)), Discipline(units_ahead=0))
    us = {str(task): graph.dag.nodes[task]["us"] for task in graph.dag if task.kind in FETCHES}
    assert us == {"fetch_forward(1)": 3.0, "fetch_forward(2)": 6.0}  # of two sizes: both stay through the turn


def test_slots_by_size() -> None:
    """Two sizes, one unit ahead: the two small units have a slot each, four large ones two.

    So what small units had in the forward is there in the backward.
    """
    nbytes = {0: 10, 1: 100, 2: 100, 3: 100, 4: 100, 5: 10}
    found = fetches(nbytes, 1)
    assert [str(of.task) for of in found] == [
        "fetch_backward(2)", "fetch_backward(1)", *(f"fetch_forward({unit})" for unit in range(6))]
    assert weight_slots_bytes(nbytes, 1) == 2 * 10 + 2 * 100
    assert [str(of.after) for of in found[:2]] == ["backward(4)", "backward(3)"]


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=9), ahead=AHEAD)
def test_fetches_keep_the_rules(sizes: list[int], ahead: int) -> None:
    """Every forward fetches every unit once, in order; a slot is taken when its reader is before.

    Of the units of one size the last ones of the forward, as many as there are slots, are fetched
    by no backward.
    """
    found = fetches(dict(enumerate(sizes)), ahead)
    assert [of.task.unit for of in found if of.task.kind is FORWARD] == list(range(len(sizes)))
    forward = [TaskId(TaskKind.FORWARD, unit) for unit in range(len(sizes))]
    order = [*(TaskId(TaskKind.BACKWARD, of.unit) for of in reversed(forward)), *forward]
    for of in found:
        assert of.after is None or order.index(of.after) < order.index(of.before)
        assert of.after is None or sizes[of.after.unit] == sizes[of.task.unit]
    again = [of.task.unit for of in found if of.task.kind is BACKWARD]
    for size, count in Counter(sizes).items():
        units = [unit for unit, of in enumerate(sizes) if of == size]
        assert not set(again) & set(units[-(ahead + 1):])
        assert count > ahead + 1 or not set(again) & set(units)


@given(profile=profiles(), fetch=st.integers(1, 60).map(float), data=st.data())
@settings(deadline=None)
def test_none_ahead_exposes_all(profile: Profile, fetch: float, data: st.DataObject) -> None:
    """With one slot of a size nothing is copied while the unit that has it computes.

    Unless units have different sizes.
    """
    n = data.draw(st.integers(1, 8))
    profile = without_updates(n, fetch)
    s = played(profile, 0)
    count = (n - 1) + n  # the last unit stays through the turn
    assert exposed_fetch_us(s) == pytest.approx(count * fetch)
    assert s.makespan_us == pytest.approx(profile.compute_us + count * fetch)


@given(n=st.integers(1, 8), fetch=st.floats(0.5, 80), forward=st.floats(1, 40), ahead=AHEAD, more=st.floats(1, 8))
@settings(deadline=None)
def test_more_tokens_never_expose_more(n: int, fetch: float, forward: float, ahead: int, more: float) -> None:
    """Fetches take as long, and there is more to hide them behind."""
    profile = without_updates(n, fetch, forward, 2 * forward)
    before, after = (exposed_fetch_us(played(of, ahead)) for of in (profile, profile.with_tokens(more)))
    assert after <= before + 1e-6


@given(n=st.integers(1, 8), fetch=st.floats(0.5, 80), forward=st.floats(1, 40), ahead=AHEAD)
@settings(deadline=None)
def test_more_units_ahead_never_expose_more(n: int, fetch: float, forward: float, ahead: int) -> None:
    """And when the device stands still without updates, a fetch runs: that is all of the wait."""
    profile = without_updates(n, fetch, forward, 2 * forward)
    fewer, more = (played(profile, of) for of in (ahead, ahead + 1))
    assert exposed_fetch_us(more) <= exposed_fetch_us(fewer) + 1e-6
    assert exposed_fetch_us(fewer) == pytest.approx(fewer.stall_us)


@given(of=steps(), ahead=AHEAD)
@settings(deadline=None)
def test_without_streamed_weights_nothing_changes(of: tuple[Profile, Plan, Discipline], ahead: int) -> None:
    """Every prediction has the same bits, however many units would be ahead."""
    profile, plan, discipline = of
    found = predict(profile, plan, discipline=replace(discipline, units_ahead=ahead))
    assert found == predict(profile, plan, discipline=discipline)
    assert not any("fetch" in name or "weight" in name for name in found)


@given(of=steps(), ahead=AHEAD, fetch=st.floats(0.5, 50), share=st.floats(0.1, 1))
@settings(deadline=None)
def test_every_schedule_with_fetches_keeps_the_rules(
    of: tuple[Profile, Plan, Discipline], ahead: int, fetch: float, share: float
) -> None:
    """A weight is there before what reads it, and comes after its update. Fetches never overlap."""
    profile, plan, discipline = of
    profile = streamed(profile, fetch, share)
    s = simulate(profile, plan, replace(discipline, units_ahead=ahead))
    for u in profile.units:
        for kind, reader in ((BACKWARD, TaskKind.BACKWARD), (FORWARD, TaskKind.FORWARD)):
            ends = [i.end_us for i in s.of(TaskId(kind, u.index))]
            assert all(end <= s.of(TaskId(reader, u.index))[0].start_us + 1e-6 for end in ends)
        updates = s.of(TaskId(TaskKind.CPU_UPDATE, u.index))
        assert all(update.end_us <= i.start_us + 1e-6 for i in s.of(TaskId(FORWARD, u.index)) for update in updates)
    assert exposed_fetch_us(s) <= s.stall_us + 1e-6


def test_fetches_share_the_memory_of_the_host() -> None:
    """32 bytes a parameter and step instead of 30, and updates become slower beside fetches."""
    u = unit(0, params=1000)
    assert (cpu_bytes(u), cpu_bytes(replace(u, fetched_params=1000))) == (30_000, 32_000)
    fast = streamed(uniform(6, cpu=8.0, forward=10.0, backward=10.0), 8.0)
    slow = replace(fast, host_memory_gb_per_s=2.0)  # 26 kB of an update in 8 us alone want 3.25
    tight, free = predict(slow, prefix(slow, 0)), predict(fast, prefix(fast, 0))
    assert tight["fetch_us"] > free["fetch_us"]
    graph = step_graph(slow, prefix(slow, 0), Discipline(units_ahead=0))
    assert graph.host_bytes == 6 * 30_000 - 6 * 2000 + 2000 * (6 + 5)  # one backward finds its weights


def test_the_depth_is_the_least_that_hides() -> None:
    """Copies of two thirds of a forward need one unit ahead, of one and a half no depth hides all.

    A limit of memory takes the best that fits.
    """
    short = without_updates(8, 6.0)
    depth = fetch_depth(short, prefix(short, 0), Discipline())
    assert depth is not None
    assert (depth.ahead, depth.slots_bytes, depth.capped) == (1, 4000, False)
    assert depth.exposed_us == exposed_fetch_us(played(short, 1)) == 6.0
    # the backward has time for more than its own fetches: slots keep what the forward has read last
    uneven = without_updates(8, 15.0, forward=10.0, backward=60.0)
    free = fetch_depth(uneven, prefix(uneven, 0), Discipline())
    tight = fetch_depth(uneven, prefix(uneven, 0), Discipline(), 2000)
    assert free is not None
    assert tight is not None
    assert (tight.ahead, tight.capped) == (0, True)
    assert "do not fit" in str(tight)
    assert free.ahead >= 1
    assert free.exposed_us < tight.exposed_us
    assert "1%" in str(free)
    assert fetch_depth(uniform(3), prefix(uniform(3), 0), Discipline()) is None
    assert fetch_depth(short, prefix(short, 8), Discipline()) is None  # all on the device


@given(n=st.integers(1, 8), fetch=st.floats(0.5, 80), forward=st.floats(1, 40), limit=st.none() | st.integers(0, 20_000))
@settings(deadline=None)
def test_the_depth_is_within_a_hundredth_of_the_best_that_fits(n: int, fetch: float, forward: float, limit: int | None) -> None:
    """And no smaller one is."""
    profile = without_updates(n, fetch, forward, 2 * forward)
    depth = fetch_depth(profile, prefix(profile, 0), Discipline(), limit)
    assert depth is not None
    slower = streamed(profile, SLOWER * fetch)
    exposed = {ahead: exposed_fetch_us(played(slower, ahead)) for ahead in range(n)}
    fit = [ahead for ahead in exposed if limit is None or not ahead or 2000 * min(n, ahead + 1) <= limit]
    best = min(exposed[ahead] for ahead in fit)
    assert exposed[depth.ahead] <= max(1.01 * best, best + 0.001 * played(slower, depth.ahead).makespan_us) + 1e-6
    assert all(exposed[ahead] > 1.01 * best - 1e-6 for ahead in fit if ahead < depth.ahead)


def test_weights_that_come_back_count_where_the_device_is_filled() -> None:
    """Of what the device has free a unit takes its states and its weights; a bound is on states."""
    profile = streamed(uniform(4))
    free, bound = Budget(device_bytes=32_000, device_state_bytes=14.0), Budget(device_bytes=32_000, device_state_bytes=14.0,
                                                                              counts_streamed=False)
    assert free.most_units(profile, 0.0, Discipline()) == 2  # 16 bytes a parameter
    assert bound.most_units(profile, 0.0, Discipline()) == 2
    assert Budget(device_bytes=28_000, device_state_bytes=14.0).most_units(profile, 0.0, Discipline()) == 1
    assert replace(bound, device_bytes=28_000).most_units(profile, 0.0, Discipline()) == 2


def test_plans_move_states_where_that_spares_fetches() -> None:
    """A step whose CPU updates are not hidden takes units to the device; their fetches are gone."""
    profile = streamed(uniform(8, forward=10.0, backward=20.0, cpu=60.0, gpu=1.0))
    made = solve(profile)
    assert made.k > 0
    assert made.predicted["fetch_us"] < predict(profile, prefix(profile, 0))["fetch_us"]


def test_a_share_of_fetched_weights_is_checked() -> None:
    """More than there are parameters is refused."""
    with pytest.raises(PlanError, match="fetched_params"):
        profile_of([replace(unit(0), fetched_params=1001)])
