"""The task DAG of one steady training step: what runs on which lane, for how long, after what.

    backward(n-1) -> ... -> backward(0) -> forward(0) -> ... -> forward(n-1)    of the next step
    by the CPU      backward(l) -> d2h(l) -> cpu_update(l) -> h2d(l) -> wait(l) -> forward(l)
    on the device   backward(l) -> gpu_update(l) -> wait(l) -> forward(l)
    streamed        stream_in(l) -> gpu_update(l) -> wait(l);  gpu_update(l) -> stream_out(l)
    a pipeline      backward(0) -> receive(0) -> forward(0): the stage before comes first
    several ranks   backward(l) -> reduce_scatter(l) -> what the gradient goes to above
                    what the new weight comes from above -> all_gather(l) -> wait(l)
                    reduce_scatter(n-1) -> ... -> reduce_scatter(0) -> all_gather(0) -> ...
    weights on the host    cpu_update(l) -> fetch_forward(l) -> forward(l)
                    fetch_backward(l) -> backward(l);  one fetch after the other, each when the
                    layer whose slot it takes has computed
    weights in shards    gather_forward(l) in place of all_gather(l), gather_backward(l) ->
                    backward(l), each in its place among the collectives; of shards on the host
                    the fetch of this rank's comes before

A layer's number is its LID. Large tasks run in pieces, so that a more urgent layer may pass
between them: a `Cut` says how many pieces and how long each, an edge `by_piece` that a piece waits
for the same piece of the task before. There is one such graph for a profile, a plan and a
discipline (cost_model/step_graph.py): the simulator plays it, `inspect` draws it.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hytrain_fx.ir.states import ADAMW_TRAFFIC, StateTraffic

if TYPE_CHECKING:
    import networkx as nx


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
    RECEIVE = "receive"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    FETCH_BACKWARD = "fetch_backward"
    FETCH_FORWARD = "fetch_forward"
    GATHER_BACKWARD = "gather_backward"
    GATHER_FORWARD = "gather_forward"


FETCHES = (TaskKind.FETCH_BACKWARD, TaskKind.FETCH_FORWARD)
"""Weights that rest on the host come before a layer computes. They share the link with reloads."""
GATHERS = (TaskKind.GATHER_BACKWARD, TaskKind.GATHER_FORWARD)
"""Weights of which each rank has a shard come before a layer computes: from all ranks."""
FETCH_OF = dict(zip(GATHERS, FETCHES, strict=True))
"""The copy of this rank's own shard before a gather, where it rests on the host."""
ARRIVALS = (*FETCHES, *GATHERS)
"""Weights come before a layer computes, wherever they rest."""


class Resource(enum.StrEnum):
    """What a task occupies while it runs; one task at a time on each."""

    GPU = "gpu"
    D2H = "d2h"
    CPU = "cpu"
    H2D = "h2d"
    COLLECTIVES = "collectives"


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
    TaskKind.RECEIVE: Resource.COLLECTIVES,
    TaskKind.REDUCE_SCATTER: Resource.COLLECTIVES,
    TaskKind.ALL_GATHER: Resource.COLLECTIVES,
    TaskKind.FETCH_BACKWARD: Resource.H2D,
    TaskKind.FETCH_FORWARD: Resource.H2D,
    TaskKind.GATHER_BACKWARD: Resource.COLLECTIVES,
    TaskKind.GATHER_FORWARD: Resource.COLLECTIVES,
}


@dataclass(frozen=True, slots=True)
class Unit:
    """One layer as the planner sees it: `index` counts in forward order, `params` in elements,
    `param_numels` those of each parameter. `traffic` is of its optimizer states.

    grain_params   where a parameter may be cut, it is at multiples of so many elements; 0 =
                   parameters are placed whole
    fetched_params    elements whose weights rest on the host as long as the CPU updates them
    gathered_params   elements of weights that ranks keep in shards, all ranks' together
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
    fetched_params: int = 0
    gathered_params: int = 0

    @property
    def stream_bytes(self) -> int:
        """Bytes of its states that cross the link each way when it is streamed."""
        return self.traffic.streamed_bytes(self.params, self.grad_bytes)


class TaskId(NamedTuple):
    """Names a node of the DAG. A tuple, because graphs look it up often: its hash is cheap."""

    kind: TaskKind
    unit: int

    def __str__(self) -> str:
        return f"{self.kind}({self.unit})"


@dataclass(frozen=True, slots=True)
class Cut:
    """How a task runs on one range of its layer's parameters, from `begin` on: in equal pieces.

    us           each piece takes, with its lane and the host's memory to itself
    host_bytes   each piece reads and writes of host memory
    streamed     the states of this range visit the device
    """

    begin: int
    pieces: int
    us: float
    host_bytes: float = 0.0
    streamed: bool = False


class Work(NamedTuple):
    """What a task that runs takes.

    us       all its pieces together; 0 where nothing is measured
    params   elements
    bytes    moved over the link, or read and written by the update
    """

    resource: Resource
    cuts: tuple[Cut, ...]
    us: float
    params: int
    bytes: float = 0.0
    flops: float = 0.0


class Order(NamedTuple):
    """How much of one task must be over before another.

    by_piece   each piece waits for the same piece of the task before, where that has it
    pieces     the other waits for so many pieces; None = all of them
    """

    by_piece: bool = False
    pieces: int | None = None


@dataclass(frozen=True)
class TaskGraph:
    """Units in forward order and the DAG over `TaskId`s.

    works    the tasks that run
    orders   by task and the task that comes after it
    slots    how many pieces of streamed states are on the device at once
    """

    units: tuple[Unit, ...]
    works: dict[TaskId, Work]
    orders: dict[tuple[TaskId, TaskId], Order]
    slots: int = 0

    @functools.cached_property
    def dag(self) -> nx.DiGraph:
        """The same for networkx.

        A node has the fields of its `Work`, an edge those of its `Order`. It is made when it is
        asked for: whoever plays many graphs needs none.
        """
        import networkx as nx

        dag = nx.DiGraph()
        dag.add_nodes_from((task, work._asdict()) for task, work in self.works.items())
        dag.add_edges_from((*tasks, order._asdict()) for tasks, order in self.orders.items())
        return dag

    def total(self, figure: str, *kinds: TaskKind) -> float:
        """Sum of a figure ("us", "bytes", "params", "flops") over all tasks of these kinds."""
        return float(sum(getattr(work, figure) for task, work in self.works.items() if task.kind in kinds))

    @property
    def host_bytes(self) -> float:
        """What the step reads and writes of host memory."""
        return float(sum(cut.pieces * cut.host_bytes for work in self.works.values() for cut in work.cuts))
