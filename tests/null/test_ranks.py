"""Several ranks in the cost model and in the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.compiled_graph import compiled
from hytrain_fx.cost_model.discipline import Discipline
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.planner import plan, prefix_plan
from hytrain_fx.cost_model.play import play, play_together
from hytrain_fx.cost_model.simulate import simulate, steady_step
from hytrain_fx.cost_model.step_graph import step_graph
from hytrain_fx.cost_model.windows import lost_us, windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Resource, TaskId, TaskKind
from tests.null.profiles import WORK, prefix, profile_of, profiles, steps, subset, uniform, unit

Step = tuple[Profile, Plan, Discipline]
REDUCE, GATHER = TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER
UPDATES = (TaskKind.D2H, TaskKind.CPU_UPDATE, TaskKind.H2D, TaskKind.GPU_UPDATE)
FINE = 50  # chunks of a unit of 1000 parameters


def with_collectives(profile: Profile, reduce_us: float, gather_us: float, ranks: int = 2) -> Profile:
    """The profile as one rank's."""
    units = tuple(replace(u, reduce_scatter_us=reduce_us, all_gather_us=gather_us) for u in profile.units)
    return replace(profile, units=units, node_ranks=ranks)


@given(profile=profiles(), data=st.data())
@settings(deadline=None)
def test_collectives_that_take_no_time_cost_nothing(profile: Profile, data: st.DataObject) -> None:
    """The step is that of one rank, which has no collectives in its graph.

    A lane may take another chunk first at one instant, so a few chunks lie between them.
    """
    made = subset(profile, data.draw(st.sets(st.sampled_from(range(len(profile.units))))))
    alone, together = (steady_step(replace(profile, node_ranks=ranks), made, Discipline(chunk_params=50)) for ranks in (1, 2))
    assert not {task.kind for task in alone.graph.dag} & {REDUCE, GATHER}
    assert {task.kind for task in together.graph.dag} >= {REDUCE, GATHER}
    chunk_us = max(cut.us for task, cuts in alone.graph.dag.nodes(data="cuts") if task.kind in UPDATES for cut in cuts)
    assert abs(together.schedule.makespan_us - alone.schedule.makespan_us) <= 4 * chunk_us + 1e-6


@given(step=steps(), reduce_us=WORK, gather_us=WORK)
@settings(deadline=None)
def test_collectives_run_one_by_one_in_one_order(step: Step, reduce_us: float, gather_us: float) -> None:
    """Each reduce-scatter comes after its backward, each all-gather before its forward.

    Gradients leave and are used after their reduce-scatter; new weights are there before their
    gather. No two collectives run at once.
    """
    profile, plan, discipline = step
    found = simulate(with_collectives(profile, reduce_us, gather_us), plan, discipline)
    n = len(profile.units)
    lane = found.on(Resource.COLLECTIVES)
    assert [i.task for i in lane] == [*(TaskId(REDUCE, u) for u in reversed(range(n))), *(TaskId(GATHER, u) for u in range(n))]
    slack_us = 1e-9 * found.makespan_us
    assert all(before.end_us <= after.start_us + slack_us for before, after in pairwise(lane))
    for u in range(n):
        (reduce,), (gather,) = found.of(TaskId(REDUCE, u)), found.of(TaskId(GATHER, u))
        assert reduce.start_us >= max(i.end_us for i in found.of(TaskId(TaskKind.BACKWARD, u))) - slack_us
        assert gather.end_us <= min(i.start_us for i in found.of(TaskId(TaskKind.FORWARD, u))) + slack_us
        used = [i for kind in (TaskKind.D2H, TaskKind.GPU_UPDATE) for i in found.of(TaskId(kind, u))]
        made = [i for kind in (TaskKind.H2D, TaskKind.GPU_UPDATE) for i in found.of(TaskId(kind, u))]
        assert all(i.start_us >= reduce.end_us - slack_us for i in used)
        assert all(i.end_us <= gather.start_us + slack_us for i in made)


@given(step=steps(), ranks=st.integers(1, 4))
@settings(deadline=None)
def test_equal_ranks_are_one_with_an_equal_part_of_the_host(step: Step, ranks: int) -> None:
    """Ranks played together on one host's memory run as one with its part of it."""
    profile, plan, discipline = step
    profile = with_collectives(profile, 3.0, 2.0, ranks)
    arrays, part = compiled(step_graph(profile, plan, discipline)), bytes_per_us(profile)
    alone = play(arrays, part)
    for run in play_together([(arrays, 1)] * ranks, None if part is None else ranks * part):
        assert run.end_us == pytest.approx(alone.end_us, rel=1e-6)


@given(step=steps(), skew=st.floats(1.01, 3), ranks=st.integers(2, 4))
@settings(deadline=None)
def test_collectives_wait_for_the_slowest_rank(step: Step, skew: float, ranks: int) -> None:
    """All ranks run each collective at the same time, after the slowest one's work for it.

    So the step is no shorter than what the slowest rank computes.
    """
    profile, plan, discipline = step
    profile = replace(with_collectives(profile, 3.0, 2.0, ranks), skew=skew)
    played = steady_step(profile, plan, replace(discipline, runs_ahead=False))
    assert played.others is not None
    slow, other = played.schedule.on(Resource.COLLECTIVES), played.others.on(Resource.COLLECTIVES)
    assert [(i.task, i.start_us, i.end_us) for i in slow] == [(i.task, i.start_us, i.end_us) for i in other]
    assert played.schedule.makespan_us >= skew * (profile.forward_us + profile.backward_us) * (1 - 1e-9)
    assert played.others.busy_us(Resource.GPU) < played.schedule.busy_us(Resource.GPU)


