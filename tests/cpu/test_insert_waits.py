"""insert_waits: one wait for each unit, before the first node that takes any of its weights."""

from __future__ import annotations

import pytest
from torch import fx

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_waits import insert_waits
from hytrain_fx.passes.node_notes import rows_of
from hytrain_fx.passes.ops import WAIT
from tests.cpu import models
from tests.cpu.pass_contexts import SESSION, apply, calls, context


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", models.CASES)
def test_each_weight_is_waited_for_before_it_is_taken(name: str) -> None:
    """One wait for each unit names its weights in row order; all else comes after it.

    That is views, readers and the output.
    """
    ctx = context(GraphKind.FORWARD, name)
    apply(ctx, annotate_units, insert_waits)
    waits = calls(ctx, WAIT)
    assert sorted(rows_of(node) for node in waits) == sorted(unit.rows for unit in ctx.units)
    for node in waits:
        weights = [ctx.graph.weights[row] for row in rows_of(node)]
        assert node.args == (weights, SESSION, list(rows_of(node)))
        assert all(node < user for weight in weights for user in weight.users if user is not node)


def test_it_stands_right_before_the_first_user() -> None:
    """The node after each wait takes one of its weights: no wait comes earlier than needed."""
    ctx = context(GraphKind.FORWARD)
    apply(ctx, annotate_units, insert_waits)
    for node in calls(ctx, WAIT):
        assert set(node.next.all_input_nodes) & set(node.all_input_nodes)


def test_a_weight_that_is_only_saved_is_waited_for() -> None:
    """The forward waits for a weight that it hands to the backward without reading it.

    The backward reads it.
    """
    ctx = context(GraphKind.FORWARD)
    row, weight = next((row, node) for row, node in ctx.graph.weights.items() if any(u.op == "output" for u in node.users))
    for user in [user for user in weight.users if user.op != "output"]:
        user.replace_input_with(weight, _other_of_same_shape(ctx.graph.module.graph, weight))
    apply(ctx, annotate_units, insert_waits)
    assert row in {row for node in calls(ctx, WAIT) for row in rows_of(node)}


def test_a_weight_that_nobody_takes_is_not_waited_for() -> None:
    """A placeholder without users needs no wait."""
    ctx = context(GraphKind.FORWARD, "mlp")
    row, weight = next(iter(ctx.graph.weights.items()))
    weight.replace_all_uses_with(_other_of_same_shape(ctx.graph.module.graph, weight))
    apply(ctx, annotate_units, insert_waits)
    assert row not in {row for node in calls(ctx, WAIT) for row in rows_of(node)}


def _other_of_same_shape(graph: fx.Graph, weight: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.find_nodes(op="placeholder")[0]):
        other = graph.placeholder("other")
    other.meta = dict(weight.meta)
    return other
