"""The layer-level task DAG of one training step: what must run, on which resource, after what.

    forward(0) -> ... -> forward(n-1) -> backward(n-1) -> ... -> backward(0)
    backward(l) -> d2h(l) -> cpu_update(l) -> h2d(l) -> wait(l) -> next forward(l)
    backward(l) -> gpu_update(l) -> wait(l)
    stream_in(l) -> gpu_update(l) -> stream_out(l)
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

import networkx as nx

from hytrain_fx.errors import PlanError
from hytrain_fx.ir.states import ADAMW_TRAFFIC, StateTraffic


class TaskKind(enum.StrEnum):
    """What a task does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    D2H = "d2h"
    CPU_UPDATE = "cpu_update"
    GPU_UPDATE = "gpu_update"
    H2D = "h2d"
    WAIT = "wait"
    STREAM_IN = "stream_in"
    STREAM_OUT = "stream_out"


class Resource(enum.StrEnum):
    """What a task occupies while it runs; one task at a time on each."""

    GPU = "gpu"
    D2H = "d2h"
    CPU = "cpu"
    H2D = "h2d"


RESOURCE_OF = {
    TaskKind.FORWARD: Resource.GPU,
    TaskKind.BACKWARD: Resource.GPU,
    TaskKind.GPU_UPDATE: Resource.GPU,
    TaskKind.WAIT: Resource.GPU,
    TaskKind.D2H: Resource.D2H,
    TaskKind.CPU_UPDATE: Resource.CPU,
    TaskKind.H2D: Resource.H2D,
    TaskKind.STREAM_IN: Resource.H2D,
    TaskKind.STREAM_OUT: Resource.D2H,
}


@dataclass(frozen=True, slots=True)
class Unit:
    """One layer as the planner sees it: `index` counts in forward order, `params` in elements, `param_numels` those of each parameter.

    `traffic` is of its optimizer states.
    grain_params   where a parameter may be cut, it is at multiples of so many elements; 0 = parameters are placed whole
    """

    index: int
    name: str
    params: int
    param_names: tuple[str, ...]
    grad_bytes: int
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    param_numels: tuple[int, ...] = ()
    traffic: StateTraffic = ADAMW_TRAFFIC
    grain_params: int = 0

    @property
    def stream_bytes(self) -> int:
        """Bytes of its states that cross the link each way when it is streamed."""
        return self.traffic.streamed_bytes(self.params, self.grad_bytes)


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """Names a node of the DAG."""

    kind: TaskKind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind}({self.unit})"


@dataclass(frozen=True)
class TaskGraph:
    """Units in forward order and the DAG over `TaskId`s.

    Node attributes: `resource` (Resource), `params` (elements), `bytes` (moved over the link or read and
    written by the update), `flops`. Build one with `build_task_graph`.
    """

    units: tuple[Unit, ...]
    dag: nx.DiGraph


def build_task_graph(units: tuple[Unit, ...]) -> TaskGraph:
    """The DAG for one step over `units`, all three ways to update each unit included.

    Raises PlanError when there are no units or their indices are not 0..n-1 in order.
    """
    if not units or [u.index for u in units] != list(range(len(units))):
        raise PlanError(f"units must be numbered 0..n-1 in forward order, found {[u.index for u in units]}")
    dag = nx.DiGraph()
    for unit in units:
        _add_unit(dag, unit)
    for before, after in itertools.pairwise(units):
        dag.add_edge(TaskId(TaskKind.FORWARD, before.index), TaskId(TaskKind.FORWARD, after.index))
        dag.add_edge(TaskId(TaskKind.BACKWARD, after.index), TaskId(TaskKind.BACKWARD, before.index))
    last = units[-1].index
    dag.add_edge(TaskId(TaskKind.FORWARD, last), TaskId(TaskKind.BACKWARD, last))
    return TaskGraph(units, dag)


def _add_unit(dag: nx.DiGraph, unit: Unit) -> None:
    def add(kind: TaskKind, nbytes: int, flops: float = 0.0) -> TaskId:
        task = TaskId(kind, unit.index)
        dag.add_node(task, resource=RESOURCE_OF[kind], params=unit.params, bytes=nbytes, flops=flops)
        return task

    update_bytes = unit.traffic.device_bytes(unit.params)
    add(TaskKind.FORWARD, 0, unit.forward_flops)
    backward = add(TaskKind.BACKWARD, 0, unit.backward_flops)
    d2h = add(TaskKind.D2H, unit.grad_bytes)
    cpu = add(TaskKind.CPU_UPDATE, update_bytes)
    gpu = add(TaskKind.GPU_UPDATE, update_bytes)
    h2d = add(TaskKind.H2D, unit.grad_bytes)
    wait = add(TaskKind.WAIT, 0)
    stream_in = add(TaskKind.STREAM_IN, unit.stream_bytes)
    stream_out = add(TaskKind.STREAM_OUT, unit.stream_bytes)
    dag.add_edges_from([(backward, d2h), (d2h, cpu), (cpu, h2d), (h2d, wait), (backward, gpu), (gpu, wait)])
    dag.add_edges_from([(stream_in, gpu), (gpu, stream_out)])
