"""Whole training loops on a GPU have the bits of the plain loop.

Neither the plan nor the stage that is slow matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
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
    """Losses and weights equal the all-GPU loop's for k = 0, between, n and solved.

    Each stage is slow in turn.
    """
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


@pytest.mark.parametrize("behind", [False, True], ids=["the GPU waits for the host", "the GPU is behind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation_gives_the_plain_loops_bits(dtype: torch.dtype, behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights equal the all-GPU loop's with three backwards a step.

    The gradients of the first two come back from host memory a unit at a time. States are all on
    the host or on both sides. The launching thread waits for the GPU, or is far ahead of it.
    """
    losses, weights = plain(dtype, None, micro_batches=3)
    for k in (0, 3):
        net = build(dtype)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=k)
        engine = session_of(model).engine
        fetched: list[int] = []
        monkeypatch.setattr(engine, "fetched", partial(_counted, engine.fetched, fetched))
        data, found_losses = batches(), []
        for _ in range(STEPS):
            for _ in range(3):
                if behind:
                    torch.cuda._sleep(50_000_000)
                else:
                    torch.cuda.synchronize()
                loss = loss_of(model, next(data)) / 3
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found_losses.append(loss.item())
        nodes, placement = session_of(model).nodes, session_of(model).states.placement
        hosted = sum(any(placement[row] is Placement.CPU for row in rows) for rows in nodes.graph_calls[max(nodes.graph_calls)])
        assert len(fetched) == 2 * hosted * STEPS
        assert found_losses == losses, k
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True)), k
        hytrain_fx.close(model)


def _counted(call: Callable[[int], None], calls: list[int], fetch: int) -> None:
    calls.append(fetch)
    call(fetch)


def test_a_step_is_a_transaction_while_the_gpu_is_behind() -> None:
    """Weights read between backward() and step() are old, and after step() new.

    The GPU is far behind the host.
    """
    net = build(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=2)
    data = batches()
    for _ in range(3):
        torch.cuda._sleep(200_000_000)
        loss_of(model, next(data)).backward()
        before = [p.detach().clone() for p in model.parameters()]  # queued after the backward
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
    """Nothing in forward, backward or step waits for the GPU.

    step() has returned before the backward's last kernel has run. With 300 MB of gradients: copies
    to the host behind a blocking-sync event would hold the launching thread back here.
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
