"""insert_steps: cpu_step and gpu_step in a chain after each offload."""

from __future__ import annotations

from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.passes.annotate_units import annotate_units
from hytrain_fx.passes.insert_grad_offload import insert_grad_offload
from hytrain_fx.passes.insert_steps import insert_steps
from hytrain_fx.passes.node_notes import note, rows_of
from hytrain_fx.passes.ops import CPU_STEP, GPU_STEP, GRAD_OFFLOAD
from tests.cpu.pass_contexts import SESSION, apply, calls, context


def test_a_chain_behind_each_token() -> None:
    """offload -> cpu_step -> gpu_step, next to each other, with the offload's rows and unit."""
    ctx = context(GraphKind.BACKWARD)
    apply(ctx, annotate_units, insert_grad_offload, insert_steps)
    offloads = calls(ctx, GRAD_OFFLOAD)
    assert len(offloads) == 4
    for offload in offloads:
        rows = list(rows_of(offload))
        cpu, gpu = offload.next, offload.next.next
        assert (cpu.target, cpu.args) == (CPU_STEP, (offload, SESSION, rows))
        assert (gpu.target, gpu.args) == (GPU_STEP, (cpu, SESSION, rows))
        assert note(cpu).unit == note(gpu).unit == note(offload).unit
        assert cpu.meta["val"].shape == gpu.meta["val"].shape == (0,)


def test_nothing_to_do_without_offloads() -> None:
    """A graph without offloads does not change."""
    ctx = context(GraphKind.BACKWARD)
    before = str(ctx.graph.module.graph)
    assert apply(ctx, annotate_units, insert_steps) == ("updates armed after 0 offloads",)
    assert str(ctx.graph.module.graph) == before
