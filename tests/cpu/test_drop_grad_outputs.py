"""drop_grad_outputs: None for each offloaded gradient, and a meta that fits."""

from __future__ import annotations

import dataclasses

from torch import fx

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.drop_grad_outputs import drop_grad_outputs
from hytrain_fx.passes.pipeline import DEFAULT_PASSES, of_kind
from tests.cpu.pass_contexts import apply, context


def test_offloaded_gradients_are_none() -> None:
    """Positions of offloaded gradients are None; all others return what they returned."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD))
    values = ctx.graph.module.graph.output_node().args[0]
    gone = set(ctx.graph.grads.values())
    assert isinstance(values, tuple)
    assert [value is None for value in values] == [i in gone or then is None for i, then in enumerate(ctx.graph.outputs)]
    assert all(now is then for i, (now, then) in enumerate(zip(values, ctx.graph.outputs, strict=True)) if i not in gone)


def test_visible_outputs_are_those_that_remain() -> None:
    """`user_visible_output_idxs` names no output that is None.

    On CUDA, Inductor's padding pass fails on one.
    """
    ctx = context(GraphKind.BACKWARD)
    output = ctx.graph.module.graph.output_node()
    visible = set(output.meta["user_visible_output_idxs"])
    assert set(ctx.graph.grads.values()) <= visible, "torch makes no gradient visible any more: the trap is gone"
    apply(ctx, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD))
    left = output.meta["user_visible_output_idxs"]
    assert set(left) == visible - set(ctx.graph.grads.values())
    assert all(isinstance(output.args[0][i], fx.Node) for i in left)  # type: ignore[index]


def test_other_entries_for_each_output_keep_their_places() -> None:
    """Lists with one entry for each output keep their length, with None where the output is gone.

    "desc" keeps every entry.
    """
    ctx = context(GraphKind.BACKWARD)
    meta = ctx.graph.module.graph.output_node().meta
    desc = list(meta["desc"])
    count = len(ctx.graph.outputs)
    meta["output_stack_traces"] = [f"trace {i}" for i in range(count)]
    apply(ctx, *of_kind(DEFAULT_PASSES, GraphKind.BACKWARD))
    gone = set(ctx.graph.grads.values())
    assert meta["output_stack_traces"] == [None if i in gone else f"trace {i}" for i in range(count)]
    assert meta["desc"] == desc


def test_a_gradient_that_stays_is_still_visible() -> None:
    """A gradient that is not offloaded (its parameter has a hook) keeps its place in the meta."""
    ctx = context(GraphKind.BACKWARD)
    row, position = next(iter(ctx.graph.grads.items()))
    ctx = dataclasses.replace(ctx, graph=dataclasses.replace(ctx.graph, grads={r: p for r, p in ctx.graph.grads.items() if r != row}))
    apply(ctx, drop_grad_outputs)
    assert position in ctx.graph.module.graph.output_node().meta["user_visible_output_idxs"]
