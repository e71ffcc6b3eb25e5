"""Where the inserted calls stand in Inductor's generated code."""

from __future__ import annotations

import pytest
from torch._inductor.utils import run_and_get_code

from hytrain_fx.errors import GraphInvariantError
from tests.cpu import models
from tests.cpu.recording_nodes import compile_rewritten

from .first_steps import differing, first_step
from .generated_order import CallDistance, call_distances, check_generated_order

pytestmark = pytest.mark.fused_kernels

CODE = """
    def call(self, args):
        torch.ops.hytrain_fx.wait.default([primals_7], 0, [3])
        buf4 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
        cpp_fused_relu_0(primals_1, buf4)
        extern_kernels.mm(buf4, primals_7, out=buf5)
        torch.ops.hytrain_fx.release.default([buf5], 0, [3])
        cpp_fused_sum_1(buf4, buf6)
        cpp_fused_sum_2(buf4, buf7)
        del buf4
        triton_poi_fused_2.run(buf9, buf10, stream=stream0)
        buf8 = torch.ops.hytrain_fx.grad_offload.default([buf5, reinterpret_tensor(buf6, (3, ), (1, ), 0)], 0, [3, 4])
"""


def test_distances_are_counted_in_launches() -> None:
    """The distance counts launches between a call and its operands' last launch.

    Allocations, deletions and our own calls do not count.
    """
    found = call_distances(CODE)
    assert [(call.op, call.distance) for call in found] == [("wait", 1), ("release", 0), ("grad_offload", 2)]
    assert found[0] == CallDistance("wait", 3, 1)


def test_a_call_that_was_moved_is_refused() -> None:
    """A distance over the limit is an error that names the call and its line."""
    assert len(check_generated_order(CODE, limit=2)) == 3
    with pytest.raises(GraphInvariantError, match="grad_offload in line 12 of the generated code stands 2 launches"):
        check_generated_order(CODE, limit=1)


@pytest.mark.sample(0)  # .ci/run names this file
def test_inductor_leaves_the_calls_in_place() -> None:
    """In a small GPT every call stands within two launches of its operands, and none is missing.

    That holds for the forward and the backward, which has one call for four nodes of a unit.
    """
    model, batches = models.gpt()
    ours = compile_rewritten(model)
    _, codes = run_and_get_code(lambda: model(*batches[0]).backward())
    calls = [call for code in codes for call in check_generated_order(code, limit=2)]
    units = len(ours.units)
    counts = {op: sum(call.op == op for call in calls) for op in {call.op for call in calls}}
    released = sum(of.added.get("release", 0) for of in ours.capture.graphs[1].rewrite.passes)
    assert counts == {
        "wait": units,
        "offload_and_step": units,
        "release": released,
        "backward_end": 1,
    }


@pytest.mark.sample(0)
def test_what_all_blocks_share_holds_no_gradient_back() -> None:
    """The gradient of DiT's condition is a sum over the blocks. Their own gradients come evenly.

    In Inductor's order more than half of this backward has none. The bits are torch.compile's.
    """
    plain, _ = first_step("dit", "cpu", ours=False)
    ours, apart = first_step("dit", "cpu")
    assert max(apart) < sum(apart) / 3
    assert not differing(ours, plain)
