"""The task DAG of one step: what is in it, and what waits for what.

A played step keeps to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain_fx.cost_model.compiled_graph import LANES, compiled
from hytrain_fx.cost_model.discipline import Barrier, Discipline
from hytrain_fx.cost_model.host_memory import bytes_per_us
from hytrain_fx.cost_model.play import play
from hytrain_fx.cost_model.simulate import played, steady_step
from hytrain_fx.cost_model.step_graph import step_graph, unmeasured
from hytrain_fx.cost_model.windows import window_lengths
from hytrain_fx.errors import PlanError
from hytrain_fx.ir.plan import Placement, Plan, PlanRow
from hytrain_fx.ir.profile import Profile
from hytrain_fx.ir.task_graph import RESOURCE_OF, Resource, TaskGraph, TaskId, TaskKind, Unit
from tests.null.profiles import prefix, profile_of, profiles, steps, streaming_profiles, subset, uniform, unit

Step = tuple[Profile, Plan, Discipline]
BACKWARD, FORWARD, D2H, CPU_UPDATE, H2D, WAIT = (
    TaskKind.BACKWARD, TaskKind.FORWARD, TaskKind.D2H, TaskKind.CPU_UPDATE, TaskKind.H2D, TaskKind.WAIT)
GPU_UPDATE, STREAM_IN, STREAM_OUT = TaskKind.GPU_UPDATE, TaskKind.STREAM_IN, TaskKind.STREAM_OUT
WAYS = {Placement.CPU: {D2H, CPU_UPDATE, H2D}, Placement.GPU: {GPU_UPDATE}, Placement.STREAM: {STREAM_IN, GPU_UPDATE, STREAM_OUT}}
SLACK_US = 1e-6


def preds(graph: TaskGraph, kind: TaskKind, unit: int) -> set[TaskId]:
    return set(graph.dag.predecessors(TaskId(kind, unit)))


def streamed(profile: Profile) -> Plan:
    """Every unit, all of it."""
    return Plan(tuple(PlanRow(u.index, u.name, 0, u.params, Placement.STREAM, "") for u in profile.units), 0, "test")


# ---- What is in it ----


@given(step=steps())
@settings(deadline=None)
def test_a_layer_has_the_tasks_of_its_placements(step: Step) -> None:
    """Every layer has backward, forward and wait, and the tasks of each way its shares take.

    There is no circle.
    """
    profile, plan, discipline = step
    dag = step_graph(profile, plan, discipline).dag
    assert nx.is_directed_acyclic_graph(dag)
    ways = {TaskId(kind, row.unit) for row in plan.rows for kind in WAYS[row.placement]}
    assert set(dag) == ways | {TaskId(kind, u.index) for u in profile.units for kind in (BACKWARD, FORWARD, WAIT)}
    assert all(resource == RESOURCE_OF[task.kind] for task, resource in dag.nodes(data="resource"))


@given(step=steps())
@settings(deadline=None)
def test_figures_are_those_of_the_shares(step: Step) -> None:
    """Parameters and times of a kind of task sum to those of the shares that go its way.

    So do those of the pieces.
    """
    profile, plan, discipline = step
    graph = step_graph(profile, plan, discipline)
    for kind in {task.kind for task in graph.dag} - {BACKWARD, FORWARD, WAIT}:
        rows = [row for row in plan.rows if kind in WAYS[row.placement]]
        assert graph.total("params", kind) == sum(row.numel for row in rows)
        us = sum(row.numel / profile.units[row.unit].params * getattr(profile.units[row.unit], f"{kind}_us") for row in rows)
        assert graph.total("us", kind) == pytest.approx(us)
        cuts = [cut for task, cuts in graph.dag.nodes(data="cuts") if task.kind is kind for cut in cuts]
        assert sum(cut.pieces * cut.us for cut in cuts) == pytest.approx(us)
    assert graph.total("us", BACKWARD, FORWARD) == profile.backward_us + profile.forward_us


def test_nodes_carry_sizes_and_flops() -> None:
    """A copy moves the gradient's bytes, an update 28 bytes a parameter.

    A wait stands on the device, and flops are the units'.
    """
    profile = profile_of([replace(unit(0, params=100), grad_bytes=200)])
    units = (Unit(0, "layer.0", 100, ("layer.0.weight",), 200, 1.0, 2.0),)
    graph = step_graph(profile, prefix(profile, 0), Discipline(), units)
    nodes = {str(task): node for task, node in graph.dag.nodes(data=True)}
    assert nodes["d2h(0)"]["bytes"] == nodes["h2d(0)"]["bytes"] == 200
    assert nodes["cpu_update(0)"]["bytes"] == 28 * 100
    assert (nodes["forward(0)"]["flops"], nodes["backward(0)"]["flops"]) == (1.0, 2.0)
    assert nodes["wait(0)"]["resource"] == Resource.GPU
    assert graph.units == units


def test_before_anything_is_measured_nothing_takes_time() -> None:
    """The graph of a plan without a profile has every task, size and edge, and no time.

    Streamed tasks are in it too.
    """
    units = tuple(Unit(i, f"layer.{i}", 1000, (), 2000) for i in range(3))
    profile = unmeasured(units)
    graph, timed = (step_graph(of, streamed(profile), Discipline(), units) for of in (profile, uniform(3, stream=1.0)))
    assert nx.utils.graphs_equal(nx.DiGraph(list(graph.dag.edges)), nx.DiGraph(list(timed.dag.edges)))
    assert graph.total("us", *TaskKind) == 0.0
    assert graph.total("bytes", STREAM_IN) == timed.total("bytes", STREAM_IN) > 0


# ---- What waits for what ----


@given(n=st.integers(2, 12), data=st.data())
@settings(deadline=None)
def test_order_of_a_step(n: int, data: st.DataObject) -> None:
    """Backward runs down and forward up; an update needs its own gradient but no lower layer's."""
    profile = uniform(n)
    dag = step_graph(profile, prefix(profile, 0), Discipline()).dag
    low, high = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=2)))
    assert nx.has_path(dag, TaskId(FORWARD, low), TaskId(FORWARD, high))
    assert nx.has_path(dag, TaskId(BACKWARD, high), TaskId(BACKWARD, low))
    assert nx.has_path(dag, TaskId(BACKWARD, high), TaskId(CPU_UPDATE, low))
    assert not nx.has_path(dag, TaskId(BACKWARD, low), TaskId(CPU_UPDATE, high))


