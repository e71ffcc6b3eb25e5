"""Readers of weights and order of nodes, on graphs built by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from hytrain_fx.capture import dataflow

aten = torch.ops.aten


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """The aten graph of a function of tensors, with `meta["val"]`, and its nodes by name."""
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph
    return graph, {node.name: node for node in graph.nodes}


def weight_of(graph: fx.Graph) -> fx.Node:
    """The second placeholder."""
    node: fx.Node = graph.find_nodes(op="placeholder")[1]
    return node


def test_views_are_seen_through() -> None:
    """A product with a transposed and sliced weight reads the weight; the views are no readers."""
    graph, nodes = traced(lambda x, w: aten.mm(x, aten.slice(aten.t(w), 1, 0, 2)), (2, 3), (4, 3))
    assert dataflow.readers([weight_of(graph)]) == (nodes["mm"],)
    assert dataflow.view_base(nodes["slice_1"]) is weight_of(graph)


def test_a_product_stands_alone() -> None:
    """A weight read by products only is shown to be read by their results."""
    graph, nodes = traced(lambda x, w: aten.mm(aten.mm(x, w), w), (2, 3), (3, 3))
    assert set(dataflow.standalone_readers([weight_of(graph)]) or ()) == {nodes["mm"], nodes["mm_1"]}


def test_a_pointwise_reader_does_not_stand_alone() -> None:
    """A weight that is multiplied element by element may be read in any later kernel."""
    graph, _ = traced(lambda x, w: aten.mm(aten.mul(x, w), w), (3, 3), (3, 3))
    assert dataflow.standalone_readers([weight_of(graph)]) is None


def test_the_bias_of_addmm_does_not_stand_alone() -> None:
    """Inductor may add the bias in a kernel of its own, so only the factors of addmm count."""
    graph, nodes = traced(lambda x, w: aten.addmm(w, x, x), (3, 3), (3, 3))
    assert dataflow.standalone_readers([weight_of(graph)]) is None
    assert dataflow.standalone_readers([graph.find_nodes(op="placeholder")[0]]) == (nodes["addmm"],)


def test_a_cast_for_a_product_is_seen_through() -> None:
    """A cast whose readers all stand alone is made before them."""
    graph, nodes = traced(lambda x, w: aten.mm(x, aten._to_copy(w, dtype=torch.float64)).sum(), (3, 3), (3, 3))
    assert nodes["mm"] in (dataflow.standalone_readers([weight_of(graph)]) or ())
    graph, _ = traced(lambda x, w: aten.relu(aten._to_copy(w, dtype=torch.float64)), (3, 3), (3, 3))
    assert dataflow.standalone_readers([weight_of(graph)]) is None


def test_a_weight_nobody_reads_needs_nothing() -> None:
    """A weight that nobody reads has no condition."""
    graph, _ = traced(lambda x, w: aten.relu(x), (3, 3), (3, 3))
    assert dataflow.standalone_readers([weight_of(graph)]) == ()


def test_the_convolution_backward_reads_its_weight_by_an_item() -> None:
    """An operator with several results is waited for through one of them."""

    def backward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sizes = ([0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        made: tuple[torch.Tensor, ...] = aten.convolution_backward(x, x, w, *sizes, [True, False, False])
        return made[0]

    graph, nodes = traced(backward, (1, 2, 3, 3), (2, 2, 1, 1))
    assert dataflow.standalone_readers([weight_of(graph)]) == (nodes["convolution_backward"],)
    assert dataflow.result_tensor(nodes["convolution_backward"]) is nodes["getitem"]


def test_the_frontier_needs_all_others() -> None:
    """Of a chain only the last is kept; of two branches both are."""
    graph, nodes = traced(lambda x, w: (aten.mm(aten.mm(x, w), w), aten.mm(w, w)), (3, 3), (3, 3))
    order = dataflow.Order.of(graph)
    assert order.frontier([nodes["mm"], nodes["mm_1"], nodes["mm_2"]]) == (nodes["mm_1"], nodes["mm_2"])
    assert order.reaches(nodes["mm"], nodes["mm_1"])
    assert not order.reaches(nodes["mm_1"], nodes["mm"])
    assert not order.reaches(nodes["mm"], nodes["mm_2"])


def test_what_is_reached_needs_one_of_them() -> None:
    """What is reached from nodes is those nodes, and all that needs one of them.

    This agrees with `reaches` for every node of a graph.
    """
    graph, nodes = traced(lambda x, w: (aten.mm(aten.mm(x, w), w), aten.mm(w, w), aten.mul(x, 2)), (3, 3), (3, 3))
    order = dataflow.Order.of(graph)
    early = [nodes["mm"], nodes["mm_2"]]
    assert order.reached_from(early) == {node for node in graph.nodes if any(order.reaches(one, node) for one in early)}
    assert nodes["mm_1"] in order.reached_from(early)
    assert nodes["mul"] not in order.reached_from(early)
    assert order.reached_from([]) == frozenset()


def test_mutation_is_told_by_the_schema() -> None:
    """An in-place operator writes, a functional one does not."""
    _, nodes = traced(lambda x, w: aten.add_(x, aten.mul(w, 2)), (3,), (3,))
    assert dataflow.mutates(nodes["add_"])
    assert not dataflow.mutates(nodes["mul"])


def test_a_product_is_joined_with_the_one_sum_that_reads_it() -> None:
    """Not if something else reads it, the sum is scaled, or it is no `mm`.

    What is ignored does not count.
    """
    graph, nodes = traced(lambda x, w: aten.relu(aten.add(aten.mm(x, w), x)), (3, 3), (3, 3))
    assert dataflow.joined_sum(nodes["mm"]) is nodes["add"]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.sum.default, (nodes["mm"],))
    assert dataflow.joined_sum(nodes["mm"]) is None
    assert dataflow.joined_sum(nodes["mm"], frozenset({aten.sum.default})) is nodes["add"]
    for other in (lambda x, w: aten.add(aten.mm(x, w), x, alpha=2), lambda x, w: aten.add(aten.bmm(x[None], w[None])[0], x),
                  lambda x, w: aten.add(aten.view(aten.mm(x, w), (1, 3, 3)), x), lambda x, w: aten.sub(aten.mm(x, w), x)):
        _, nodes = traced(other, (3, 3), (3, 3))
        assert all(dataflow.joined_sum(node) is None for name, node in nodes.items() if "mm" in name)


def _read_sum(reader: Callable[[Any], Any], x: Any, w: Any) -> Any:
    return reader(aten.add(aten.mm(x, w), x))


def test_on_a_gpu_a_sum_that_pointwise_code_reads_is_not_joined() -> None:
    """Inductor makes it part of that code's kernel. A sum that a product reads is joined."""
    for reader, joined in ((aten.relu, False), (lambda y: aten.relu(aten.t(y)), False), (lambda y: aten.mm(y, y), True), (aten.sum, True)):
        _, nodes = traced(partial(_read_sum, reader), (3, 3), (3, 3))
        nodes["mm"].meta["val"] = torch.empty(3, 3, device="meta")  # no CPU
        assert (dataflow.joined_sum(nodes["mm"]) is nodes["add"]) == joined


