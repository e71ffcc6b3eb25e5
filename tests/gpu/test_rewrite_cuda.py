"""The rewrite on CUDA: Triton kernels, padding, cuDNN convolutions.

Weights are poisoned in stream order from release to wait.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

from ..cpu import models
from ..cpu.recording_nodes import compile_rewritten, train


@pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])
@pytest.mark.parametrize("name", models.CASES)
def test_training_is_that_of_plain_compile(name: str, wide: bool) -> None:
    """No reader sees a poisoned weight.

    Losses and weights agree with torch.compile and a plain optimizer.
    """
    torch.manual_seed(0)
    model, batches = models.CASES[name]() if not wide else _wide(name)
    model, batches = model.cuda(), [tuple(tensor.cuda() for tensor in batch) for batch in batches]
    plain = copy.deepcopy(model)
    ours = compile_rewritten(model)
    ours.nodes.hide(range(len(ours.names)))
    losses = train(model, batches, ours.nodes.step)
    torch._dynamo.reset()
    plain.compile()
    expected = train(plain, batches)
    ours.nodes.show(range(len(ours.names)))
    tolerance = 2e-2 if "bf16" in name or "autocast" in name else 2e-4
    assert losses == pytest.approx(expected, rel=tolerance)
    assert ours.nodes.count("grad_offload") == dict.fromkeys(range(len(ours.names)), len(batches))
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()


def test_the_calls_stand_where_they_were_put() -> None:
    """In the code for CUDA every inserted call is within four launches of its operands."""
    from ..cpu.generated_order import check_generated_order

    model, batches = models.gpt(length=64, width=64, layers=4)
    model, batches = model.cuda(), [tuple(tensor.cuda() for tensor in batch) for batch in batches]
    compile_rewritten(model)
    _, codes = run_and_get_code(lambda: model(*batches[0]).backward())
    found = [call for code in codes for call in check_generated_order(code, limit=4)]
    assert {call.op for call in found} == {"wait", "offload_and_step", "release", "backward_end"}


@pytest.mark.parametrize("name", ["dit", "t5"])
def test_what_all_blocks_share_holds_no_gradient_back(name: str) -> None:
    """Gradients come evenly, with kernels as they are fused for a GPU.

    The bits are torch.compile's, where two compilations by it agree. Each step is compiled with an
    empty cache, or the second plain step would be the first one again. Inductor chooses nothing by
    timing: with such choices two plain compilations of T5 differed.
    """
    from ..cpu.first_steps import differing, first_step

    steps = []
    for ours in (False, False, True):
        with fresh_inductor_cache(), inductor_config.patch(deterministic=True):
            steps.append(first_step(name, "cuda", ours=ours))
    (plain, _), (again, _), (ours_weights, apart) = steps
    assert max(apart) < sum(apart) / 3
    ours_differ, plain_differs = differing(ours_weights, plain), differing(again, plain)
    assert not ours_differ or plain_differs


def _wide(name: str) -> tuple[torch.nn.Module, models.Batches]:
    """The GPT cases with sizes that real kernels are chosen for."""
    if "gpt" not in name:
        pytest.skip("has one size")
    model, batches = models.gpt(length=64, width=64, layers=4, checkpointed="checkpointed" in name)
    if name == "bf16 gpt":
        model = model.to(torch.bfloat16)
    return (models.Autocast(model) if name == "autocast gpt" else model), batches