def test_each_way_leads_from_the_gradient_to_the_next_forward() -> None:
    """The CPU's way is copy, update, copy, and a resident layer is updated in place.

    States of a streamed layer come first and go home after.
    """
    profile = uniform(3, stream=1.0)
    rows = tuple(PlanRow(u.index, u.name, 0, u.params, place, "") for u, place in zip(profile.units, Placement, strict=True))
    graph = step_graph(profile, Plan(rows, 1, "test"), Discipline())
    assert preds(graph, WAIT, 0) == {TaskId(GPU_UPDATE, 0)}
    assert preds(graph, GPU_UPDATE, 0) == {TaskId(BACKWARD, 0)}
    by_cpu = [TaskId(kind, 1) for kind in (BACKWARD, D2H, CPU_UPDATE, H2D, WAIT)]
    assert nx.shortest_path(graph.dag, by_cpu[0], by_cpu[-1]) == by_cpu
    assert preds(graph, GPU_UPDATE, 2) == {TaskId(STREAM_IN, 2), TaskId(BACKWARD, 2)}
    assert set(graph.dag.successors(TaskId(GPU_UPDATE, 2))) == {TaskId(STREAM_OUT, 2), TaskId(WAIT, 2)}
    assert preds(graph, FORWARD, 2) == {TaskId(WAIT, 2), TaskId(FORWARD, 1)}


