"""What the nodes of a backward put into the compute stream's queue.

Where the queue is full, the launching thread waits, and step() comes late.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement

from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def kernels_of_a_backward(places: list[Placement]) -> tuple[Counter[str], int, int]:
    """How often each kernel ran in one backward, and two numbers of units.

    They count units with rows on the host, and units with rows on the device or streamed.
    """
    net = build(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=0)
    session, data = session_of(model), batches()
    for step in range(4):
        loss = loss_of(model, next(data))
        if step < 3:
            loss.backward()
        else:
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                loss.backward()
                torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            session.place(plan_of(session, places))
    at = session.states.placement
    host = {session.nodes.unit_of[row] for row, place in at.items() if place is Placement.CPU}
    device = {session.nodes.unit_of[row] for row, place in at.items() if place is not Placement.CPU}
    hytrain_fx.close(model)
    return Counter(event.name for event in seen.events()), len(host), len(device)


def test_a_unit_s_gradients_leave_in_one_launch() -> None:
    """Each unit has one `gather` for gradients that go to the host, and one for those that stay.

    Nothing is copied parameter by parameter.
    """
    for places in ([Placement.CPU], [Placement.GPU], [Placement.STREAM], list(Placement)):
        kernels, host, device = kernels_of_a_backward(places)
        assert kernels["gather"] == host + device, (places, kernels)
        assert not [name for name in kernels if "multi_tensor_apply" in name], (places, kernels)
