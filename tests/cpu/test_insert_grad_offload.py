"""insert_grad_offload: one node for each unit, right after its last gradient."""

from __future__ import annotations

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.node_notes import note, rows_of
from hytrain_fx.passes.ops import GRAD_OFFLOAD
from tests.cpu.pass_contexts import SESSION, apply, calls, context, rows_of_unit


def test_one_node_for_each_unit_with_all_its_gradients() -> None:
    """Each unit's gradients go in one node, in row order; each has its row's place."""
    ctx = context(GraphKind.BACKWARD)
    notes = apply(ctx, annotate_units, insert_grad_offload)
    nodes = calls(ctx, GRAD_OFFLOAD)
    assert sorted(rows_of(node) for node in nodes) == sorted(unit.rows for unit in ctx.units)
    for node in nodes:
        assert node.args == ([ctx.graph.gradient(row) for row in rows_of(node)], SESSION, list(rows_of(node)))
    assert notes == ("27 gradients of 4 units are offloaded",)


def test_it_stands_right_behind_the_last_gradient() -> None:
    """The node before it is the one that makes the unit's last gradient."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload)
    for node in calls(ctx, GRAD_OFFLOAD):
        assert node.prev is max(node.all_input_nodes)


def test_the_tied_embedding_goes_at_its_summed_gradient() -> None:
    """The embedding's row is offloaded once, after the sum of both its uses, at the very end."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload)
    last = calls(ctx, GRAD_OFFLOAD)[-1]
    assert list(rows_of(last)) == rows_of_unit(ctx, "wte")
    assert last.next is ctx.graph.module.graph.output_node()


def test_the_token_is_an_empty_tensor() -> None:
    """The fake result has no elements and lives where the gradient lives."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload)
    for node in calls(ctx, GRAD_OFFLOAD):
        assert node.meta["val"].shape == (0,)
        assert node.meta["val"].device == ctx.graph.gradient(rows_of(node)[0]).meta["val"].device
        assert ctx.units[note(node).unit or 0].rows == rows_of(node)


def test_a_frozen_base_is_left_alone() -> None:
    """Only the adapters' gradients exist, and only they are offloaded."""
    ctx = context(GraphKind.BACKWARD, "adapters")
    apply(ctx, annotate_units, insert_grad_offload)
    assert sum(len(rows_of(node)) for node in calls(ctx, GRAD_OFFLOAD)) == 4
