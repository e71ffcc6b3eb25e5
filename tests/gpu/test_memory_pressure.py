"""The device's memory runs out for a long batch: the step runs all the same."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of

WIDTH, LAYERS = 4096, 8  # 1.6 GB of states
SHORT_ROWS, LONG_ROWS, WARMED, STEPS = 64, 12_288, 12, 18  # a long batch takes 2 GB, some of it in the loss
FREE_BYTES, WAITED_S = 10e9, 180
MOST_TRIES = 6  # of a step; half of the states leave each time


@pytest.fixture(autouse=True)
def capped() -> Iterator[None]:
    """This test may take 4 GB of the GPU, which others may have for a while.

    Dropped models of earlier tests go first; what this process still has is not counted.
    """
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(WAITED_S):
        if torch.cuda.mem_get_info()[0] > FREE_BYTES:
            break
        time.sleep(1.0)
    else:
        pytest.skip(f"other processes have all but {torch.cuda.mem_get_info()[0] / 1e9:.1f} GB of the GPU's memory")
    capped_bytes = 4e9 + torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(capped_bytes / torch.cuda.get_device_properties(0).total_memory)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def train(**options: Any) -> tuple[list[float], Any]:
    """Short batches, and a long one, whose forward or backward may run out of memory."""
    torch._dynamo.reset()  # else a second model gets graphs for any number of rows, whose sums have other last bits
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)
    losses, data = [], torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows = LONG_ROWS if step == WARMED else SHORT_ROWS
        if step == WARMED and not options:
            on_device_bytes, free_bytes = session_of(model).resources.tiers().device_bytes, torch.cuda.mem_get_info()[0]
            assert on_device_bytes > 1e9, f"{on_device_bytes} bytes of states are on the device, {free_bytes} bytes of it are free"
        x = torch.randn(rows, WIDTH, generator=data).to("cuda", torch.bfloat16)
        for attempt in range(MOST_TRIES):
            try:
                loss = model(x).float().square().mean()
                loss.backward()
                break
            except torch.OutOfMemoryError:
                if attempt + 1 == MOST_TRIES or not session_of(model).resources.tiers().device_bytes:
                    raise  # nothing is left to give
                loss = None
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_a_long_batch_trains_where_states_had_its_memory() -> None:
    """Losses are those of a run whose states are all on the host."""
    losses, model = train()
    session = session_of(model)
    assert session.pressure.times > 0
    assert any("memory ran out" in note for plan in session.planning.history for note in plan.notes)
    hytrain_fx.close(model)
    del model, session
    torch.cuda.empty_cache()
    expected, model = train(gpu_states=0.0)
    assert session_of(model).pressure.times == 0
    assert losses == expected
    hytrain_fx.close(model)
