"""Moments in bf16 on a GPU: the CUDA kernels round as the CPU's, and training has the plain loop's
bits wherever states are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.runtime.lion import LionScalars
from hytrain_fx.runtime.rounding import RoundingPlace

from ..cpu.adamw_operands import KINDS, assert_same_bits, kernel_, op_by_op_
from ..cpu.loops import HandAdam
from ..cpu.test_cut_parameters import cut_plan
from ..cpu.test_lion import GROUP as LION_GROUP
from ..cpu.test_lion import lion_operands
from ..cpu.test_moments import BF16, narrow, scalars_of
from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, STEPS, batches, build, deterministic, loss_of
from .test_cuda_adamw_bits import cuda_kernel_, moved
from .test_streaming import MIXTURES

__all__ = ["deterministic"]  # the fixture, for this file too

PLACE = RoundingPlace(99, (1 << 32) - 5000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_cuda_kernels_are_cpu_kernels(dtype: torch.dtype, kind: str) -> None:
    """Vectors, tails and element numbers beyond 32 bits; torch operations on the GPU agree too."""
    for n in (1, 8, 2049, 100_003):
        o = narrow(n, n, kind, dtype, PLACE)
        on_gpu, by_torch = moved(o, "cuda"), moved(o, "cuda")
        kernel_(o, scalars_of())
        cuda_kernel_(on_gpu, scalars_of())
        op_by_op_(by_torch, scalars_of())
        assert_same_bits(o, moved(on_gpu, "cpu"))
        assert_same_bits(o, moved(by_torch, "cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lions_too(dtype: torch.dtype) -> None:
    """One state."""
    scalars = LionScalars.of({**LION_GROUP, **BF16}, 7)
    o = lion_operands(2049, "wide", dtype)
    o.m, o.v, o.place = o.m.bfloat16(), o.v.bfloat16(), PLACE
    on_gpu = moved(o, "cuda")
    kernel_(o, scalars)
    cuda_kernel_(on_gpu, scalars, "lion")
    on_gpu.v.copy_(o.v)  # no kernel of Lion's reads it
    assert_same_bits(o, moved(on_gpu, "cpu"))


def plain(dtype: torch.dtype, clip: float | None) -> tuple[list[float], list[torch.Tensor]]:
    """The same compiled model with `HandAdam`."""
    model, data, losses = build(dtype), batches(), []
    model.compile()
    optimizer = HandAdam(model.parameters(), moments="bf16", **ADAMW)
    for _ in range(STEPS):
        losses.append(one_step(model, optimizer, next(data), clip))
    return losses, [p.detach().clone() for p in model.parameters()]


def one_step(model: Any, optimizer: Any, tokens: torch.Tensor, clip: float | None) -> float:
    loss = loss_of(model, tokens)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_plain_loops_bits(dtype: torch.dtype, clip: float | None) -> None:
    """Every mixture of places and a cut, stages slow in turn, updates before step()."""
    losses, weights = plain(dtype, clip)
    for delay in (None, Stage.CPU_UPDATE, Stage.STREAM_IN, Stage.STREAM_OUT):
        model, data, found = build(dtype), batches(), []
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), k=0, speculate=True, **BF16)
        session = session_of(model)
        if delay is not None:
            session.engine.set_delay(delay, 2_000)
        plans = [plan_of(session, places) for places in MIXTURES.values()] + [cut_plan(session, [5000, 7000], list(Placement))]
        for step in range(STEPS):
            if step % 2:
                session.place(plans[step // 2 % len(plans)])
            found.append(one_step(model, optimizer, next(data), clip))
        assert found == losses, delay
        assert all(torch.equal(p.detach(), weight) for p, weight in zip(model.parameters(), weights, strict=True)), delay
        assert {state.dtype for _, states in session.states for state in states.states} == {torch.bfloat16}
        hytrain_fx.close(model)
