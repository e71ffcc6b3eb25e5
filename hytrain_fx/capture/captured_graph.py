"""A graph of torch.compile with the managed parameters in it, and what remains once compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

from torch import fx

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

    masks_of_positions   attention calls whose mask no input of the graph has a part in
    """

    index: int
    pair: int
    kind: GraphKind
    rows: tuple[int, ...]
    grad_rows: tuple[int, ...]
    kept_grads: Mapping[int, str]
    unit_flops: Mapping[int, float]
    masks_of_positions: int
    rewrite: R
    rewrite_seconds: float
