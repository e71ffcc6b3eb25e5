"""insert_release: a weight is released after its last reader, where that can be shown."""

from __future__ import annotations

import torch

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.insert_release import insert_release, released_rows
from hytrain_fx.passes.node_notes import rows_of
from hytrain_fx.passes.ops import RELEASE
from tests.cpu.pass_contexts import apply, calls, context, rows_of_unit


def released(kind_of_model: str = "gpt") -> set[int]:
    """Rows that get a release before the end of the backward."""
    ctx = context(GraphKind.BACKWARD, kind_of_model)
    apply(ctx, annotate_units, insert_grad_offload, insert_release)
    return {row for node in calls(ctx, RELEASE) for row in rows_of(node)}


def test_matrices_and_biases_are_released_norms_are_not() -> None:
    """What only products read, or nobody reads, is released. Norm biases are not read.

    A norm's weight, read element by element, is not released.
    """
    ctx = context(GraphKind.BACKWARD)
    names = _names()
    early = {names[row] for row in released()}
    kept = set(names.values()) - early
    assert kept == {"h.0.ln_1.weight", "h.0.ln_2.weight", "h.1.ln_1.weight", "h.1.ln_2.weight", "ln_f.weight"}
    assert set(released_rows(ctx)) == set(names)


def test_it_stands_right_behind_its_last_reader() -> None:
    """The node before a release makes one of the results that the release takes.

    The results need every reader of the rows.
    """
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload, insert_release)
    order = dataflow.Order.of(ctx.graph.module.graph)
    for node in calls(ctx, RELEASE):
        assert node.prev in node.all_input_nodes
        for row in rows_of(node):
            for reader in dataflow.readers(ctx.graph.holders(row), frozenset({RELEASE})):
                assert order.reaches(reader, node)


def test_a_chain_of_readers_costs_one_operand() -> None:
    """A layer's four products form a chain in the backward, so only the last result is kept."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload, insert_release)
    layer = set(rows_of_unit(ctx, "h.1"))
    (node,) = (node for node in calls(ctx, RELEASE) if set(rows_of(node)) <= layer)
    assert len(node.all_input_nodes) == 1
    assert len(rows_of(node)) == 10


def test_recomputed_products_are_readers_too() -> None:
    """Under checkpointing a weight is read twice in the backward.

    Its bias is added by a recomputed addmm and waits for the end.
    """
    names = _names()
    early = {names[row] for row in released("checkpointed gpt")}
    assert "h.0.qkv.weight" in early
    assert "h.0.qkv.bias" not in early
    ctx = context(GraphKind.BACKWARD, "checkpointed gpt")
    row = next(row for row, name in names.items() if name == "h.0.qkv.weight")
    targets = {reader.target for reader in dataflow.readers(ctx.graph.holders(row))}
    assert targets == {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


def test_rows_that_are_only_read_are_released() -> None:
    """A convolution's weight goes by an item of convolution_backward.

    All rows of a CNN are released, except the norms' weights.
    """
    from tests.cpu import models

    names = [name for name, _ in models.Cnn().named_parameters()]
    assert {name for row, name in enumerate(names) if row not in released("cnn")} == {"layer1.0.norm.weight", "layer1.1.norm.weight"}


def _names() -> dict[int, str]:
    from tests.cpu import models

    return dict(enumerate(name for name, _ in models.Gpt().named_parameters()))
