"""What a pass is: a frozen value with a name, a contract and one call that edits a graph in place.

A pass decides nothing. It finds nodes by target and by `meta`, gives each new node `meta["val"]`, and leaves lint, verification,
timing and text to the pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import fx

from hytrain_fx.capture.captured_graph import CapturedGraph
from hytrain_fx.capture.units import Unit, unit_of_rows

NOTE_KEY = "hytrain_fx"  # where node.meta holds a NodeNote
Notes = tuple[str, ...]


class Fact(StrEnum):
    """What holds of a graph once some pass has run."""

    ANNOTATED = "nodes are annotated"
    GRADS_OFFLOADED = "every managed gradient is offloaded"
    STEPS_INSERTED = "updates stand behind each offload"
    RELOADS_INSERTED = "reloads stand behind each update"
    RELEASED = "weights that can be shown to be read are released"
    BACKWARD_ENDED = "the end of the backward releases the rest"
    OUTPUTS_DROPPED = "offloaded gradients are no outputs"
    WAITS_INSERTED = "every reader of a weight is behind a wait"


@dataclass(frozen=True)
class PassContract:
    """Facts that must hold before a pass, that hold after it, and that must not hold yet."""

    requires: frozenset[Fact] = frozenset()
    provides: frozenset[Fact] = frozenset()
    conflicts: frozenset[Fact] = frozenset()


@dataclass(frozen=True)
class NodeNote:
    """What the first pass says of a node; later passes act on it. Rows are in ascending order.

    unit    the unit whose work the node is (None before the first unit's)
    holds   row whose weight, or a saved view of it, this placeholder holds
    reads   rows whose weight the node reads
    makes   rows whose gradient is this node's result
    """

    unit: int | None = None
    holds: int | None = None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"unit {self.unit}" if self.unit is not None else ""]
        parts += [f"{word} {rows}" for word, rows in (("reads", self.reads), ("makes", self.makes)) if rows]
        parts.append(f"holds {self.holds}" if self.holds is not None else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class PassContext:
    """What a pass may ask: the captured graph, the units, the session whose number the nodes carry."""

    graph: CapturedGraph
    units: tuple[Unit, ...]
    session: int

    @cached_property
    def unit_of(self) -> Mapping[int, int]:
        """The number of the unit that each row belongs to."""
        return unit_of_rows(self.units)


@dataclass(frozen=True)
class PassRecord:
    """What one pass did to one graph. `before` and `after` are the graph's Python text."""

    name: str
    notes: Notes
    added: Mapping[str, int] = field(default_factory=dict)
    duration_us: float = 0.0
    rules: tuple[str, ...] = ()
    before: str = ""
    after: str = ""


class Pass(Protocol):
    """A rewrite of one graph, in place."""

    name: ClassVar[str]
    contract: ClassVar[PassContract]

    def __call__(self, module: fx.GraphModule, context: PassContext) -> Notes:
        """Edit the graph; the notes say what was done, for people."""


def note(node: fx.Node) -> NodeNote:
    """The node's annotation; an empty one where it has none."""
    found = node.meta.get(NOTE_KEY)
    return found if isinstance(found, NodeNote) else NodeNote()


def rows_of(node: fx.Node) -> tuple[int, ...]:
    """The rows argument of an inserted node: its last one."""
    return tuple(node.args[-1])  # type: ignore[arg-type]


def by_unit(rows: Sequence[int], unit_of: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Rows grouped by unit, ascending in both."""
    groups: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda r: (unit_of[r], r)):
        groups.setdefault(unit_of[row], []).append(row)
    return {unit: tuple(found) for unit, found in groups.items()}


# ---- How a node of ours gets into a graph: where, with which meta, under which fake tensors ----


def insert(graph: fx.Graph, target: Any, args: tuple[Any, ...], unit: int | None, value: torch.Tensor | None = None) -> fx.Node:
    """Call `target` at the graph's insertion point. `value` is the fake result, None for an operator without one."""
    node = graph.call_function(target, args)
    node.meta["val"] = value
    node.meta[NOTE_KEY] = NodeNote(unit)
    return node


@contextlib.contextmanager
def after_last(graph: fx.Graph, nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Insert right behind the last of `nodes` in graph order, and behind all placeholders."""
    last = max(nodes)
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        yield
