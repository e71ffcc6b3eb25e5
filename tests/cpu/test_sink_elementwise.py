"""sink_elementwise: what only elementwise ops read comes right before its first reader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.sink_elementwise import sink_elementwise
from tests.cpu.pass_contexts import apply, context

aten = torch.ops.aten
WIDTH = 4


CONTEXT = cast(Any, SimpleNamespace(graph=SimpleNamespace(grads={0: 0})))
"""Of a graph that makes a gradient."""


def sunk(graph: fx.Graph) -> list[str]:
    """The names of its nodes in their order after the pass."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    sink_elementwise(module, CONTEXT)
    module.graph.lint()
    return [node.name for node in module.graph.nodes if node.op == "call_function"]


def named(graph: fx.Graph, name: str, target: Any, *args: Any) -> fx.Node:
    """A call whose node has this name."""
    return graph.create_node("call_function", target, args, name=name)


def sum_over_layers() -> tuple[fx.Graph, dict[str, fx.Node]]:
    """The docstring's graph: a shared value's gradient, the sum over two layers."""
    graph = fx.Graph()
    c, g2, w = (graph.placeholder(name) for name in ("c", "g2", "w"))
    nodes = {"s": named(graph, "s", aten.sigmoid.default, c)}
    nodes["a"] = named(graph, "a", aten.mul.Tensor, g2, nodes["s"])
    nodes["g1"] = named(graph, "g1", aten.mm.default, g2, w)
    nodes["b"] = named(graph, "b", aten.mul.Tensor, nodes["g1"], nodes["s"])
    nodes["t"] = named(graph, "t", aten.add.Tensor, nodes["a"], nodes["b"])
    nodes["d"] = named(graph, "d", aten.mm.default, nodes["t"], w)
    graph.output((nodes["d"],))
    return graph, nodes


def test_a_sum_over_layers_comes_at_its_end() -> None:
    """The terms, and what they share, stand behind the last layer's product."""
    graph, _ = sum_over_layers()
    assert sunk(graph) == ["g1", "s", "a", "b", "t", "d"]


def test_nothing_goes_past_a_reader_that_stores_it() -> None:
    """A product reads what a term reads, directly or by a view: the term stays before it."""
    for view in (False, True):
        graph, nodes = sum_over_layers()
        with graph.inserting_before(nodes["a"]):
            term = named(graph, "term", aten.neg.default, nodes["s"])
        with graph.inserting_before(nodes["g1"]):
            operand = named(graph, "v", aten.view.default, term, [WIDTH, WIDTH]) if view else term
            named(graph, "stores", aten.mm.default, operand, operand)
        nodes["a"].replace_input_with(nodes["s"], term)
        order = sunk(graph)
        assert order.index("a") < order.index("stores") < order.index("g1")
        assert order.index("b") > order.index("g1")


@pytest.mark.parametrize("effect", [aten.copy_.default, aten.mul_.Tensor])
def test_nothing_goes_past_a_side_effect(effect: Any) -> None:
    """What is written may be what was read."""
    graph, nodes = sum_over_layers()
    c, g2, _ = graph.find_nodes(op="placeholder")
    before = [node.name for node in graph.nodes if node.op == "call_function"]
    with graph.inserting_before(nodes["g1"]):
        named(graph, "effect", effect, c, g2)
    assert [name for name in sunk(graph) if name != "effect"] == before


def test_random_numbers_stay() -> None:
    """Another order would draw others."""
    graph, nodes = sum_over_layers()
    with graph.inserting_before(nodes["a"]):
        drawn = named(graph, "drawn", aten.rand_like.default, nodes["s"])
    nodes["a"].replace_input_with(nodes["s"], drawn)
    order = sunk(graph)
    assert order.index("s") < order.index("drawn") < order.index("g1")


def test_other_nodes_go_past_random_numbers() -> None:
    """On a GPU the backward of attention is tagged as one that draws; a sum passes it."""
    for draws in (aten._scaled_dot_product_cudnn_attention_backward.default, aten._scaled_dot_product_efficient_attention_backward.default):
        graph, nodes = sum_over_layers()
        with graph.inserting_after(nodes["a"]):
            backward = named(graph, "backward", draws, *graph.find_nodes(op="placeholder"))
        nodes["b"].replace_input_with(nodes["g1"], backward)
        assert sunk(graph) == ["backward", "g1", "s", "a", "b", "t", "d"]


WRITES = aten.mul_.Scalar
OPS = [(aten.mul.Tensor, 2), (aten.add.Tensor, 2), (aten.sigmoid.default, 1), (aten.mm.default, 2), (aten.t.default, 1),
       (WRITES, 1), (aten.neg.default, 1)]


@given(st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=24))
def test_any_graph_computes_the_same(drawn: list[tuple[int, int, int]]) -> None:
    """Drawn graphs with products, views and writes have the same bits; no node is lost or new."""
    graph = fx.Graph()
    values = [graph.placeholder(f"x{index}") for index in range(3)]
    for op, *operands in drawn:
        target, count = OPS[op]
        of = tuple(values[index % len(values)] for index in operands[:count])
        values.append(graph.call_function(target, (*of, 0.5) if target is WRITES else of))
    graph.output(tuple(value for value in values if not value.users))
    module = fx.GraphModule(torch.nn.Module(), graph)
    inputs = torch.randn(3, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    expected = module(*inputs.clone())
    names = {node.name for node in module.graph.nodes}
    sink_elementwise(module, CONTEXT)
    module.graph.lint()
    module.recompile()
    assert {node.name for node in module.graph.nodes} == names
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(module(*inputs.clone()), expected, strict=True))


def test_again_it_finds_nothing() -> None:
    """In a real backward nodes sink once. None of them writes."""
    ctx = context(GraphKind.BACKWARD)
    (first,) = apply(ctx, annotate_units, sink_elementwise)
    assert int(first.split()[0]) > 0
    assert apply(ctx, sink_elementwise) == ("0 elementwise nodes come later",)
    assert not any(dataflow.mutates(node) for node in ctx.graph.module.graph.nodes)
