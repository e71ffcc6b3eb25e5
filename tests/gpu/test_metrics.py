"""`hytrain_fx.metrics` on a GPU: nothing waits for the device, and waiting is measured."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hytrain_fx


def test_a_busy_device_is_not_waited_for() -> None:
    """While the device works, `metrics` returns the figures of a step that has ended."""
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    for _ in range(3):
        model(torch.ones(4, 64, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hytrain_fx.settle(model)
    torch.cuda.synchronize()
    model(torch.ones(4, 64, device="cuda")).mean().backward()
    torch.cuda._sleep(2_000_000_000)
    asleep = torch.cuda.Event()
    asleep.record()
    optimizer.step()
    found = hytrain_fx.metrics(model)
    assert not asleep.query()
    assert found["steps_done"] == 4
    assert found["exposed_seconds"] >= 0.0
    optimizer.zero_grad()
    hytrain_fx.close(model)
