"""Gradients that hold NaN or infinities on a GPU: nothing synchronises to leave their steps out.

Bits are those of a plain loop that looks at every gradient.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.config import OnNonfinite
from hytrain_fx.errors import NonFiniteGradientError

from .feed_forward import ADAMW, batches, build, deterministic, loss_of
from .test_loss_scale import no_sync

__all__ = ["deterministic"]  # the fixture, for this file too

Mode = OnNonfinite | Literal["plain", "plain allow"]
BAD = (False, False, False, False, True, False, True, True, False, False)
PLANS: tuple[dict[str, Any], ...] = ({"k": 0}, {"k": 6}, {"k": 2}, {"k": 1, "stream": 0.5})


def stepped(optimizer: Any) -> int:
    """Call step(); how many errors it raised."""
    try:
        optimizer.step()
    except NonFiniteGradientError:
        return 1
    return 0


def told(net: Any) -> int:
    """Wait until it is known whether the last step was left out; how many errors that raised."""
    try:
        session_of(net).finite_steps.raise_told(wait=True)
    except NonFiniteGradientError:
        return 1
    return 0


def trained(mode: Mode, **options: Any) -> tuple[list[torch.Tensor], int]:
    """Steps of which some have an infinite loss; the weights, and how many errors there were.

    mode   "plain": without us, and without the bad steps; "plain allow": with them
    """
    net: Any = build(torch.float32)
    optimizer: Any = torch.optim.AdamW(net.parameters(), **ADAMW)
    ours = mode in ("allow", "skip", "raise")
    if not ours:
        net.compile()
    else:
        net, optimizer = hytrain_fx.compile(net, optimizer, on_nonfinite=cast(OnNonfinite, mode), **options)
    errors, data = 0, batches()
    for number, bad in enumerate(BAD):
        batch = next(data)
        loss = loss_of(net, batch)
        (loss * (float("inf") if bad else 1.0)).backward()
        with no_sync(mode == "skip" and number >= 3):
            errors += stepped(optimizer) if mode != "plain" or not bad else 0
            optimizer.zero_grad()
        if mode == "raise":  # else the next forward or step() says it, and which of them is up to the GPU
            errors += told(net)
    weights = [p.detach().clone() for p in net.parameters()]
    if ours:
        hytrain_fx.close(net)
    return weights, errors


@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_steps_with_them_leave_no_trace(mode: Mode) -> None:
    """Rows are on the CPU, on the GPU, on both, or streamed.

    With "raise" each such step is one error.
    """
    expected, _ = trained("plain")
    for options in PLANS:
        found, errors = trained(mode, **options)
        assert errors == (sum(BAD) if mode == "raise" else 0), options
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), options


def test_by_default_the_values_are_computed_with() -> None:
    """The bits of the plain loop, with NaN where it has NaN, and nothing raises."""
    expected, _ = trained("plain allow")
    assert any(bool(weight.isnan().any()) for weight in expected)
    for options in PLANS:
        found, errors = trained("allow", **options)
        assert errors == 0
        assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected, strict=True)), options
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, expected, strict=True)), options