@pytest.mark.parametrize("barrier", ["before_forward", "zero_offload"])
def test_under_one_barrier_the_first_forward_waits_for_all(barrier: Barrier) -> None:
    """Without overlap every copy also waits for the whole backward.

    Every update waits for all copies, and every copy back for all updates.
    """
    profile = uniform(3)
    graph = step_graph(profile, prefix(profile, 0), Discipline(barrier=barrier))
    assert preds(graph, FORWARD, 0) == {TaskId(BACKWARD, 0), *(TaskId(WAIT, i) for i in range(3))}
    if barrier == "zero_offload":
        stages = [[TaskId(kind, i) for i in range(3)] for kind in (D2H, CPU_UPDATE, H2D)]
        for before, after in pairwise([[TaskId(BACKWARD, 0)], *stages]):
            assert all(nx.has_path(graph.dag, a, b) for a in before for b in after)


def test_updates_wait_for_the_commit() -> None:
    """The commit comes with the layer whose backward ends then, and layers above wait for it.

    Layers below wait only for their own gradient.
    """
    profile = replace(uniform(4, backward=10.0, stream=1.0), commit_us=15.0)  # in the backward of layer 2
    graph = step_graph(profile, prefix(profile, 0), Discipline())
    assert [TaskId(BACKWARD, 2) in preds(graph, CPU_UPDATE, i) for i in range(4)] == [False, False, False, True]
    early = step_graph(profile, prefix(profile, 0), Discipline(early_updates=True))
    assert preds(early, CPU_UPDATE, 3) == {TaskId(D2H, 3)}
    assert preds(early, H2D, 3) == {TaskId(CPU_UPDATE, 3), TaskId(BACKWARD, 2)}
    loads = step_graph(profile, streamed(profile), Discipline(commit_at="backward_end"))
    assert all(preds(loads, STREAM_IN, i) == {TaskId(BACKWARD, 0)} for i in range(4))


@pytest.mark.parametrize("indices", [[], [1], [0, 0], [1, 0]])
def test_units_must_be_numbered_in_order(indices: list[int]) -> None:
    """No graph of units that are not 0..n-1."""
    with pytest.raises(PlanError, match=r"numbered 0\.\.n-1"):
        unmeasured(tuple(Unit(i, "u", 1, (), 2) for i in indices))


@given(profile=profiles(), commit=st.floats(0, 1))
@settings(deadline=None)
def test_windows_are_lengths_of_paths_in_it(profile: Profile, commit: float) -> None:
    """A layer's window is what the device computes on the way to its next forward.

    The way begins at its backward, or at the commit.
    """
    commit_us = commit * profile.backward_us
    graph = step_graph(profile, prefix(profile, 0), Discipline())
    found = window_lengths([u.forward_us for u in profile.units], [u.backward_us for u in profile.units], commit_us)
    for layer, window_us in enumerate(found):
        path = nx.shortest_path(graph.dag.subgraph(task for task in graph.dag if task.kind in (BACKWARD, FORWARD)),
                                TaskId(BACKWARD, layer), TaskId(FORWARD, layer))[1:-1]
        of = {kind: sum(graph.dag.nodes[task]["us"] for task in path if task.kind is kind) for kind in (BACKWARD, FORWARD)}
        assert window_us == pytest.approx(of[FORWARD] + min(of[BACKWARD], profile.backward_us - commit_us))


# ---- A played step keeps to it ----


