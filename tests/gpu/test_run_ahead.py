"""The launching thread runs ahead of the last updates of a step, on a GPU.

Bits stay, and nothing that waits for the device hangs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import EngineError
from hytrain_fx.runtime.engine import Stage

from .feed_forward import deterministic
from .test_early import compiled, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too

STEPS = 16


def trained(dtype: torch.dtype, stream: float, between: str, settled: bool) -> tuple[list[float], list[torch.Tensor], int, int]:
    """Losses, weights, how many gradients ran ahead, and how many updates went at once.

    Ahead: gradients on their way before the updates of their rows had ended. At once: parameters
    whose updates were put on the lane to the device together, as the rest of a step.

    between   what the loop does from the forward to step()
    settled   every update ends before the next forward, so nothing is left to run ahead of
    """
    net, data, optimizer = compiled(dtype, stream=stream, timeout_s=20.0)
    session, ahead, at_once, losses = session_of(net), 0, 0, []
    session.engine.set_delay(Stage.CPU_UPDATE, 0.0 if settled else 10_000.0)
    for step in range(STEPS):
        loss = loss_of(net, *data[step % 3])
        if between == "loss.item()":
            loss.item()
        elif between == "zero_grad()":
            optimizer.zero_grad()
        elif between == "an evaluation":
            with torch.no_grad():
                net(data[0][0])
        elif between == "memory given back":
            torch.cuda.empty_cache()
        loss.backward()
        if between == "a step left out" and step % 5 == 3:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times = session.engine.finish_times()
        ahead, at_once = ahead + times.ahead, at_once + times.at_once
        if settled:
            session.settle()
    weights = [p.detach().clone() for p in net.parameters()]
    hytrain_fx.close(net)
    return [loss.item() for loss in losses], weights, ahead, at_once


@pytest.mark.parametrize("between", ["nothing", "loss.item()", "zero_grad()", "an evaluation", "memory given back", "a step left out"])
@pytest.mark.parametrize(("dtype", "stream"), [(torch.bfloat16, 0.0), (torch.bfloat16, 0.4), (torch.bfloat16, 1.0), (torch.float32, 0.0)])
def test_a_thread_that_runs_ahead_changes_no_bit(dtype: torch.dtype, stream: float, between: str) -> None:
    """Gradients of the next step are on their way while slow updates run.

    Losses and weights are those of a loop that waits. Streamed updates are not waited for either.
    """
    expected, weights, none, _ = trained(dtype, stream, between, settled=True)
    assert none == 0
    found, ours, ahead, at_once = trained(dtype, stream, between, settled=False)
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
    if between in ("nothing", "zero_grad()", "an evaluation", "a step left out"):
        assert at_once > 0
        assert ahead > 0 or stream == 1.0


def test_a_failed_update_lets_go_of_the_device_and_is_told() -> None:
    """If an update that the device waits for fails, the device goes on.

    The loop ends in the error before another step is committed.
    """
    net, data, optimizer = compiled(torch.bfloat16, timeout_s=20.0)
    engine: Any = session_of(net).engine

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            loss_of(net, *data[step % 3]).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(0, 6)
    engine.set_delay(Stage.CPU_UPDATE, 3000.0)
    engine.fail_next_update(0)
    with pytest.raises(EngineError, match="injected failure"):
        steps(6, STEPS)
    torch.cuda.synchronize()
