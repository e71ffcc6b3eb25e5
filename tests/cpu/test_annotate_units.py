"""annotate_units: which rows each node holds, reads and makes, and its unit."""

from __future__ import annotations

import torch
from torch import fx

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.ir.pass_record import NodeNote
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.node_notes import NOTE_KEY, note
from tests.cpu.pass_contexts import apply, context, rows_of_unit

aten = torch.ops.aten


def test_it_changes_nothing_but_meta() -> None:
    """The graph's text is the same before and after."""
    ctx = context(GraphKind.BACKWARD)
    before = str(ctx.graph.module.graph)
    apply(ctx, annotate_units)
    assert str(ctx.graph.module.graph) == before


def test_placeholders_hold_their_rows() -> None:
    """Each weight's placeholder, and no other, holds its row."""
    ctx = context(GraphKind.FORWARD)
    apply(ctx, annotate_units)
    held = {note(node).holds: node for node in ctx.graph.module.graph.nodes if note(node).holds is not None}
    assert held == dict(ctx.graph.weights)


def test_gradients_are_made_where_the_outputs_say() -> None:
    """The node that a gradient output names makes that row's gradient."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units)
    made = {row: node for node in ctx.graph.module.graph.nodes for row in note(node).makes}
    assert made == {row: ctx.graph.outputs[position] for row, position in ctx.graph.grads.items()}


def test_readers_are_found_through_views() -> None:
    """A product with a transposed weight reads its row, the transposition does not."""
    ctx = context(GraphKind.FORWARD)
    apply(ctx, annotate_units)
    products = ctx.graph.module.graph.find_nodes(op="call_function", target=aten.mm.default)
    (head,) = (node for node in products if note(node).reads)
    assert note(head).reads == (rows_of_unit(ctx, "wte")[0],)
    views = ctx.graph.module.graph.find_nodes(op="call_function", target=aten.permute.default)
    assert not any(note(view).reads for view in views)


def test_a_node_without_weights_belongs_to_the_unit_before_it() -> None:
    """Attention between two layers' weights belongs to its own layer.

    Units follow each other in forward order.
    """
    ctx = context(GraphKind.FORWARD)
    apply(ctx, annotate_units)
    work = [note(node).unit for node in ctx.graph.module.graph.nodes if node.op == "call_function"]
    changes = [unit for i, unit in enumerate(work) if i == 0 or work[i - 1] != unit]
    names = [ctx.units[unit].name for unit in changes if unit is not None]
    assert names == ["wte", "h.0", "h.1", "ln_f", "wte"]


def test_a_note_reads_well() -> None:
    """A note's text says what is set and nothing else."""
    assert str(NodeNote(1, reads=(3,), makes=(4, 5))) == "unit 1, reads (3,), makes (4, 5)"
    assert str(NodeNote(2, holds=0)) == "unit 2, holds 0"
    assert str(NodeNote(2, made_by="colour")) == "unit 2, made by colour"
    assert str(NodeNote()) == ""


def test_a_node_without_a_note_has_an_empty_one() -> None:
    """`note` never fails, and does not take anything else for a note."""
    node = fx.Graph().placeholder("x")
    assert note(node) == NodeNote()
    node.meta[NOTE_KEY] = "not a note"
    assert note(node) == NodeNote()
