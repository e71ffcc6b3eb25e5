"""Readers of weights and order of nodes, on graphs built by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
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
    assert dataflow.ProductsAndSums.of(graph).sums == {nodes["mm"]: nodes["add"]}
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.sum.default, (nodes["mm"],))
    assert not dataflow.ProductsAndSums.of(graph).sums
    assert dataflow.ProductsAndSums.of(graph, frozenset({aten.sum.default})).sums == {nodes["mm"]: nodes["add"]}
    for other in (lambda x, w: aten.add(aten.mm(x, w), x, alpha=2), lambda x, w: aten.add(aten.bmm(x[None], w[None])[0], x),
                  lambda x, w: aten.add(aten.view(aten.mm(x, w), (1, 3, 3)), x), lambda x, w: aten.sub(aten.mm(x, w), x),
                  lambda x, w: aten.add(aten.mm(x, w), 1), lambda x, w: aten.add(aten.mm(x, w), aten.view(x, (3, 1, 3)))):
        graph, _ = traced(other, (3, 3), (3, 3))
        assert not dataflow.ProductsAndSums.of(graph).sums


def _on_gpu(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """As `traced`, of tensors on a GPU that need not be there."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes))


def _counted(graph: fx.Graph) -> Counter[str]:
    return Counter(node.name.partition("_")[0] for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default))


def _of_inductor(module: fx.GraphModule) -> Counter[str]:
    """How many products of each kind its own passes leave."""
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.virtualized import V

    mode: Any = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
    with V.set_fake_mode(mode), mode:
        post_grad.lazy_init()
        post_grad.remove_noop_ops(module.graph)
        for patterns in post_grad.pass_patterns:
            patterns.apply(module.graph)
    module.graph.eliminate_dead_code()
    return Counter("addmm" if node.target is aten.addmm.default else "mm" for node in module.graph.nodes
                   if node.target in (aten.mm.default, aten.addmm.default))


def _foretold(graph: fx.Graph, choices: dataflow.ProductsAndSums) -> Counter[str]:
    found, joined = _counted(graph), len(set(choices.sums.values()))
    products, wholes = found["mm"] - joined + len(choices.apart), found["addmm"] + joined - len(choices.apart)
    return Counter({kind: count for kind, count in (("mm", products), ("addmm", wholes)) if count})


def _three(a: Any, b: Any, c: Any, d: Any) -> Any:
    return aten.sum(aten.mm(a, b) + aten.mm(b, c) + aten.mm(c, d), (0,))


_SQUARES = ((3, 3),) * 4
_CHOICES: dict[str, tuple[Callable[..., Any], set[str], set[str]]] = {  # of (3,) and four (3, 3): sums that are joined, addmm taken apart
    "pointwise": (lambda v, a, b, c, d: aten.relu(aten.add(aten.mm(a, b), a)), set(), set()),
    "a view that is": (lambda v, a, b, c, d: aten.relu(aten.t(aten.add(aten.mm(a, b), a))), set(), set()),
    "a product": (lambda v, a, b, c, d: aten.mm(aten.add(aten.mm(a, b), a), b), {"add"}, set()),
    "a reduction": (lambda v, a, b, c, d: aten.sum(aten.add(aten.mm(a, b), a)), {"add"}, set()),
    "a sum of three": (lambda v, *of: _three(*of), {"add", "add_1"}, set()),
    "a sum of three, pointwise": (lambda v, a, b, c, d: aten.relu(aten.mm(a, b) + aten.mm(b, c) + aten.mm(c, d)), set(), set()),
    "addmm": (lambda v, a, b, c, d: aten.relu(aten.addmm(v, a, b)), set(), {"addmm"}),
    "addmm, a view": (lambda v, a, b, c, d: aten.relu(aten.view(aten.addmm(v, a, b), (9,))), set(), {"addmm"}),
    "addmm, a product": (lambda v, a, b, c, d: aten.mm(aten.addmm(v, a, b), b), set(), set()),
    "addmm, a copy of the same form": (lambda v, a, b, c, d: aten.mm(aten.clone(aten.addmm(v, a, b)), b), set(), set()),
    "addmm, two": (lambda v, a, b, c, d: (lambda y: (aten.relu(y), aten.sum(y)))(aten.addmm(v, a, b)), set(), set()),
    "addmm, the output": (lambda v, a, b, c, d: aten.addmm(v, a, b), set(), set()),
    "addmm, a sum that is joined": (lambda v, a, b, c, d: aten.sum(aten.addmm(v, a, b) + aten.mm(c, d)), {"add"}, set()),
    "addmm, to which another adds": (lambda v, a, b, c, d: aten.relu(aten.addmm(aten.addmm(v, a, b), c, d)), set(), {"addmm", "addmm_1"}),
    "addmm, that another takes": (lambda v, a, b, c, d: aten.relu(aten.addmm(v, aten.addmm(v, a, b), c)), set(), {"addmm_1"}),
    "addmm, scaled": (lambda v, a, b, c, d: aten.relu(aten.addmm(v, a, b, beta=0.5, alpha=2)), set(), {"addmm"}),
}


@pytest.mark.parametrize("of", _CHOICES)
def test_on_a_gpu_products_and_sums_become_what_inductor_makes_of_them(of: str) -> None:
    """By its own passes, which run without a GPU."""
    function, joined, apart = _CHOICES[of]
    module = _on_gpu(function, (3,), *_SQUARES)
    choices = dataflow.ProductsAndSums.of(module.graph)
    assert {node.name for node in choices.sums.values()} == joined
    assert {node.name for node in choices.apart} == apart
    foretold = _foretold(module.graph, choices)
    assert _of_inductor(module) == foretold
    half = _on_gpu(function, (3,), *_SQUARES, dtype=torch.bfloat16)
    assert not dataflow.ProductsAndSums.of(half.graph).apart


def _drawn(seed: int, bias: Any, *made: Any) -> Any:
    chance, values = random.Random(seed), list(made)
    for _ in range(chance.randint(3, 12)):
        x, y, z = (chance.choice(values[-5:]) for _ in range(3))
        how = chance.randrange(8)
        values.append(
            aten.mm(x, y) if how < 2 else aten.addmm(bias, x, y) if how == 2 else aten.addmm(z, x, y) if how == 3 else aten.add(x, y)
            if how < 6 and x is not y else aten.relu(x) if how == 6 else aten.t(x))
    return aten.sum(values[-1]), aten.relu(values[-2]), values[-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(20))
def test_choices_in_drawn_graphs_are_inductors(seed: int, dtype: torch.dtype) -> None:
    """Products, sums, views and pointwise code in any order."""
    module = _on_gpu(partial(_drawn, seed), (3,), *_SQUARES, dtype=dtype)
    module.graph.eliminate_dead_code()
    foretold = _foretold(module.graph, dataflow.ProductsAndSums.of(module.graph))
    assert _of_inductor(module) == foretold


def test_on_a_cpu_no_addmm_is_taken_apart() -> None:
    """There each is one call. On a GPU what is ignored counts as no reader."""
    graph, _ = traced(lambda v, x, w: aten.relu(aten.addmm(v, x, w)), (3,), (3, 3), (3, 3))
    assert not dataflow.ProductsAndSums.of(graph).apart
    module = _on_gpu(lambda v, x, w: (lambda y: (aten.relu(y), aten.sum(y)))(aten.addmm(v, x, w)), (3,), (3, 3), (3, 3))
    (whole,) = module.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert dataflow.ProductsAndSums.of(module.graph, frozenset({aten.sum.default})).apart == {whole}
