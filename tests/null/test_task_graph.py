"""The layer-level task DAG of one step."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.task_graph import RESOURCE_OF, Resource, TaskId, TaskKind, Unit, build_task_graph


def units(n: int) -> tuple[Unit, ...]:
    return tuple(Unit(i, f"layer.{i}", 100 + i, (f"layer.{i}.weight",), 2 * (100 + i), 1.0, 2.0) for i in range(n))


@given(n=st.integers(1, 12))
def test_every_task_of_every_unit_is_there_once(n: int) -> None:
    """The graph is acyclic and holds each kind of task once per unit, on its resource."""
    dag = build_task_graph(units(n)).dag
    assert nx.is_directed_acyclic_graph(dag)
    assert set(dag) == {TaskId(kind, i) for kind in TaskKind for i in range(n)}
    assert all(resource == RESOURCE_OF[task.kind] for task, resource in dag.nodes(data="resource"))


@given(n=st.integers(2, 12), data=st.data())
def test_order_of_a_step(n: int, data: st.DataObject) -> None:
    """Forward runs up, backward down, and an update follows its own gradient but no lower layer's."""
    dag = build_task_graph(units(n)).dag
    low = data.draw(st.integers(0, n - 2))
    high = data.draw(st.integers(low + 1, n - 1))
    assert nx.has_path(dag, TaskId(TaskKind.FORWARD, low), TaskId(TaskKind.FORWARD, high))
    assert nx.has_path(dag, TaskId(TaskKind.BACKWARD, high), TaskId(TaskKind.BACKWARD, low))
    assert nx.has_path(dag, TaskId(TaskKind.BACKWARD, high), TaskId(TaskKind.CPU_UPDATE, low))
    assert not nx.has_path(dag, TaskId(TaskKind.BACKWARD, low), TaskId(TaskKind.CPU_UPDATE, high))


def test_both_update_places_lead_to_the_wait() -> None:
    """A unit's wait follows its copy back and its device update; the copy back follows the CPU's update and that the copy out."""
    dag = build_task_graph(units(2)).dag
    assert set(dag.predecessors(TaskId(TaskKind.WAIT, 1))) == {TaskId(TaskKind.H2D, 1), TaskId(TaskKind.GPU_UPDATE, 1)}
    path = nx.shortest_path(dag, TaskId(TaskKind.BACKWARD, 1), TaskId(TaskKind.H2D, 1))
    assert [str(task) for task in path] == ["backward(1)", "d2h(1)", "cpu_update(1)", "h2d(1)"]


def test_work_of_a_task() -> None:
    """Copies carry the gradient's bytes, updates 28 bytes a parameter, compute its FLOPs."""
    dag = build_task_graph(units(1)).dag
    assert dag.nodes[TaskId(TaskKind.D2H, 0)]["bytes"] == dag.nodes[TaskId(TaskKind.H2D, 0)]["bytes"] == 200
    assert dag.nodes[TaskId(TaskKind.CPU_UPDATE, 0)]["bytes"] == 28 * 100
    assert dag.nodes[TaskId(TaskKind.BACKWARD, 0)]["flops"] == 2.0
    assert dag.nodes[TaskId(TaskKind.WAIT, 0)]["resource"] == Resource.GPU


@pytest.mark.parametrize("indices", [[], [1], [0, 2], [1, 0]])
def test_units_must_be_numbered_in_order(indices: list[int]) -> None:
    """No units, or units not numbered 0..n-1 in order, are an error that shows the numbers found."""
    with pytest.raises(PlanError, match=r"numbered 0\.\.n-1"):
        build_task_graph(tuple(Unit(i, "u", 1, (), 2) for i in indices))


def test_streamed_states_come_and_go_around_the_device_update() -> None:
    """States come in without waiting for a gradient, the update follows both, and they go back after it; 10 bytes a parameter in 16 bit."""
    dag = build_task_graph(units(2)).dag
    stream_in, update, out = (TaskId(kind, 1) for kind in (TaskKind.STREAM_IN, TaskKind.GPU_UPDATE, TaskKind.STREAM_OUT))
    assert not list(dag.predecessors(stream_in))
    assert set(dag.predecessors(update)) == {stream_in, TaskId(TaskKind.BACKWARD, 1)}
    assert set(dag.predecessors(out)) == {update}
    assert (dag.nodes[stream_in]["resource"], dag.nodes[out]["resource"]) == (Resource.H2D, Resource.D2H)
    assert dag.nodes[stream_in]["bytes"] == dag.nodes[out]["bytes"] == 10 * 101
