"""Memory that a stream beside the computing one reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.runtime.side_stream import SideStream, read_here

NUMBERS, BUSY_CYCLES = 1 << 20, 200_000_000


@pytest.mark.parametrize("noted", [True, False])
def test_what_is_read_beside_may_be_dropped_at_once(noted: bool) -> None:
    """Its memory is not given away before it is read.

    Without `read_here` it is, which shows that this test can fail.
    """
    side = SideStream(torch.device("cuda", 0))
    dropped = torch.ones(NUMBERS, device="cuda")
    with side.beside():
        torch.cuda._sleep(BUSY_CYCLES)
        copy = dropped.clone()
        if noted:
            read_here(dropped)
    del dropped
    overwritten = torch.zeros(NUMBERS, device="cuda")
    side.join()
    assert bool((copy == 1).all()) is noted
    assert not overwritten.any()


def test_what_a_side_stream_read_before_an_error_is_kept() -> None:
    """A failed node's memory is not given away before the side stream has read it."""
    side = SideStream(torch.device("cuda", 0))
    dropped, copies = torch.ones(NUMBERS, device="cuda"), list[torch.Tensor]()

    def broken_off(reads: torch.Tensor) -> None:
        with side.beside(reads=reads):
            torch.cuda._sleep(BUSY_CYCLES)
            copies.append(reads.clone())
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        broken_off(dropped)
    del dropped
    overwritten = torch.zeros(NUMBERS, device="cuda")
    side.join()
    assert bool((copies[0] == 1).all())
    assert not overwritten.any()


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 2}, {"k": 4}], ids=["host", "both", "device"])
def test_backward_is_called_on_another_stream_than_the_forwards(options: dict[str, Any]) -> None:
    """Clipping after it reads gradients and norms that are there, as in the plain loop."""
    assert trained_on_two_streams(**options) == pytest.approx(trained_on_two_streams(), rel=1e-3)


def trained_on_two_streams(**options: Any) -> list[float]:
    """Norms of the gradients, and sums of the weights after it. Without options: by torch alone."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if options:
        model, optimizer = hytrain_fx.compile(model, optimizer, **options)
    else:
        model.compile()
    side, seen = torch.cuda.Stream(), []
    for step in range(6):
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = model(x).square().mean()
            torch.cuda._sleep(BUSY_CYCLES // 4)  # the backward comes late on this stream
        loss.backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
        x.record_stream(side)
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    if options:
        hytrain_fx.close(model)
    return [*map(float, seen), *sums]
