"""Nodes as passes see them.

The note of each, the rows of ours, and how a node of ours gets into a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from hytrain_fx.ir.pass_record import NodeNote

NOTE_KEY = "hytrain_fx"
"""Where `node.meta` holds a `NodeNote`."""


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


def insert(graph: fx.Graph, target: Any, args: tuple[Any, ...], unit: int | None, value: torch.Tensor | None = None) -> fx.Node:
    """Call `target` at the graph's insertion point.

    `value` is the fake result, None for an operator without one.
    """
    node = graph.call_function(target, args)
    node.meta["val"] = value
    node.meta[NOTE_KEY] = NodeNote(unit)
    return node


@contextlib.contextmanager
def after_last(graph: fx.Graph, nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Insert right after the last of `nodes` in graph order, and after all placeholders."""
    last = max(nodes)
    while last.next.op == "placeholder":
        last = last.next
    with graph.inserting_after(last):
        yield
