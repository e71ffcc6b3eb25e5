"""Whole training loops on a GPU: bits of the plain loop, whatever the plan and whichever stage is slow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from .feed_forward import ADAMW, STEPS, Net, assert_step_returns_early, batches, build, deterministic, loss_of, plain

__all__ = ["deterministic"]  # the fixture, for this file too


def trained(
    dtype: torch.dtype, clip: float | None, delay: Stage | None, *, breaks: bool = False, **options: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """Our loop: the plain one with a line added."""
    net = build(dtype, breaks)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), **options)
    if delay is not None:
        session_of(model).engine.set_delay(delay, 2_000)
    losses, data = [], batches()
    for _ in range(STEPS):
        loss = loss_of(model, next(data))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = [p.detach().clone() for p in model.parameters()]
    hytrain_fx.close(model)
    return losses, weights


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_plan_and_every_delay_gives_the_plain_loops_bits(dtype: torch.dtype, clip: float | None) -> None:
    """Losses and weights equal the all-GPU loop's for k = 0, between, n and solved, with each stage slow in turn."""
    losses, weights = plain(dtype, clip)
    cases: list[tuple[Stage | None, dict[str, Any]]] = [(None, {"k": 0}), (None, {"k": 6}), (None, {"warmup_steps": 2, "replan_every": 2})]
    cases += [(stage, {"k": 2}) for stage in (Stage.CPU_UPDATE, Stage.LANDING, Stage.ISSUE)]
    for delay, options in cases:
        found_losses, found = trained(dtype, clip, delay, **options)
        assert found_losses == losses, (delay, options)
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True)), (delay, options)


@pytest.mark.parametrize("k", [0, 2])
def test_a_forward_in_two_graphs_gives_the_plain_loops_bits(k: int) -> None:
    """With a graph break the model trains as the plain compiled one does."""
    losses, weights = plain(torch.bfloat16, 0.1, breaks=True)
    found_losses, found = trained(torch.bfloat16, 0.1, None, breaks=True, k=k)
    assert found_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True))


def test_a_step_is_a_transaction_while_the_gpu_is_behind() -> None:
    """Weights read between backward() and step() are the old ones, and after step() the new ones, with the GPU far behind the host."""
    net = build(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=2)
    data = batches()
    for _ in range(3):
        torch.cuda._sleep(200_000_000)
        loss_of(model, next(data)).backward()
        before = [p.detach().clone() for p in model.parameters()]  # queued behind the backward
        sums = torch.stack([p.detach().float().sum() for p in model.parameters()])
        optimizer.step()
        after = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        session_of(model).drain()
        assert torch.equal(sums, torch.stack([p.float().sum() for p in before]))
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(torch.equal(a, p) for a, p in zip(after, model.parameters(), strict=True))
    hytrain_fx.close(model)


@pytest.mark.parametrize("k", [0, 2])
def test_step_returns_while_the_backward_still_runs(k: int) -> None:
    """Nothing in forward, backward or step waits for the GPU: step() has returned before the backward's last kernel has run.

    With 300 MB of gradients: copies to the host behind a blocking-sync event would hold the launching thread back here.
    """
    assert_step_returns_early(k)


def test_gradients_die_early() -> None:
    """Peak memory of a backward stays below what all gradients at once would take."""
    torch.manual_seed(0)
    net = Net(width=1024, blocks=24).to(torch.bfloat16).cuda()  # 200 M parameters: 400 MB of gradients
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0, ring_bytes=64 << 20)
    data = batches()
    for _ in range(2):
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    session_of(model).drain()
    torch.cuda.reset_peak_memory_stats()
    resting = torch.cuda.memory_allocated()
    loss_of(model, next(data)).backward()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - resting < gradients / 2
    optimizer.step()
    hytrain_fx.close(model)
