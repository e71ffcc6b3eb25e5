"""Hooks on what autograd saves (`torch.autograd.graph.saved_tensors_hooks`), with streamed weights.

Every bit is the loop's with resident weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.weights.fetched_units import NAN_VARIABLE
from hytrain_fx.weights.streamed_weights import StreamedWeights

from .loops import HYPER, Loop, compare
from .models import Batches

OPTIONS: dict[str, Any] = {"weights": "streamed", "workers": 1, "timeout_s": 60.0}
WIDTH, LAYERS = 32, 6


@pytest.fixture(autouse=True, scope="module")
def nan_slots() -> Iterator[None]:
    """A slot is NaN once its weights have been read: who reads late trains on NaN."""
    os.environ[NAN_VARIABLE] = "1"
    yield
    del os.environ[NAN_VARIABLE]


def layers() -> tuple[nn.Module, Batches]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model.to(torch.bfloat16), [(torch.randn(4, WIDTH, dtype=torch.bfloat16),) for _ in range(3)]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(*batch).float().pow(2).mean()
    return found


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


Hooks = Callable[[], AbstractContextManager[Any]]
READING: dict[str, Hooks] = {
    "copies when packed": lambda: saved_tensors_hooks(torch.clone, same),
    "copies when unpacked": lambda: saved_tensors_hooks(same, torch.clone),
    "wider": lambda: saved_tensors_hooks(lambda t: (t.dtype, t.float()), lambda packed: packed[1].to(packed[0])),
    "on the CPU": save_on_cpu,
}


def loop_with(hooks: Hooks, around_backward: Hooks = nullcontext, steps: int = 3) -> Loop:
    """Ordinary steps, forward and backward within these."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(steps):
            with hooks():
                loss = loss_of(model, batches[step % len(batches)])
            with around_backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return loop


@pytest.mark.parametrize("hooks", READING.values(), ids=READING)
def test_hooks_see_the_weights_that_a_graph_saves(hooks: Hooks) -> None:
    """Autograd saves them when the graph has run: they have their memory then."""
    compare(layers, loop_with(hooks), **OPTIONS)


@pytest.mark.parametrize("hooks", READING.values(), ids=READING)
def test_a_forward_without_hooks_may_come_before_the_backward(hooks: Hooks) -> None:
    """It takes no memory that the hooks of an earlier one have kept or will read."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for batch in batches:
            with hooks():
                first = loss_of(model, batch)
            second = loss_of(model, batches[0])
            with torch.no_grad():
                losses.append(float(loss_of(model, batch)))
            second.backward()
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    compare(layers, loop, **OPTIONS)


def test_hooks_around_the_backward_alone_see_no_weight() -> None:
    """What the forward has saved has none."""
    compare(layers, loop_with(nullcontext, READING["copies when packed"]), **OPTIONS)


class Inside(nn.Module):
    """Its own forward has hooks around some of its layers, which are a graph of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.around = layers()[0], layers()[0]
        self.hooks = saved_tensors_hooks(torch.clone, same)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        self.switch(on=True)
        x = self.around(x)
        self.switch(on=False)
        return x

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def switch(self, on: bool) -> None:
        (self.hooks.__enter__ if on else self.hooks.__exit__)()


def test_hooks_that_a_model_sets_itself() -> None:
    """They are seen where a graph runs, not where the model is called."""
    compare(lambda: (Inside().to(torch.bfloat16), layers()[1]), loop_with(nullcontext), **OPTIONS)


def compiled() -> tuple[Any, Any, Batches]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    made, batches = layers()
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters(), **HYPER), **OPTIONS)
    return model, optimizer, batches


def on_device(model: Any) -> set[bool]:
    """Whether streamed weights have memory of their own. Nobody is told."""
    return {of.has_memory for of in session_of(model).states.streamed.values()}


def test_weights_are_streamed_again_without_hooks() -> None:
    """They stay on the device from a forward with hooks to the next one that has none."""
    model, optimizer, batches = compiled()
    loop_with(READING["copies when packed"])(model, optimizer, batches)
    assert on_device(model) == {True}
    with READING["copies when packed"](), torch.no_grad():
        loss_of(model, batches[0])
    loop_with(nullcontext, steps=1)(model, optimizer, batches)
    assert on_device(model) == {False}
    with READING["copies when packed"](), torch.no_grad():
        loss_of(model, batches[0])  # nothing is saved
    assert on_device(model) == {False}
    hytrain_fx.close(model)


def test_checkpointing_keeps_no_weight_on_the_device() -> None:
    """Its hooks read nothing of what they are given, so a forward under it streams its weights."""

    def loss_within(model: Any, batch: Any) -> torch.Tensor:
        return loss_of(lambda x: checkpoint(model, x, use_reentrant=False), batch)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for batch in batches:
            loss = loss_within(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    compare(layers, loop, **OPTIONS)
    model, optimizer, batches = compiled()
    loop_with(nullcontext)(model, optimizer, batches)
    kept = loss_within(model, batches[0])
    assert on_device(model) == {False}
    kept.backward()
    hytrain_fx.close(model)


def test_a_device_without_room_for_all_weights_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The OutOfMemoryError of a forward with hooks names them, and the loop can go on without."""
    model, optimizer, batches = compiled()
    loop_with(nullcontext)(model, optimizer, batches)

    def fill(self: Any, rows: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(StreamedWeights, "fill", fill)
    with pytest.raises(torch.OutOfMemoryError, match="no room") as found, save_on_cpu():
        loss_of(model, batches[0])
    assert "hooks on saved tensors" in found.value.__notes__[0]
    assert "save_on_cpu" in found.value.__notes__[0]
    monkeypatch.undo()
    loop_with(nullcontext, steps=1)(model, optimizer, batches)
    hytrain_fx.close(model)
