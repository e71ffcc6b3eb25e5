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

aten = torch.ops.aten


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


def test_on_a_gpu_a_release_leaves_inductor_its_choice() -> None:
    """A recomputed `addmm` that pointwise code reads becomes a product and a sum, as without us.

    The release takes the product: as one more reader of the `addmm` it would keep it whole.
    """
    ctx = context(GraphKind.BACKWARD, "checkpointed gpt")
    whole = calls(ctx, aten.addmm.default)
    for node in whole:
        node.meta["val"] = torch.empty_like(node.meta["val"], device="meta")  # no CPU
    choices = dataflow.ProductsAndSums.of(ctx.graph.module.graph)
    apart = [node for node in whole if node in choices.apart]
    readers = [set(node.users) for node in apart]
    assert apart
    apply(ctx, annotate_units, insert_grad_offload, insert_release)
    taken = {node for release in calls(ctx, RELEASE) for node in release.all_input_nodes}
    for node, read_by in zip(apart, readers, strict=True):
        assert not node.users
        (total,) = (node for node in calls(ctx, aten.add.Tensor) if set(node.users) == read_by)
        bias, product = total.all_input_nodes
        assert [bias, *product.all_input_nodes] == node.all_input_nodes
        assert set(product.users) - {total} <= set(calls(ctx, RELEASE))
    assert any(node.target is aten.mm.default and len(node.users) == 2 for node in taken)
    kept = [node for node in whole if node not in apart]
    assert all(node.users for node in kept)


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
