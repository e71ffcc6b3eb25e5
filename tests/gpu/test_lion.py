"""Lion on a GPU: the CUDA kernels have the CPU kernel's bits.

Training has the plain loop's bits, wherever states are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.lion import LionScalars

from ..cpu.adamw_operands import KINDS, assert_same_bits, kernel_
from ..cpu.loops import TorchAdam
from ..cpu.test_lion import DTYPES, GROUP, lion_operands
from ..cpu.test_placements import plan_of
from .feed_forward import STEPS, batches, build, deterministic, loss_of
from .test_cuda_adamw_bits import cuda_kernel_, moved
from .test_streaming import MIXTURES

__all__ = ["deterministic"]  # the fixture, for this file too


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_kernel_is_cpu_kernel(dtype: torch.dtype, kind: str) -> None:
    """Master, state and weight, in vectors and tails."""
    scalars = LionScalars.of(GROUP, factors=(1 / 3, 1.7))
    for n in (1, 8, 2049, 100_003):
        o = lion_operands(n, kind, dtype)
        on_gpu = moved(o, "cuda")
        kernel_(o, scalars)
        cuda_kernel_(on_gpu, scalars, "lion")
        assert_same_bits(o, moved(on_gpu, "cpu"))


def trained(dtype: torch.dtype, places: list[Placement] | None) -> list[torch.Tensor]:
    """Clipped steps under a plan of these places.

    None: Lion itself, on masters kept by hand for 16-bit weights.
    """
    model, data = build(dtype), batches()
    optimizer: Any = TorchAdam(model.parameters(), hytrain_fx.Lion, **GROUP)
    if places is None:
        model.compile()
    else:
        _, optimizer = hytrain_fx.compile(model, hytrain_fx.Lion(model.parameters(), **GROUP), k=0)
        session = session_of(model)
        session.place(plan_of(session, places))
    for _ in range(STEPS):
        loss_of(model, next(data)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    if places is not None:
        hytrain_fx.close(model)
    return weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_has_the_plain_loops_bits(dtype: torch.dtype) -> None:
    """States on the CPU, on the device, streamed, and mixed."""
    expected = trained(dtype, None)
    for name, places in {"on the CPU": [Placement.CPU], "on the device": [Placement.GPU], **MIXTURES}.items():
        torch._dynamo.reset()
        for found, weight in zip(trained(dtype, places), expected, strict=True):
            assert torch.equal(found, weight), name
