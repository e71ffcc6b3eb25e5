"""insert_fetches, insert_let_go: weights are fetched before they are read, and let go of after."""

from __future__ import annotations

import pytest

from hytrain_fx.capture import dataflow
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.errors import ConfigError
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_fetches import NO_FORWARD_READERS, STREAMED_PASSES, fetching_calls, insert_fetches, insert_let_go
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.insert_release import NO_READERS, insert_release
from hytrain_fx.passes.insert_waits import insert_waits
from hytrain_fx.passes.node_notes import rows_of
from hytrain_fx.passes.ops import FETCH, GRAD_OFFLOAD, LET_GO
from hytrain_fx.passes.pipeline import DEFAULT_PASSES, chosen_passes
from tests.cpu import models
from tests.cpu.pass_contexts import SESSION, apply, calls, context


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", models.CASES)
def test_a_backward_fetches_what_it_reads_before_it_reads_it(name: str) -> None:
    """One fetch for each unit names every placeholder of its weights; all else comes after it.

    It takes the first weight of the fetch before it, and the gradients' tokens in between.
    """
    ctx = context(GraphKind.BACKWARD, name)
    read = {row for row in ctx.graph.held_rows if dataflow.readers(ctx.graph.holders(row), NO_READERS)}
    apply(ctx, annotate_units, insert_grad_offload, insert_release, insert_fetches)
    fetches = calls(ctx, FETCH)
    assert sorted(row for node in fetches for row in rows_of(node)) == sorted(read)
    assert len({ctx.unit_of[row] for row in read}) == len(fetches)
    found = fetching_calls(ctx.graph.module)
    assert {row for rows, _ in found for row in rows} == read
    nodes = [node for node in ctx.graph.module.graph.nodes if node.target in (FETCH, GRAD_OFFLOAD)]
    before = [number - place for place, number in enumerate(n for n, node in enumerate(nodes) if node.target is FETCH)]
    assert [gradients for _, gradients in found] == before
    earlier = -1
    for node in fetches:
        holders = [holder for row in rows_of(node) for holder in ctx.graph.holders(row)]
        place = nodes.index(node)
        taken = [*(ctx.graph.holders(rows_of(nodes[earlier])[0])[:1] if earlier >= 0 else ()), *nodes[earlier + 1 : place]]
        assert node.args == (holders, SESSION, taken, list(rows_of(node)))
        earlier = place
        assert all(node < user for holder in holders for user in holder.users if user is not node)
        assert set(node.next.all_input_nodes) & set(holders), "no earlier than needed"


def test_a_forward_lets_go_of_matrices_behind_their_last_reader() -> None:
    """Saving a weight for the backward is no reading. An embedding, read inlined, stays.

    So does the head that is tied to it.
    """
    ctx = context(GraphKind.FORWARD)
    names = [name for name, _ in models.Gpt().named_parameters()]
    apply(ctx, annotate_units, insert_waits, insert_let_go)
    nodes = calls(ctx, LET_GO)
    gone = {names[row] for node in nodes for row in rows_of(node)}
    assert gone == {name for name in names if name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))}
    order = dataflow.Order.of(ctx.graph.module.graph)
    for node in nodes:
        assert node.prev in node.all_input_nodes
        for row in rows_of(node):
            for reader in dataflow.readers([ctx.graph.weights[row]], NO_FORWARD_READERS):
                assert order.reaches(reader, node)


def test_a_users_passes_come_with_those_of_streamed_weights() -> None:
    """A list that has them keeps its order; one that lacks them is given them."""
    listed = [*DEFAULT_PASSES, *STREAMED_PASSES]
    assert chosen_passes(None, streamed=True) == tuple(listed)
    assert chosen_passes(listed, streamed=True) == tuple(listed)
    assert chosen_passes(DEFAULT_PASSES, streamed=True) == tuple(listed)
    assert chosen_passes(None) == DEFAULT_PASSES
    with pytest.raises(ConfigError, match="insert_let_go needs that every reader of a weight comes after a wait"):
        chosen_passes([insert_let_go, *DEFAULT_PASSES], streamed=True)
