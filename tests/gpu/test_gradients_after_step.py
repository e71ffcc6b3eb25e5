"""Gradients after `step()` on a GPU are read, stepped on again and added to.

Slots are copied on the way while updates run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from .feed_forward import ADAMW, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def loop(model: Any, optimizer: Any) -> list[float]:
    found: list[float] = []
    data = batches()
    for step in range(9):
        loss = loss_of(model, next(data))
        loss.backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % 3:
            found += [float(p.grad.double().sum()) for p in model.parameters()]
        if step in (2, 3):
            optimizer.step()
        if step not in (4, 5):
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def edited(model: Any, optimizer: Any) -> list[float]:
    """Gradients are written through `.data` late on the stream, and zeroed right after step()."""
    found: list[float] = []
    data = batches()
    for _ in range(6):
        loss = loss_of(model, next(data))
        loss.backward()
        torch.cuda._sleep(20_000_000)  # about 10 ms: an update that waits for the backward alone comes before what follows
        taken = [p.grad for p in model.parameters()]
        for grad in taken:
            grad.data.clamp_(-1e-3, 1e-3)
        optimizer.step()
        torch._foreach_zero_(taken)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_may_be_written_unseen(dtype: torch.dtype) -> None:
    """Losses and weights with states on the device or streamed equal those with them on the host.

    Gradients are written through `.data` before step(), and zeroed after it.
    """
    results = []
    for options in ({"k": 0}, {"k": 6}, {"k": 2}, {"k": 1, "stream": 1.0}):
        torch._dynamo.reset()
        net = build(dtype, False)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), **options)
        results.append((options, edited(model, optimizer), [p.detach().clone() for p in model.parameters()]))
        hytrain_fx.close(model)
    for options, found, weights in results[1:]:
        assert found == results[0][1], options
        assert all(map(torch.equal, weights, results[0][2])), options


@pytest.mark.parametrize("delay", [Stage.D2H, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_after_step_are_those_of_a_loop_on_the_device(dtype: torch.dtype, delay: Stage) -> None:
    """Gradients read after step(), losses and weights equal those with all states on the GPU.

    This holds with k = 0, between, streamed, and in the torch engine.
    """
    results = []
    for options in ({"k": 6}, {"k": 0}, {"k": 2}, {"k": 1, "stream": 1.0}, {"k": 0, "engine": "torch"}):
        torch._dynamo.reset()
        net = build(dtype, False)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), **options)
        session_of(model).engine.set_delay(delay, 2_000)
        found = loop(model, optimizer)
        results.append((options, found, [p.detach().clone() for p in model.parameters()]))
        hytrain_fx.close(model)
    for options, found, weights in results[1:]:
        assert found == results[0][1], options
        assert all(map(torch.equal, weights, results[0][2])), options
