"""Updates before step() on a GPU: a loop that waits there is learned.

Its bits are those of the same loop without early updates.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import EarlyCounts, GuessCounts

from .feed_forward import deterministic

__all__ = ["deterministic"]  # the fixture, for this file too

WIDTH, STEPS = 2048, 24
TRIED_STEPS = 84  # after 4 that are watched and 54 in one way, updates begin in the other


def compiled(dtype: torch.dtype, **options: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]], Any]:
    """A model with all states on the host, data that it does not fit in 24 steps, its optimizer."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    net: Any = nn.Sequential(*layers[:-1]).to("cuda", dtype)
    options = {"k": 0, "stream": 0, **options}
    net, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1), **options)
    inputs, targets = [[torch.randn(512, WIDTH, device="cuda", dtype=dtype) for _ in range(3)] for _ in range(2)]
    return net, list(zip(inputs, targets, strict=True)), optimizer


def loss_of(net: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean squared error in fp32."""
    outputs: torch.Tensor = net(inputs)
    return (outputs.float() - targets.float()).square().mean()


def trained(dtype: torch.dtype, clip: bool, speculate: Any) -> tuple[list[Any], list[torch.Tensor], EarlyCounts]:
    """A loop that reads loss and norm before step().

    It changes its learning rate there once, and leaves out one step.
    """
    net, data, optimizer = compiled(dtype, speculate=speculate)
    found: list[Any] = []
    for step in range(STEPS):
        loss = loss_of(net, *data[step % 3])
        loss.backward()
        if clip:
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 1e3).item())
        found.append(loss.item())
        torch.cuda.synchronize()
        time.sleep(0.02)  # the copies to the host end, and the thread that asks for that has seen it
        if step == STEPS - 4:
            optimizer.param_groups[0]["lr"] *= 0.5
        if step != STEPS - 8:
            optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in net.parameters()]
    counts = session_of(net).engine.early_counts()
    hytrain_fx.close(net)
    return found, weights, counts


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loop_that_waits_is_learned_and_keeps_its_bits(dtype: torch.dtype, clip: bool) -> None:
    """Early updates happen by default, and always where asked; wrong guesses are undone.

    Losses, norms and weights are the same.
    """
    expected, weights, none = trained(dtype, clip, False)
    assert none.commits == 0
    for speculate in ("auto", True):
        found, ours, counts = trained(dtype, clip, speculate)
        assert found == expected
        assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
        assert counts.commits > 0
        assert 0 < counts.redone < counts.params


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_loop_that_clips_begins_before_step_and_keeps_its_bits(dtype: torch.dtype) -> None:
    """A loop that clips and waits for nothing begins updates with the gradients, on a guess.

    One step in six is scaled. Weights are on the device before the norm has come.
    """
    expected, weights, none, waiting = clipped(dtype, False, shadow_memory=0)
    assert none.commits == waiting.params == waiting.sent == 0
    assert none.waiting_params == none.host_params > 0
    found, ours, counts, guesses = clipped(dtype, "auto")
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
    assert counts.commits > 0
    assert counts.missed == counts.redone == 0
    assert guesses.missed > 0
    assert 0 < guesses.redone < guesses.params
    assert guesses.sent > 0
    assert found[-1] > 0.1, "there were gradients to the end"


def clipped(dtype: torch.dtype, speculate: Any, **options: Any) -> tuple[list[float], list[torch.Tensor], EarlyCounts, GuessCounts]:
    """Losses, weights and counts of a loop whose launching thread runs ahead of the device."""
    net, data, optimizer = compiled(dtype, speculate=speculate, **options)
    losses = []
    for step in range(TRIED_STEPS):
        loss = loss_of(net, *data[step % 3])
        torch.cuda._sleep(40_000_000)  # some 20 ms: step() is there before the gradients are
        loss.backward()
        torch.cuda._sleep(80_000_000)  # and there is time for updates before the norm
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3 if step % 6 == 5 else 1e3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [p.detach().clone() for p in net.parameters()]
    engine = session_of(net).engine
    counts, guesses = engine.early_counts(), engine.guess_counts()
    hytrain_fx.close(net)
    return [loss.item() for loss in losses], weights, counts, guesses


def test_weights_of_a_step_that_is_left_out_are_sent_back() -> None:
    """Weights that went to the device too early are sent back, in a loop under a loss scale.

    Two losses are infinite, and only later it is known that those steps do not count.
    """
    expected, weights, waiting = scaled(shadow_memory=0)
    assert waiting.params == waiting.sent == 0
    found, ours, guesses = scaled()
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
    assert guesses.sent > 0
    assert guesses.missed > 0


def scaled(**options: Any) -> tuple[list[float], list[torch.Tensor], GuessCounts]:
    """Losses, scales, weights and counts of a loop whose launching thread runs ahead."""
    net, data, optimizer = compiled(torch.float32, **options)
    scaler, found = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000), []
    for step in range(STEPS):
        loss = loss_of(net, *data[step % 3])
        torch.cuda._sleep(40_000_000)
        scaler.scale(loss * (float("inf") if step in (STEPS // 2, STEPS - 3) else 1.0)).backward()
        torch.cuda._sleep(80_000_000)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.detach(), scaler._scale.clone()]  # type: ignore[union-attr]
    weights = [p.detach().clone() for p in net.parameters()]
    guesses = session_of(net).engine.guess_counts()
    hytrain_fx.close(net)
    return [value.item() for value in found], weights, guesses
