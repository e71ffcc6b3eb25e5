"""What the pipeline does for the nodes that a pass has inserted.

It checks what they call, gives fake results, and notes who made them.

    Before:  mul = aten.mul(add, 2)     # meta: {}
    After:   mul = aten.mul(add, 2)     # meta: val f32[2, 4], "unit 1, made by my_pass"

A node without a note belongs to the unit of the node before it. The interface to the rest of the
program (the graph's inputs, how many outputs it has) is not a pass's to change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from hytrain_fx.errors import GraphInvariantError
from hytrain_fx.ir.pass_record import NodeNote
from hytrain_fx.passes.node_notes import NOTE_KEY, note
from hytrain_fx.passes.ops import NAMESPACE
from hytrain_fx.torch_private.operators import fake_result, operator_name


@dataclass(frozen=True)
class Before:
    """What a pass found.

    The graph's nodes, those whose results nobody took, its inputs, how many outputs it had.
    """

    nodes: frozenset[fx.Node]
    unused: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    outputs: int

    @classmethod
    def of(cls, graph: fx.Graph) -> Before:
        """Look at a graph."""
        return cls(frozenset(graph.nodes), _unused(graph), tuple(graph.find_nodes(op="placeholder")), _output_count(graph))


def finish_new_nodes(graph: fx.Graph, before: Before, made_by: str) -> Counter[str]:
    """Complete what is new in the graph and count it by operator.

    Raises GraphInvariantError for what a pass may not do.
    """
    inputs, outputs = tuple(graph.find_nodes(op="placeholder")), _output_count(graph)
    if inputs != before.inputs:
        raise GraphInvariantError(f"its inputs are {list(inputs)}, expected those captured, {list(before.inputs)}")
    if outputs != before.outputs:
        raise GraphInvariantError(f"it has {outputs} outputs, expected the {before.outputs} captured")
    added: Counter[str] = Counter()
    unit: int | None = None
    for node in graph.nodes:
        if node not in before.nodes and node.op != "output":
            _note_maker(node, unit, made_by)
            added[_called(node)] += 1
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = fake_result(node)
        unit = note(node).unit
    _drop_unused(graph, before)
    return added


def _drop_unused(graph: fx.Graph, before: Before) -> None:
    """Remove captured nodes that nobody uses any more; complain of new ones that nobody uses.

    Inductor leaves out what nobody uses, so a new node would be lost without a word.
    """
    unused = _unused(graph) - before.unused
    for node in unused - before.nodes:
        raise GraphInvariantError(f"nobody uses the result of node {node.name}, so Inductor leaves it out; expected a use of it, or a "
                                  "side effect of its operator that torch.fx.node.has_side_effect has been told of")
    if unused:
        graph.eliminate_dead_code()


def _unused(graph: fx.Graph) -> frozenset[fx.Node]:
    return frozenset(node for node in graph.nodes if node.op == "call_function" and not node.users and not node.is_impure())


def _note_maker(node: fx.Node, unit: int | None, made_by: str) -> None:
    known = note(node) if NOTE_KEY in node.meta else NodeNote(unit)
    node.meta[NOTE_KEY] = replace(known, made_by=made_by)


def _called(node: fx.Node) -> str:
    """`grad_offload` of ours, `aten.mul.Tensor` of others."""
    if node.op == "get_attr":
        return str(node.target)
    name = operator_name(node.target) if node.op == "call_function" else None
    if name is None:
        raise GraphInvariantError(
            f"node {node.name} is a {node.op} of {node.target!r}, which Inductor cannot compile; expected graph.call_function with an "
            "operator such as torch.ops.aten.mul.Tensor, or one that torch.library.custom_op makes of a function")
    return name.removeprefix(f"{NAMESPACE}.")


def _output_count(graph: fx.Graph) -> int:
    values: Any = graph.output_node().args[0]
    return len(values) if isinstance(values, tuple | list) else 1
