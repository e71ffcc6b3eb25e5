"""The simulated step against closed forms, the task DAG's longest path, and its own rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.discipline import Barrier, CommitAt, Discipline
from hytrain_fx.cost_model.simulate import simulate
from hytrain_fx.cost_model.step_graph import step_graph
from hytrain_fx.cost_model.windows import windows_of
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import Resource, TaskId, TaskKind
from tests.null.profiles import prefix, profile_of, profiles, subset, uniform, unit

FINE = 50  # chunks a unit of 1000 parameters is cut into
DISCIPLINES = st.builds(
    Discipline, barrier=st.sampled_from(["none", "before_forward", "zero_offload"]),
    commit_at=st.sampled_from(["backward_start", "backward_end"]), chunk_params=st.sampled_from([None, 100, 1000]))


def step_us(profile: Profile, plan: Plan, barrier: Barrier = "none", commit_at: CommitAt = "backward_start") -> float:
    """Step time with units of 1000 parameters cut finely."""
    return simulate(profile, plan, Discipline(barrier, commit_at, 1000 // FINE)).makespan_us


def chunk_us(profile: Profile) -> float:
    """One finest chunk through all three stages, and one on the device.

    So much may whole chunks cost at a gate.
    """
    return max(u.d2h_us + u.cpu_update_us + u.h2d_us + u.gpu_update_us for u in profile.units) / FINE


@given(profile=profiles(), discipline=DISCIPLINES, data=st.data())
@settings(deadline=None)
def test_every_schedule_keeps_the_rules(profile: Profile, discipline: Discipline, data: st.DataObject) -> None:
    """Resources do all their work once, and the step is work plus stalls.

    No forward starts before its own new weights are there. (That no resource works twice at once is
    checked by Schedule itself.) The last fact makes one period the steady state.
    """
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.units)))))
    s = simulate(profile, subset(profile, on_device), discipline)
    gpu_us = sum(u.gpu_update_us for u in profile.units if u.index in on_device)
    assert s.busy_us(Resource.GPU) == pytest.approx(profile.forward_us + profile.backward_us + gpu_us)
    assert s.busy_us(Resource.CPU) == pytest.approx(sum(u.cpu_update_us for u in profile.units if u.index not in on_device))
    assert s.busy_us(Resource.D2H) == pytest.approx(sum(u.d2h_us for u in profile.units if u.index not in on_device))
    assert s.busy_us(Resource.H2D) == pytest.approx(sum(u.h2d_us for u in profile.units if u.index not in on_device))
    assert s.makespan_us == pytest.approx(s.busy_us(Resource.GPU) + s.stall_us)
    for u in profile.units:
        (forward,) = s.of(TaskId(TaskKind.FORWARD, u.index))
        updates = s.of(TaskId(TaskKind.H2D, u.index)) + s.of(TaskId(TaskKind.GPU_UPDATE, u.index))
        assert all(i.end_us <= forward.start_us + 1e-9 for i in updates)
        (backward,) = s.of(TaskId(TaskKind.BACKWARD, u.index))
        assert all(i.start_us >= backward.end_us - 1e-9 for i in updates + s.of(TaskId(TaskKind.D2H, u.index)))


@given(n=st.integers(1, 8), data=st.data())
@settings(deadline=None)
def test_longest_path_without_contention(n: int, data: st.DataObject) -> None:
    """With equal layers that fit one layer's backward, the step is the DAG's longest path.

    Their copies and updates fit in it, so no queue forms.
    """
    short = st.integers(1, 20).map(float)
    cpu, d2h, h2d = data.draw(st.tuples(short, short, short))
    profile = profile_of([unit(i, forward=data.draw(short), backward=20.0, cpu=cpu, d2h=d2h, h2d=h2d) for i in range(n)])
    whole = Discipline(chunk_params=None)
    dag = step_graph(profile, prefix(profile, 0), whole).dag
    for before, after, edge in dag.edges(data=True):
        edge["us"] = dag.nodes[before]["us"] + (dag.nodes[after]["us"] if dag.out_degree(after) == 0 else 0.0)
    longest = nx.dag_longest_path_length(dag, weight="us")
    assert simulate(profile, prefix(profile, 0), whole).makespan_us == pytest.approx(longest)


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), gpu=st.floats(0, 10), forward=st.floats(1, 20), backward=st.floats(1, 40),
       data=st.data())
@settings(deadline=None)
def test_windows_closed_form_on_equal_layers(
    n: int, cpu: float, gpu: float, forward: float, backward: float, data: st.DataObject
) -> None:
    """The simulated step is at least t_f + t_b + max(A_k, worst overrun).

    It is above that by no more than a few chunks.
    """
    profile = uniform(n, forward=forward, backward=backward, cpu=cpu, gpu=gpu, d2h=1.0, h2d=1.0)
    k = data.draw(st.integers(0, n))
    fluid = profile.forward_us + profile.backward_us + windows_of(
        profile, guard=1.0, chunk_params=1, updates_in_backward=True).exposed_us(k)
    found = step_us(profile, prefix(profile, k))
    slack = chunk_us(profile)
    assert fluid - slack <= found <= fluid + 4 * slack


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), gpu=st.floats(0, 10), bubble=st.floats(0, 300), between=st.floats(0, 300),
       data=st.data())
@settings(deadline=None)
def test_a_bubble_hides_updates_and_other_micro_batches_hide_none(
    n: int, cpu: float, gpu: float, bubble: float, between: float, data: st.DataObject
) -> None:
    """The closed form with the bubble in every window: t_f + t_b + t_m + bubble + what is exposed.

    Waiting for another stage is no wait for an update.
    """
    plain = uniform(n, forward=10.0, backward=20.0, cpu=cpu, gpu=gpu, d2h=1.0, h2d=1.0)
    profile = replace(plain, bubble_us=bubble, between_us=between)
    plan = prefix(profile, data.draw(st.integers(0, n)))
    windows = windows_of(profile, guard=1.0, chunk_params=1, updates_in_backward=True)
    found = simulate(profile, plan, Discipline(chunk_params=1000 // FINE))
    fluid, slack = profile.compute_us + bubble + windows.exposed_us(plan.k), chunk_us(profile)
    assert fluid - slack <= found.makespan_us <= fluid + 4 * slack
    assert found.makespan_us >= profile.compute_us + bubble - 1e-6
    assert found.stall_us <= found.makespan_us - profile.compute_us - bubble + 1e-6
    without = simulate(plain, plan, Discipline(chunk_params=1000 // FINE))
    assert found.stall_us <= without.stall_us + 4 * slack
    assert found.makespan_us <= without.makespan_us + bubble + between + 4 * slack


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), forward=st.floats(1, 20), backward=st.floats(1, 40), data=st.data())
@settings(deadline=None)
def test_deferred_windows_closed_form(n: int, cpu: float, forward: float, backward: float, data: st.DataObject) -> None:
    """With updates from the end of the backward on, only forward time before a layer hides them."""
    profile = uniform(n, forward=forward, backward=backward, cpu=cpu, gpu=1.0, d2h=0.1, h2d=0.1)
    k = data.draw(st.integers(0, n))
    fluid = profile.forward_us + profile.backward_us + windows_of(
        profile, guard=1.0, chunk_params=1, updates_in_backward=False).exposed_us(k)
    found = step_us(profile, prefix(profile, k), commit_at="backward_end")
    assert fluid - chunk_us(profile) <= found <= fluid + 4 * chunk_us(profile)


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), forward=st.floats(1, 20), backward=st.floats(1, 40), late=st.floats(0, 1),
       data=st.data())
@settings(deadline=None)
def test_early_updates_closed_form(n: int, cpu: float, forward: float, backward: float, late: float, data: st.DataObject) -> None:
    """Updates that begin before the commit have the whole backward, so they end no later.

    No new weight leaves before the commit.
    """
    profile = replace(uniform(n, forward=forward, backward=backward, cpu=cpu, gpu=1.0, d2h=0.1, h2d=0.1), commit_us=late * n * backward)
    plan = prefix(profile, data.draw(st.integers(0, n)))
    early, late_plan = (simulate(profile, plan, Discipline(chunk_params=1000 // FINE, early_updates=begin)) for begin in (True, False))
    fluid = profile.forward_us + profile.backward_us + windows_of(
        profile, guard=1.0, chunk_params=1, updates_in_backward=True, early_updates=True).exposed_us(plan.k)
    assert fluid - chunk_us(profile) <= early.makespan_us <= fluid + 4 * chunk_us(profile) + backward  # a commit comes with a unit's end
    assert early.makespan_us <= late_plan.makespan_us + 4 * chunk_us(profile)
    sent = [i for unit in profile.units for i in early.of(TaskId(TaskKind.H2D, unit.index))]
    assert all(i.start_us >= profile.commit_us - 1e-6 for i in sent)


@given(n=st.integers(2, 10), cpu=st.floats(0, 120), backward=st.floats(1, 40), launching=st.floats(0, 3), measured=st.floats(0, 1),
       data=st.data())
@settings(deadline=None)
def test_launching_beside_updates_by_the_cpu_is_hidden(n: int, cpu: float, backward: float, launching: float, measured: float,
                                                       data: st.DataObject) -> None:
    """A thread that runs ahead commits as the backward begins, if a step is as long as launching.

    Else later, by what is missing. The time of the commit that was measured, under another plan,
    says nothing then.
    """
    plain = uniform(n, forward=5.0, backward=backward, cpu=cpu, gpu=1.0, d2h=0.1, h2d=0.1)
    profile = replace(plain, launching_us=launching * n * backward, commit_us=measured * n * backward)
    plan, fine = prefix(profile, data.draw(st.integers(0, n))), Discipline(chunk_params=1000 // FINE)
    soon, late = (simulate(replace(plain, commit_us=us), plan, fine).makespan_us for us in (0.0, profile.launching_us))
    found = simulate(profile, plan, replace(fine, runs_ahead=True)).makespan_us
    if profile.launching_us:
        assert soon - chunk_us(profile) <= found <= late + chunk_us(profile)
    if 0 < profile.launching_us <= soon:
        assert found == pytest.approx(soon)


@given(n=st.integers(2, 10), cpu=st.floats(0, 60), backward=st.floats(1, 40), h2d=st.floats(0.1, 20), late=st.floats(0, 1), data=st.data())
@settings(deadline=None)
def test_early_weights_travel_while_the_factor_is_on_its_way(n: int, cpu: float, backward: float, h2d: float, late: float,
                                                             data: st.DataObject) -> None:
    """Weights of early updates also leave between the call of step() and the backward's end.

    The step takes no longer for it.
    """
    profile = replace(uniform(n, forward=5.0, backward=backward, cpu=cpu, gpu=1.0, d2h=0.1, h2d=h2d), commit_us=late * n * backward)
    plan = prefix(profile, data.draw(st.integers(0, n - 1)))
    ahead, behind = (simulate(profile, plan, Discipline(chunk_params=1000 // FINE, commit_at="backward_end", early_updates=True,
                                                        early_weights=early)) for early in (True, False))
    assert ahead.makespan_us <= behind.makespan_us + 4 * chunk_us(profile)
    begins = [min(i.start_us for unit in profile.units for i in found.of(TaskId(TaskKind.H2D, unit.index))) for found in (ahead, behind)]
    assert begins[0] >= profile.commit_us - 1e-6
    assert begins[1] >= n * backward - 1e-6
    first_us = backward + cpu / FINE + 0.1  # the last unit's first chunk is updated
    assert begins[0] <= max(first_us, profile.commit_us + backward, 0.0) + chunk_us(profile)


@given(n=st.integers(1, 8), more_cpu=st.floats(0, 100), backward=st.floats(1, 40), gpu=st.floats(0, 30), data=st.data())
@settings(deadline=None)
def test_one_barrier_is_the_seed_equation(n: int, more_cpu: float, backward: float, gpu: float, data: st.DataObject) -> None:
    """With one barrier and a busy CPU, the step is t_f + max(t_bwd + A_k, C - C_k + first wait).

    The first wait is for the first gradient.
    """
    profile = uniform(n, backward=backward, cpu=backward + more_cpu, gpu=gpu, d2h=1.0, h2d=1.0)
    k = data.draw(st.integers(0, n - 1))
    balance = max(n * backward + gpu * k, backward + (backward + more_cpu) * (n - k))
    found = step_us(profile, prefix(profile, k), barrier="before_forward")
    assert profile.forward_us + balance - 1e-6 <= found <= profile.forward_us + balance + 4 * chunk_us(profile)


@given(profile=profiles())
@settings(deadline=None)
def test_no_overlap_is_a_sum(profile: Profile) -> None:
    """ZeRO-Offload without overlap is a sum: forward, backward, all copies, all CPU updates."""
    found = simulate(profile, prefix(profile, 0), Discipline(barrier="zero_offload")).makespan_us
    assert found == pytest.approx(
        profile.forward_us + profile.backward_us + profile.d2h_us + profile.cpu_update_us + profile.h2d_us)


@given(n=st.integers(2, 6), forward=st.lists(st.floats(1, 30), min_size=6, max_size=6), cpu=st.floats(1, 150), gpu=st.floats(0, 10),
       size=st.integers(0, 6))
@settings(deadline=None, max_examples=40)
def test_the_prefix_is_the_best_set_of_its_size(n: int, forward: list[float], cpu: float, gpu: float, size: int) -> None:
    """The leading units give the shortest step of all sets of as many equal-sized units.

    This holds up to a few chunks.
    """
    profile = profile_of([unit(i, forward=f, backward=2 * f, cpu=cpu, gpu=gpu) for i, f in enumerate(forward[:n])])
    best = step_us(profile, prefix(profile, min(size, n)))
    for other in combinations(range(n), min(size, n)):
        assert best <= step_us(profile, subset(profile, set(other))) + 4 * chunk_us(profile)


@given(profile=profiles(max_units=6), k=st.integers(0, 6))
@settings(deadline=None)
def test_more_waiting_is_never_faster(profile: Profile, k: int) -> None:
    """A later commit, one barrier, or no overlap do not shorten the step (up to a few chunks)."""
    profile = replace(profile, units=tuple(replace(u, params=1000) for u in profile.units))
    plan = prefix(profile, min(k, len(profile.units)))
    free, slack = step_us(profile, plan), 4 * chunk_us(profile)
    assert free <= step_us(profile, plan, commit_at="backward_end") + slack
    assert free <= step_us(profile, plan, barrier="before_forward") + slack
    assert step_us(profile, plan, barrier="before_forward") <= step_us(profile, plan, barrier="zero_offload") + slack


def test_device_updates_hide_in_waits() -> None:
    """Where the forward waits for the CPU anyway, device updates add nothing to the step."""
    slow = uniform(4, cpu=200.0, gpu=20.0)
    without = profile_of([replace(u, gpu_update_us=0.0) for u in slow.units])
    plan = prefix(slow, 2)
    assert step_us(slow, plan) == pytest.approx(step_us(without, plan))


def test_a_split_unit_uses_both_sides() -> None:
    """Shares of one unit run where they are placed, each for its part of the time."""
    profile = uniform(1, cpu=30.0, gpu=4.0)
    rows = (PlanRow(0, "layer.0", 0, 250, Placement.GPU, ""), PlanRow(0, "layer.0", 250, 1000, Placement.CPU, ""))
    s = simulate(profile, Plan(rows, 0, "test"))
    assert s.busy_us(Resource.CPU) == pytest.approx(22.5)
    assert sum(i.duration_us for i in s.of(TaskId(TaskKind.GPU_UPDATE, 0))) == pytest.approx(1.0)


def test_streamed_shares_and_foreign_plans_are_refused() -> None:
    """A streamed share, and a plan for another model, are errors."""
    profile = uniform(1)
    with pytest.raises(PlanError, match="streamed share"):
        simulate(profile, Plan((PlanRow(0, "layer.0", 0, 1000, Placement.STREAM, ""),), 0, "test"))
    with pytest.raises(PlanError, match=r"places unit 1, the model has units 0\.\.0"):
        simulate(profile, prefix(uniform(2), 1))