def _read_addmm(reader: Callable[[Any], Any], bias: Any, x: Any, w: Any) -> Any:
    return reader(aten.addmm(bias, x, w))


def test_on_a_gpu_an_addmm_that_pointwise_code_reads_is_taken_apart() -> None:
    """Not on a CPU, in 16 bits, with factors, or if something else reads it."""
    for reader, apart in ((aten.relu, True), (lambda y: aten.relu(aten.view(y, (9,))), True), (lambda y: aten.mm(y, y), False),
                          (lambda y: (aten.relu(y), aten.sum(y)), False), (lambda y: y, False)):
        _, nodes = traced(partial(_read_addmm, reader), (3,), (3, 3), (3, 3))
        assert not dataflow.is_taken_apart(nodes["addmm"])
        nodes["addmm"].meta["val"] = torch.empty(3, 3, device="meta")  # no CPU
        assert dataflow.is_taken_apart(nodes["addmm"]) == apart
        nodes["addmm"].meta["val"] = torch.empty(3, 3, device="meta", dtype=torch.bfloat16)
        assert not dataflow.is_taken_apart(nodes["addmm"])
    _, nodes = traced(lambda bias, x, w: aten.relu(aten.addmm(bias, x, w, alpha=2)), (3,), (3, 3), (3, 3))
    nodes["addmm"].meta["val"] = torch.empty(3, 3, device="meta")
    assert not dataflow.is_taken_apart(nodes["addmm"])


def test_a_sum_that_is_ignored_keeps_no_addmm_whole() -> None:
    """What is there for order only does not count as a reader."""
    _, nodes = traced(partial(_read_addmm, lambda y: (aten.relu(y), aten.sum(y))), (3,), (3, 3), (3, 3))
    nodes["addmm"].meta["val"] = torch.empty(3, 3, device="meta")
    assert dataflow.is_taken_apart(nodes["addmm"], frozenset({aten.sum.default}))
