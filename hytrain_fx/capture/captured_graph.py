"""A graph of torch.compile with the managed parameters in it, and what remains once compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.dataflow import node_flops
from hytrain_fx.capture.instance_graphs import Instance

R = TypeVar("R")


class GraphKind(StrEnum):
    """Which of AOTAutograd's graphs it is."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


@dataclass(frozen=True)
class CapturedGraph:
    """One graph on its way to Inductor, and where the managed parameters are in it.

    index        number of this graph in the order of capture; `backward_end` carries it
    pair         number of the backend call it came from; a forward and its backward share it
    module       the graph itself; the rewrite edits it in place
    weights      row -> placeholder that holds the parameter
    outputs      what the graph returned when it was captured: nodes or None
    views        row -> backward placeholders that hold a view of the parameter, saved by the
                 forward
    grads        row -> position of its gradient in `outputs`; only rows that are to be offloaded
    kept_grads   row -> why its gradient output stays
    """

    index: int
    pair: int
    kind: GraphKind
    module: fx.GraphModule
    weights: Mapping[int, fx.Node]
    outputs: tuple[Any, ...] = ()
    views: Mapping[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    grads: Mapping[int, int] = field(default_factory=dict)
    kept_grads: Mapping[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`02.backward`, as in dump file names."""
        return f"{self.index:02}.{self.kind}"

    def gradient(self, row: int) -> fx.Node:
        """The node that makes the row's gradient."""
        node: fx.Node = self.outputs[self.grads[row]]
        return node

    def holders(self, row: int) -> tuple[fx.Node, ...]:
        """The placeholders that hold the row's weight or a saved view of it."""
        own = (self.weights[row],) if row in self.weights else ()
        return own + self.views.get(row, ())

    @property
    def held_rows(self) -> tuple[int, ...]:
        """Rows whose weight, or a view of it, comes into this graph."""
        return tuple(sorted({*self.weights, *self.views}))


@dataclass(frozen=True)
class CompiledGraph(Generic[R]):
    """What is kept of a captured graph: its place, each unit's FLOPs, and the rewrite's result.

    units                in the order in which a forward first reads their weights
    masks_of_positions   attention calls whose mask no input of the graph has a part in
    """

    index: int
    pair: int
    kind: GraphKind
    rows: tuple[int, ...]
    grad_rows: tuple[int, ...]
    kept_grads: Mapping[int, str]
    units: tuple[int, ...]
    unit_flops: Mapping[int, float]
    masks_of_positions: int
    rewrite: R
    rewrite_seconds: float

    def run_by(self, instance: Instance, index: int, unit_of: Mapping[int, int]) -> CompiledGraph[R]:
        """What this graph is for another set of parameters that runs its code.

        `rewrite` is still this graph's own.

        unit_of    the unit of each row
        """
        row_of, units = instance.row_of, instance.units(unit_of)
        kept_grads = {row_of[row]: why for row, why in self.kept_grads.items()}
        return replace(
            self, index=index, pair=instance.pair, rows=tuple(instance.rows(self.rows)), grad_rows=tuple(instance.rows(self.grad_rows)),
            kept_grads=kept_grads, units=tuple(units[unit] for unit in self.units),
            unit_flops={units[unit]: flops for unit, flops in self.unit_flops.items()}, rewrite_seconds=0.0)


def first_use_order(graph: CapturedGraph, unit_of: Mapping[int, int]) -> tuple[int, ...]:
    """The units in the order in which a forward graph first reads any of their weights."""
    order = dataflow.Order.of(graph.module.graph)
    first: dict[int, int] = {}
    for row, holder in graph.weights.items():
        for reader in dataflow.readers([holder]):
            if reader.op != "output":
                unit = unit_of[row]
                first[unit] = min(first.get(unit, order.position[reader]), order.position[reader])
    return tuple(sorted(first, key=first.__getitem__))


def unit_flops(graph: CapturedGraph, unit_of: Mapping[int, int]) -> dict[int, float]:
    """Floating-point operations of each unit in this graph, by torch's formulas.

    The formulas are in `torch.utils.flop_counter`.

    A node belongs to the unit whose weight it reads or whose gradient it makes; any other to the
    unit of the node before it. Nodes before the first such node belong to the first unit met.
    """
    owner = {reader: unit_of[row] for row in graph.held_rows for reader in dataflow.readers(graph.holders(row))}
    owner.update({dataflow.view_base(graph.gradient(row)): unit_of[row] for row in graph.grads})
    total: dict[int, float] = {}
    unit: int | None = None
    pending = 0.0
    for node in graph.module.graph.nodes:
        if node.op == "output":
            break
        unit = owner.get(node, unit)
        pending += node_flops(node)
        if unit is not None:
            total[unit], pending = total.get(unit, 0.0) + pending, 0.0
    return total


def saved_views(graph: CapturedGraph) -> dict[str, int]:
    """Outputs of a forward graph that are views of a weight, by name.

    The backward's placeholder has the same name.
    """
    row_of = {node: row for row, node in graph.weights.items()}
    values = (v for v in graph.outputs if isinstance(v, fx.Node) and v not in row_of)
    return {v.name: row_of[base] for v in values if (base := dataflow.view_base(v)) in row_of}


def may_move_weights(graph: CapturedGraph) -> bool:
    """Whether Inductor's layout optimization could copy a weight before its `wait`.

    It takes 4-dimensional values only.
    """
    forward = graph.kind is not GraphKind.BACKWARD
    return forward and any(node.meta["val"].dim() == 4 for node in graph.weights.values())
