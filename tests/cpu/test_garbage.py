"""Python's garbage collector beside a training loop."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.runtime.garbage import FullCollections, uncollected


@contextmanager
def begun() -> Iterator[list[set[str]]]:
    """For each collection that begins inside: the functions that run then."""
    found: list[set[str]] = []

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            found.append({frame.f_code.co_qualname for frame, _ in traceback.walk_stack(None)})

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The smallest collection begins with nearly each new object."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1000, 1000)
    yield
    gc.set_threshold(*before)


def test_nothing_is_collected_inside_and_everything_after(eager_collector: None) -> None:
    """Also where it is nested. Where the program has turned it off, it stays off."""
    kept: list[Any] = []
    with uncollected():
        with begun() as found:
            with uncollected():
                kept += [[] for _ in range(1000)]
            kept += [[] for _ in range(1000)]
        assert not found
    with begun() as found:
        kept += [[] for _ in range(1000)]
    assert found
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_step_collects_nothing(eager_collector: None) -> None:
    """What a step makes for a moment outlives no collection: there is none."""
    torch._dynamo.reset()
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), workers=1)
    for _ in range(4):
        with begun() as found:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        assert any("CallGate.enter" in running for running in found)
        assert not any("Session._step" in running for running in found)


def test_full_collections_are_counted_and_told() -> None:
    """Others are not. Where they take much of the time, there is a line that says what helps."""
    gc.collect()  # what other tests have left
    before = list(gc.callbacks)
    counted = FullCollections()
    (own,) = (hook for hook in gc.callbacks if hook not in before)
    gc.collect(0)
    gc.collect(1)
    assert (counted.count, counted.total_us) == (0, 0.0)
    assert counted.in_words() is None
    gc.collect()
    gc.collect()
    assert counted.count == 2
    told = counted.in_words()
    assert told is not None
    assert "looked at every object 2 times" in told
    assert "call gc.freeze()" in told
    counted.forget()
    assert counted.in_words() is None
    del counted
    assert own not in gc.callbacks
