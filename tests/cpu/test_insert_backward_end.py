"""insert_backward_end: the last node of a backward graph, after everything."""

from __future__ import annotations

import pytest

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.insert_release import released_rows
from hytrain_fx.passes.node_notes import rows_of
from hytrain_fx.passes.ops import BACKWARD_END, GPU_STEP, RELEASE
from hytrain_fx.passes.pipeline import DEFAULT_PASSES, of_kind
from tests.cpu import models
from tests.cpu.pass_contexts import SESSION, apply, calls, context


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", models.CASES)
def test_it_releases_exactly_what_is_left(name: str) -> None:
    """Releases and the end together name each row of the graph once.

    The end carries session and graph, and is the last call.
    """
    ctx = context(GraphKind.BACKWARD, name)
    apply(ctx, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD)[:6])
    (end,) = calls(ctx, BACKWARD_END)
    early = [row for node in calls(ctx, RELEASE) for row in rows_of(node)]
    assert sorted([*early, *rows_of(end)]) == list(released_rows(ctx))
    assert end.args[1:3] == (SESSION, ctx.graph.index)
    assert end.next is ctx.graph.module.graph.output_node()


def test_it_comes_after_outputs_and_tokens() -> None:
    """Every last token, and every output that stays, is among its operands."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD)[:6])
    (end,) = calls(ctx, BACKWARD_END)
    assert set(calls(ctx, GPU_STEP)) <= set(end.all_input_nodes)
    order = dataflow.Order.of(ctx.graph.module.graph)
    for position, value in enumerate(ctx.graph.outputs):
        if position not in ctx.graph.grads.values() and value is not None:
            assert order.reaches(value, end)


def test_a_graph_without_managed_rows_stays_as_it_is() -> None:
    """The graphs of a loss after a graph break have no row: no node is inserted."""
    ctx = context(GraphKind.BACKWARD)
    empty = type(ctx)(type(ctx.graph)(5, 1, GraphKind.BACKWARD, ctx.graph.module, {}, ctx.graph.outputs), ctx.units, SESSION)
    before = str(ctx.graph.module.graph)
    assert apply(empty, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD))
    assert str(ctx.graph.module.graph) == before
