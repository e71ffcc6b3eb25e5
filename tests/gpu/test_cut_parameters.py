"""Parameters that are cut, on a GPU.

Pieces of one tensor are updated by the CPU, on the device and streamed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from ..cpu.test_cut_parameters import cut_plan, is_cut
from .feed_forward import ADAMW, STEPS, batches, build, deterministic, loss_of, plain

__all__ = ["deterministic"]  # the fixture, for this file too

CUTS: tuple[tuple[Sequence[int], Sequence[Placement]], ...] = (
    ([5000, 7000], list(Placement)),
    ([3000], [Placement.CPU, Placement.GPU]),
    ([11000, 2000], [Placement.STREAM, Placement.CPU]),
)


@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_cut_changes_a_bit(dtype: torch.dtype, clip: float | None) -> None:
    """Losses and weights equal the all-GPU loop's while the cut changes every two steps.

    Each stage is slow in turn.
    """
    losses, weights = plain(dtype, clip)
    for delay in (None, Stage.D2H, Stage.CPU_UPDATE, Stage.LANDING, Stage.ISSUE, Stage.STREAM_IN):
        net = build(dtype)
        model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
        session, data, found = session_of(model), batches(), []
        if delay is not None:
            session.engine.set_delay(delay, 2_000)
        for step in range(STEPS):
            if step and step % 2 == 0:
                session.place(cut_plan(session, *CUTS[step // 2 % len(CUTS)]))
                assert is_cut(session)
            loss = loss_of(model, next(data))
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert found == losses, delay
        assert all(torch.equal(p.detach(), weight) for p, weight in zip(model.parameters(), weights, strict=True)), delay
        hytrain_fx.close(model)
