"""Fp32 training under autocast on a GPU, with the weights there as bf16 copies.

It has the bits of the plain loop and the memory of 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement

from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, STEPS, Net, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def autocast() -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16)


def train(model: Any, optimizer: Any, *, clip: float | None, parts: int = 1) -> list[float]:
    """Some steps of the plain loop, with micro-batches, then two evaluations.

    One evaluation is with autocast, one without.
    """
    losses, data = [], batches()
    for _ in range(STEPS):
        for _ in range(parts):
            with autocast():
                loss = loss_of(model, next(data))
            loss.backward()
        if clip is not None:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        tokens = next(data)
        losses.append(loss_of(model, tokens).item())
        with autocast():
            losses.append(loss_of(model, tokens).item())
    return losses


def plain(**options: Any) -> tuple[list[float], list[torch.Tensor]]:
    model = build(torch.float32)
    model.compile()
    losses = train(model, torch.optim.AdamW(model.parameters(), foreach=True, **ADAMW), **options)
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("options", [{"clip": None}, {"clip": 0.1}, {"clip": 0.1, "parts": 2}], ids=str)
def test_every_place_gives_the_plain_loops_bits(options: dict[str, Any]) -> None:
    """Losses, norms and weights are the plain loop's, wherever parameters are updated.

    They are updated by the CPU, streamed, resident and mixed, with bf16 gradients in slots and fp32
    ones.
    """
    losses, weights = plain(**options)
    mixed = [Placement.CPU, Placement.STREAM, Placement.GPU]
    cases: list[Sequence[Placement]] = [[Placement.CPU], [Placement.STREAM], [Placement.GPU], mixed]
    for places in cases:
        net = build(torch.float32)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
        session_of(model).place(plan_of(session_of(model), places))
        found = train(model, optimizer, **options)
        assert len(session_of(model).states.copies) == 9, "each linear layer's weight has a copy"
        assert found == losses, places
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)), places
        hytrain_fx.close(model)


def test_the_device_holds_16_bit_weights() -> None:
    """With all states on the host, the device holds 2 bytes a parameter of linear layers.

    The ring is included; it is measured after a step.
    """
    with autocast():
        loss_of(Net(width=64, blocks=1).cuda(), next(batches())).backward()  # cuBLAS takes its workspaces, 32 MiB for each of two threads
    torch.manual_seed(0)
    net = Net(width=1024, blocks=8).cuda()  # 67 M parameters in linear layers
    before = torch.cuda.memory_allocated()
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0, stream=0, ring_bytes=40 << 20)
    ring = torch.cuda.memory_allocated() - before
    data = batches()
    for _ in range(3):
        with autocast():
            loss = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session_of(model).drain()
    del loss
    linear = sum(copy.numel() for copy in session_of(model).states.copies.tensors.values())
    assert linear > 60_000_000
    assert torch.cuda.memory_allocated() - ring < before - 1.9 * linear
    hytrain_fx.close(model)


def test_step_returns_while_the_backward_still_runs() -> None:
    """Neither forward nor backward nor step waits for the GPU once the copies are there."""
    torch.manual_seed(0)
    net = Net(width=1536, blocks=8).cuda()
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
    data = batches()
    for _ in range(5):
        with autocast():
            loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    session_of(model).drain()
    tokens = next(data)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    with autocast():
        loss_of(model, tokens).backward()
    end = torch.cuda.Event()
    end.record()
    optimizer.step()
    assert not end.query()
    optimizer.zero_grad()
    hytrain_fx.close(model)
