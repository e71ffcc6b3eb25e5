"""Streamed rows on a GPU have the plain loop's bits.

Copies go both ways, and gradients come late.
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

from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, STEPS, assert_step_returns_early, batches, build, deterministic, loss_of, plain

__all__ = ["deterministic"]  # the fixture, for this file too

MIXTURES = {
    "all streamed": [Placement.STREAM],
    "beside the CPU": [Placement.STREAM, Placement.CPU],
    "all three": [Placement.GPU, Placement.STREAM, Placement.CPU, Placement.STREAM],
}


def trained(dtype: torch.dtype, clip: float | None, places: list[Placement], delay: Stage | None, sleep: bool) -> Any:
    """The plain loop under a plan of that mixture from the third step on.

    With `sleep` the GPU is far behind the host.
    """
    net = build(dtype)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
    session = session_of(model)
    losses, data = [], batches()
    for step in range(STEPS):
        if step == 2:
            session.place(plan_of(session, places))
            if delay is not None:
                session.engine.set_delay(delay, 2_000)
        if sleep:
            torch.cuda._sleep(100_000_000)
        loss = loss_of(model, next(data))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [p.detach().clone() for p in model.parameters()]
    hytrain_fx.close(model)
    return [loss.item() for loss in losses], weights


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streaming_gives_the_plain_loops_bits(dtype: torch.dtype, clip: float | None) -> None:
    """Every mixture of places, also with slow CPU stages or with the GPU behind the host.

    In the latter case states are there before gradients.
    """
    losses, weights = plain(dtype, clip)
    cases: list[tuple[str, Stage | None, bool]] = [(name, None, sleep) for name in MIXTURES for sleep in (False, True)]
    cases += [("all three", stage, False) for stage in (Stage.CPU_UPDATE, Stage.LANDING, Stage.ISSUE)]
    for mixture, delay, sleep in cases:
        found_losses, found = trained(dtype, clip, MIXTURES[mixture], delay, sleep)
        assert found_losses == losses, (mixture, delay, sleep)
        assert all(torch.equal(a, b) for a, b in zip(found, weights, strict=True)), (mixture, delay, sleep)


def test_step_returns_while_the_backward_still_runs() -> None:
    """Streaming does not hold the launching thread.

    step() has returned before the backward's last kernel has run.
    """
    assert_step_returns_early(0, MIXTURES["beside the CPU"])
