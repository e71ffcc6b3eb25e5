"""On a GPU: calls with other tensors in the model's places, beside ordinary steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage

from .feed_forward import ADAMW, STEPS, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too


def trained(dtype: torch.dtype, delay: Stage | None, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of the model, of clones and of aliases, and the weights after.

    Two layers change places on the way.
    """
    net: Any = build(dtype)
    optimizer: Any = torch.optim.AdamW(net.parameters(), **ADAMW)
    if options:
        _, optimizer = hytrain_fx.compile(net, optimizer, **options)
        if delay is not None:
            session_of(net).engine.set_delay(delay, 2_000)
    else:
        net.compile()
    losses, data = [], batches()
    for step in range(STEPS):
        tokens = next(data)
        loss = loss_of(net, tokens)
        loss.backward()
        clones: dict[str, torch.Tensor] = {name: nn.Parameter(p.detach().clone()) for name, p in net.named_parameters()}
        other = F.cross_entropy(functional_call(net, clones, (tokens,)).float().flatten(0, 1), tokens.flatten())
        other.backward()
        optimizer.step()
        optimizer.zero_grad()
        aliases = {name: p.detach() for name, p in net.named_parameters()}
        with torch.no_grad():
            seen = functional_call(net, aliases, (tokens,)).float().sum()
        losses += [loss.item(), other.item(), seen.item(), *(float(p.grad.float().sum()) for p in clones.values() if p.grad is not None)]
        if step == STEPS // 2:
            net.blocks[0], net.blocks[1] = net.blocks[1], net.blocks[0]
    weights = [p.detach().clone() for p in net.parameters()]
    if options:
        hytrain_fx.close(net)
    return losses, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_tensors_in_the_models_places_are_the_plain_ones(dtype: torch.dtype) -> None:
    """fp32: losses, gradients of clones and weights equal the plain loop's.

    bf16, where masters differ: every plan and delay agree.
    """
    cases: list[tuple[Stage | None, int]] = [(None, 6), (Stage.CPU_UPDATE, 2), (Stage.LANDING, 0), (Stage.ISSUE, 2)]
    expected = trained(dtype, None) if dtype is torch.float32 else trained(dtype, None, k=0)
    for delay, k in cases:
        losses, weights = trained(dtype, delay, k=k)
        assert losses == expected[0], (delay, k)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected[1], strict=True)), (delay, k)
