"""GradScaler on a GPU: the launching thread never synchronises.

Bits are the plain loop's through steps that are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx

from .feed_forward import ADAMW, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too

OVERFLOWS = (True, False, False, True, True, False, False, False)


@contextmanager
def no_sync(wanted: bool) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error" if wanted else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(ours: bool, unscale: bool, clip: float | None, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Steps under a loss scale, with an infinite loss in some.

    With ours, from the fourth step on no call of the scaler may synchronise.
    """
    net: Any = build(torch.float32)
    optimizer: Any = torch.optim.AdamW(net.parameters(), **ADAMW)
    if ours:
        net, optimizer = hytrain_fx.compile(net, optimizer, **options)
    else:
        net.compile()
    scaler = torch.amp.GradScaler("cuda", init_scale=3.0 * 2**10, growth_interval=2)
    found, data = [], batches()
    for step, overflow in enumerate(OVERFLOWS):
        loss = loss_of(net, next(data))
        scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        with no_sync(ours and step >= 3):
            if unscale:
                scaler.unscale_(optimizer)
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale()]
    weights = [p.detach().clone() for p in net.parameters()]
    if ours:
        hytrain_fx.close(net)
    return found, weights


@pytest.mark.parametrize(("unscale", "clip"), [(False, None), (True, None), (True, 0.1)])
def test_steps_left_out_leave_no_trace_and_nothing_synchronises(unscale: bool, clip: float | None) -> None:
    """Losses, scales and weights equal the plain loop's.

    Rows are on the CPU, on the GPU, on both, or streamed.
    """
    expected, weights = trained(False, unscale, clip)
    for options in ({"k": 0}, {"k": 6}, {"k": 2}, {"k": 1, "stream": 0.5}):
        found, ours = trained(True, unscale, clip, **options)
        assert found == expected, options
        assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True)), options