def pieces_of(graph: TaskGraph, task: TaskId, first: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Begin and number in its range of each piece of a task, with its number among all."""
    for cut in graph.dag.nodes[task]["cuts"]:
        for i in range(cut.pieces):
            yield (cut.begin, i), first
            first += 1


@given(step=steps())
@settings(deadline=None, max_examples=200)
def test_a_played_step_respects_every_edge(step: Step) -> None:
    """No piece starts before what its task's edges name is over, and all pieces are played.

    No lane runs two pieces at once.
    """
    profile, plan, discipline = step
    graph = steady_step(profile, plan, discipline).graph
    arrays = compiled(graph)
    run = play(arrays, bytes_per_us(profile))
    assert sorted(run.order) == list(range(arrays.first[-1]))
    ended: dict[TaskId, float] = {}
    for task in nx.topological_sort(graph.dag):
        own = dict(pieces_of(graph, task, arrays.first[arrays.tasks.index(task)]))
        ended[task] = max((run.end_us[piece] for piece in own.values()), default=0.0)
        for before in graph.dag.predecessors(task):
            edge = graph.dag.edges[before, task]
            theirs = dict(pieces_of(graph, before, arrays.first[arrays.tasks.index(before)]))
            if not own:  # a wait is over as soon as what it waits for is
                ended[task] = max(ended[task], ended[before])
            elif edge["by_piece"]:
                assert all(run.end_us[theirs[key]] <= run.start_us[own[key]] + SLACK_US for key in own.keys() & theirs.keys())
                assert own.keys() & theirs.keys()
            else:
                over_us = ended[before] if edge["pieces"] is None else run.end_us[list(theirs.values())[edge["pieces"] - 1]]
                assert all(over_us <= run.start_us[piece] + SLACK_US for piece in own.values())
    for lane in range(len(LANES)):
        spans = [(run.start_us[piece], run.end_us[piece]) for piece in run.order if arrays.lane_of[piece] == lane]
        assert all(before[1] <= after[0] + SLACK_US for before, after in pairwise(spans))


@given(step=steps())
@settings(deadline=None, max_examples=200)
def test_no_step_is_shorter_than_the_longest_path(step: Step) -> None:
    """A task takes its own time after what it waits for.

    That is all of it, its first pieces, or at least one piece where both go piece by piece.
    """
    profile, plan, discipline = step
    found = steady_step(profile, plan, discipline)
    dag = found.graph.dag
    bound = nx.DiGraph()
    for before, after, edge in dag.edges(data=True):
        cuts = dag.nodes[before]["cuts"]
        if not edge["by_piece"]:
            us = dag.nodes[before]["us"] if edge["pieces"] is None else edge["pieces"] * cuts[0].us
        elif {cut.begin for cut in dag.nodes[after]["cuts"]} <= {cut.begin for cut in cuts}:
            us = min(cut.us for cut in cuts)
        else:  # some pieces of the later task wait for none of these
            continue
        bound.add_edge(before, after, us=us)
    last = TaskId(FORWARD, len(profile.units) - 1)
    to_last = bound.subgraph(nx.ancestors(bound, last) | {last})
    longest_us = nx.dag_longest_path_length(to_last, weight="us") + dag.nodes[last]["us"]
    assert found.schedule.makespan_us >= longest_us - SLACK_US


@given(step=steps())
@settings(deadline=None)
def test_the_schedule_is_that_of_the_graph(step: Step) -> None:
    """Playing the graph that comes with a schedule gives that schedule.

    This also holds where the launching thread runs ahead.
    """
    profile, plan, discipline = step
    found = steady_step(profile, plan, discipline)
    assert played(found.graph, bytes_per_us(profile)) == found.schedule


@given(profile=streaming_profiles())
@settings(deadline=None)
def test_no_more_slots_are_taken_than_there_are(profile: Profile) -> None:
    """From the start of a chunk's load to the end of its way home it holds a slot."""
    graph = step_graph(profile, streamed(profile), Discipline(staging_params=100, staging_slots=3))
    arrays = compiled(graph)
    run = play(arrays, None)
    taken: list[tuple[float, int]] = []
    for number, task in enumerate(arrays.tasks):
        for piece in range(arrays.first[number], arrays.first[number + 1]):
            if task.kind is STREAM_IN:
                taken.append((run.start_us[piece], 1))
            elif task.kind is STREAM_OUT:
                taken.append((run.end_us[piece], -1))
    held = 0
    for _, change in sorted(taken):
        held += change
        assert held <= graph.slots


def test_other_sets_than_prefixes_have_a_graph() -> None:
    """A plan need not be a prefix: the tasks are those of its rows."""
    profile = uniform(3)
    graph = step_graph(profile, subset(profile, {1}), Discipline())
    assert {task.unit for task in graph.dag if task.kind is GPU_UPDATE} == {1}
    assert {task.unit for task in graph.dag if task.kind is CPU_UPDATE} == {0, 2}
