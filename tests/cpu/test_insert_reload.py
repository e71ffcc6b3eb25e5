"""insert_reload: one reload after each unit's updates."""

from __future__ import annotations

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.insert_steps import insert_reload, insert_steps
from hytrain_fx.passes.node_notes import note, rows_of
from hytrain_fx.passes.ops import GPU_STEP, RELOAD
from tests.cpu.pass_contexts import SESSION, apply, calls, context


def test_a_reload_behind_each_gpu_step() -> None:
    """It takes the last token of its unit and the same rows, and has no result."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload, insert_steps, insert_reload)
    steps = calls(ctx, GPU_STEP)
    assert len(steps) == len(calls(ctx, RELOAD)) == 4
    for step in steps:
        reload = step.next
        assert (reload.target, reload.args) == (RELOAD, (step, SESSION, list(rows_of(step))))
        assert reload.meta["val"] is None
        assert note(reload).unit == note(step).unit
