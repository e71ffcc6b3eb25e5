"""The device's memory over a step, against what autograd is seen to keep."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.explain.plan.step_memory import step_memory

from .models import checkpointed_gpt, gpt


def kept_by_autograd(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
    """The loss, and the bytes that are kept for its backward besides parameters and inputs."""
    there = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *batch]}
    kept: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in there:
            kept[memory.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*batch)
    return loss, sum(kept.values())


@pytest.mark.parametrize("make", [lambda: gpt(layers=3, width=16), checkpointed_gpt], ids=["gpt", "checkpointed"])
def test_what_graphs_keep_is_what_autograd_keeps(make: Any) -> None:
    """In all; it rises through the forward, falls through the backward, and is 0 at both ends."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = make()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), workers=1, k=1)
    for batch in batches[:3]:
        loss, kept = kept_by_autograd(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    explained = hytrain_fx.explain(model)
    points = step_memory(explained)
    units = len(explained.units)
    assert len(points) == 2 * units + 1
    series = [point.kept_bytes for point in points]
    assert max(series) == series[units] == sum(explained.kept_bytes) == kept
    assert series[: units + 1] == sorted(series[: units + 1])
    assert series[units:] == series[: units + 1][::-1]
    assert series[0] == series[-1] == 0
    gradients = [point.gradients_bytes for point in points]
    assert gradients[: 2 * units] == [0] * 2 * units  # k=1: the first unit's, which comes last
    assert gradients[-1] == explained.units[0].grad_bytes
    memory = explained.memory
    fixed = memory.weights_bytes + memory.device_states_bytes + memory.ring_bytes + memory.staging_bytes
    assert {point.fixed_bytes for point in points} == {fixed}
    times = [point.time_us for point in points if point.time_us is not None]
    assert len(times) == len(points)
    assert times == sorted(times)
    hytrain_fx.close(model)


def test_it_is_told_as_bars_and_values() -> None:
    """One line a point, also as HTML and JSON; many units are shown in part, the fullest too."""
    torch._dynamo.reset()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(30)))
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), workers=1)
    assert "device memory over a step" not in hytrain_fx.explain(model).details()
    for _ in range(2):
        model(torch.ones(64, 8)).sum().backward()
        optimizer.step()
    found = hytrain_fx.explain(model)
    text = found.details()
    assert "device memory over a step, from known sizes: at most" in text
    lines = [line for line in text.splitlines() if line.startswith(("begin ", "forward of", "backward of"))]
    assert 20 < len(lines) <= 26
    assert any(line.split()[:3] == ["forward", "of", "29.0"] for line in lines)
    bars = [line.split()[-1] for line in lines]
    assert max(map(len, bars)) == 40
    assert all(set(bar) <= set("=#") for bar in bars)
    assert "#" in max(bars, key=len)
    assert len(json.loads(found.to_json())["step_memory"]) == 61
    assert "device memory over a step" in found._repr_html_()
    hytrain_fx.close(model)