def test_a_slow_rank_without_updates_to_wait_for() -> None:
    """With free collectives and all states on the device the step is `skew` times as long."""
    profile = with_collectives(uniform(4, forward=10.0, backward=20.0, gpu=1.0), 0.0, 0.0)
    alike, slow = (simulate(replace(profile, skew=skew), prefix(profile, 4)).makespan_us for skew in (1.0, 1.5))
    assert slow == pytest.approx(1.5 * alike)


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), gpu=st.floats(0, 10), forward=st.floats(1, 20), backward=st.floats(1, 40),
       reduce_us=st.floats(0, 30), gather_us=st.floats(0, 30), data=st.data())
@settings(deadline=None)
def test_windows_with_collectives_on_equal_layers(
    n: int, cpu: float, gpu: float, forward: float, backward: float, reduce_us: float, gather_us: float, data: st.DataObject
) -> None:
    """The simulated step is what collectives alone allow, plus the worst overrun of a window.

    Updates on the device and waits for collectives may fill one another, and a few chunks and one
    gather may come on top.
    """
    plain = uniform(n, forward=forward, backward=backward, cpu=cpu, gpu=gpu, d2h=1.0, h2d=1.0)
    profile = with_collectives(plain, reduce_us, gather_us)
    nothing = profile_of([replace(u, cpu_update_us=0.0, gpu_update_us=0.0, d2h_us=0.0, h2d_us=0.0) for u in profile.units])
    k = data.draw(st.integers(0, n))
    fine = Discipline(chunk_params=1000 // FINE)
    alone_us = simulate(replace(nothing, node_ranks=2), prefix(nothing, k), fine).makespan_us
    windows = windows_of(profile, guard=1.0, chunk_params=1, updates_in_backward=True)
    row = windows.tightest(k)
    overrun_us = max(0.0, row.overrun_us if row else 0.0)
    found = simulate(profile, prefix(profile, k), fine).makespan_us
    chunk_us = (cpu + gpu + 2.0) / FINE
    assert alone_us + overrun_us - chunk_us <= found
    assert found <= alone_us + overrun_us + windows.device_us(k) + 4 * chunk_us


def test_collectives_shorten_windows() -> None:
    """Each window loses one reduce-scatter and one all-gather; gathers that are late give it back.

    Three layers of 10 us forward and 20 us backward: the first gather holds the forward up by what
    both collectives of the first layer take, and that is all that is late.
    """
    profile = with_collectives(uniform(3, forward=10.0, backward=20.0), 2.0, 3.0)
    assert lost_us([10.0] * 3, profile.units) == (0.0, 0.0, 0.0)
    slow = with_collectives(uniform(3, forward=10.0, backward=20.0), 2.0, 30.0)
    assert lost_us([10.0] * 3, slow.units) == (0.0, 2.0 + 30.0 - (62.0 - 10.0), 2.0 + 30.0 - (92.0 - 20.0))
    fast = with_collectives(uniform(1, forward=10.0, backward=20.0), 0.0, 0.0)
    assert lost_us([10.0], fast.units) == (0.0,)


def test_no_fewer_ranks_than_one() -> None:
    """A profile of no rank, or of one faster than itself, is refused."""
    with pytest.raises(PlanError, match="0 ranks on a host"):
        replace(uniform(1), node_ranks=0)
    for skew in (0.9, float("inf"), float("nan")):
        with pytest.raises(PlanError, match="expected a finite factor >= 1"):
            replace(uniform(1), skew=skew)
    with pytest.raises(PlanError, match="all_gather_us=-1"):
        replace(unit(0), all_gather_us=-1.0)


def test_a_plan_says_what_it_was_solved_from() -> None:
    """Of several ranks the inputs have the collectives, and the prediction how idle they are."""
    profile = with_collectives(uniform(4), 2.0, 1.0)
    made, alone = plan(profile), plan(uniform(4))
    assert (made.inputs["t_reduce_scatter_us"], made.inputs["t_all_gather_us"], made.inputs["node_ranks"]) == (8.0, 4.0, 2.0)
    assert made.predicted["collectives_idle_share"] == pytest.approx(1 - 12.0 / made.predicted["step_us"])
    assert not {"node_ranks", "collectives_idle_share"} & {*alone.inputs, *alone.predicted}
    assert Profile.from_json(replace(profile, skew=1.2).to_json()) == replace(profile, skew=1.2)


def test_streamed_states_wait_for_the_reduced_gradient() -> None:
    """A streamed update begins after the reduce-scatter; its load may come before."""
    profile = with_collectives(uniform(3, stream=2.0), 5.0, 1.0)
    whole = prefix_plan(profile.units, 0, source="test", reason=lambda _: "", share=1.0)
    assert {row.placement for row in whole.rows} == {Placement.STREAM}
    found = simulate(profile, whole)
    for u in range(3):
        (reduce,) = found.of(TaskId(REDUCE, u))
        assert min(i.start_us for i in found.of(TaskId(TaskKind.GPU_UPDATE, u))) >= reduce.end_us
    assert min(i.start_us for i in found.of(TaskId(TaskKind.STREAM_IN, 2))) < found.of(TaskId(REDUCE, 2))[0].end_us
