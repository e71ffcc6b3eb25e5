"""Kernels are launched in the order of the graph: a layer's gradients leave when they are there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.session.nodes import SessionNodes

pytestmark = pytest.mark.fused_kernels

WIDTH, LAYERS, TOKENS = 128, 12, 8


def train(**options: Any) -> tuple[list[int], int]:
    """Two steps of a model of few tokens.

    Rows in the order in which the last backward's gradients left, -1 for each unit that it fetched.
    And the bytes of the device's slots.
    """
    torch._dynamo.reset()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(torch.bfloat16)
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        fetch, offload = SessionNodes.fetch, SessionNodes.grad_offload

        def seen_fetch(self: SessionNodes, rows: Sequence[int]) -> None:
            seen.append(-1)
            fetch(self, rows)

        def seen_offload(self: SessionNodes, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
            seen.extend(rows)
            offload(self, rows, grads)

        patch.setattr(SessionNodes, "fetch", seen_fetch)
        patch.setattr(SessionNodes, "grad_offload", seen_offload)
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, weights="streamed", **options)
        for _ in range(2):
            seen.clear()
            model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        slot_bytes = hytrain_fx.explain(model).memory.weight_slots_bytes
        hytrain_fx.close(model)
    return seen, slot_bytes


def test_gradients_leave_layer_by_layer() -> None:
    """The last layer's first; a layer's weights are fetched when those behind it have left.

    Few tokens: a gradient of a weight is larger than all activations, so an order with less memory,
    as Inductor estimates it, makes all of them at the end.
    """
    seen, slot_bytes = train()
    layers = [row // 2 for row in seen if row >= 0]
    assert layers == sorted(layers, reverse=True)
    assert set(layers) == set(range(LAYERS))
    fetched = [at for at, row in enumerate(seen) if row < 0]
    assert all(any(row >= 0 for row in seen[one:other]) for one, other in itertools.pairwise(fetched[1:]))
    assert slot_bytes == (UNITS_AHEAD + 1) * 2 * WIDTH * WIDTH


def test_the_users_option_goes_before_ours() -> None:
    """Who asks Inductor for its own order gets it."""
    _, slot_bytes = train(options={"reorder_for_peak_memory": True})
    assert slot_bytes == (LAYERS - 1) * 2 * WIDTH * WIDTH
