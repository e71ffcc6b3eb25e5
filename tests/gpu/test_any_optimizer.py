"""Other optimizers than AdamW on a GPU.

On the device they have the plain loop's bits, on the host the same update within rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from ..cpu.optimizers import EVERY, make
from .feed_forward import STEPS, Net, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def trained(name: str, delay: Stage | None = None, **options: Any) -> list[torch.Tensor]:
    """Weights after the loop, ours where options are given; torch.compile's without."""
    net: Net = build(torch.float32)
    for p in net.parameters():
        p.requires_grad_(name != "Muon" or p.dim() == 2)
    model: Any = net
    optimizer: Any = make(name, [p for p in net.parameters() if p.requires_grad])
    if options:
        model, optimizer = hytrain_fx.compile(net, optimizer, **options)
        if delay is not None:
            session_of(model).engine.set_delay(delay, 2_000)
    else:
        net.compile()
    data = batches()
    for _ in range(STEPS):
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in net.parameters()]
    if options:
        hytrain_fx.close(model)
    return weights


@pytest.mark.parametrize("name", EVERY)
def test_on_the_device_it_is_the_plain_loop(name: str) -> None:
    """Every unit resident: the bits of the for-loop form on CUDA."""
    expected, found = trained(name), trained(name, k=6)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["SGD nesterov", "Adagrad", "Adafactor"])
def test_on_the_host_it_is_the_same_update(name: str) -> None:
    """Rows on both sides, with slow stages: within rounding of the plain loop."""
    expected = trained(name)
    for delay, k in ((None, 0), (Stage.CPU_UPDATE, 2), (Stage.LANDING, 2)):
        torch.testing.assert_close(trained(name, delay, k=k), expected, rtol=1e-4, atol=1e-5)


def test_states_move_while_training() -> None:
    """Plans solved again move states between host and device; training goes on within rounding."""
    torch.testing.assert_close(trained("SGD nesterov", warmup_steps=2, replan_every=2), trained("SGD nesterov"), rtol=1e-3, atol=1e-4)
