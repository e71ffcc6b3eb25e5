"""A model that leaves the GPU and comes back between two steps, and the engine's clock.

Code that saves elsewhere moves models so.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, STEPS, batches, build, deterministic, loss_of, plain

__all__ = ["deterministic"]  # the fixture, for this file too

PLACES = {"host": [Placement.CPU], "device": [Placement.GPU], "streamed": [Placement.STREAM], "all three": list(Placement)}


def compiled(dtype: torch.dtype, places: list[Placement]) -> tuple[Any, Any]:
    """The network, its parameters' states where `places` has them, in turn."""
    net = build(dtype)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
    session = session_of(model)
    session.place(plan_of(session, places))
    return model, optimizer


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_leaves_the_gpu_and_returns_trains_on(dtype: torch.dtype, places: list[Placement]) -> None:
    """cpu() right after a step, a look at the weights there, cuda(): losses and weights agree.

    They are the plain loop's, whose model stays on the GPU.
    """
    losses, weights = plain(dtype, None)
    model, optimizer = compiled(dtype, places)
    data, found = batches(), []
    for step in range(STEPS):
        loss = loss_of(model, next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 1:
            model.cpu()
            there = [p.detach().clone() for p in model.parameters()]
            model.cuda()
            assert all(torch.equal(a, p.cpu()) for a, p in zip(there, model.parameters(), strict=True))
        found.append(loss.item())
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    hytrain_fx.close(model)


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_training_a_model_that_has_left_the_gpu_is_an_error(places: list[Placement]) -> None:
    """Forward and step() on the CPU say what was compiled where; on the GPU training goes on."""
    model, optimizer = compiled(torch.float32, places)
    data = batches()
    loss_of(model, next(data)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.cpu()
    with pytest.raises(UnsupportedError, match=r"it was compiled with .* on cuda"):
        model(next(data).cpu())
    model.cuda()
    loss_of(model, next(data)).backward()
    optimizer.step()
    hytrain_fx.close(model)


def test_what_became_of_a_gradient_is_timed_on_the_host_s_clock() -> None:
    """Copy out, update and copy in of each row follow one another within the step, to 50 us.

    So they do the second time.
    """
    model, optimizer = compiled(torch.bfloat16, PLACES["host"])
    session, data = session_of(model), batches()
    session.planning.stop_measuring(recording=True)  # the planner leaves the engine's records alone
    for _ in range(2):
        session.drain()
        session.engine.take_records()
        session.engine.record(True)
        begin_us = time.perf_counter() * 1e6
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        session.drain()
        end_us = time.perf_counter() * 1e6
        records = session.engine.take_records()
        assert all(begin_us - 50 <= r.begin_us <= r.end_us <= end_us + 50 for r in records)
        first_sent = min(r.begin_us for r in records if r.stage is Stage.D2H)
        updates = [r for r in records if r.stage is Stage.CPU_UPDATE]
        assert {r.row for r in updates} == set(range(len(session.table)))
        assert first_sent <= min(r.begin_us for r in updates) + 50
        for back in (r for r in records if r.stage is Stage.H2D):
            assert max(r.end_us for r in updates if r.row == back.row) <= back.begin_us + 50
    hytrain_fx.close(model)
