"""Slots of streamed weights in training: how many are made, and who gets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.cost_model.fetch_depth import FetchDepth
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.weights.device_slots import Slot, SlotPool
from hytrain_fx.weights.fetched_units import FetchedUnits

from .interpreted import graphs_interpreted
from .test_device_slots import no_room

WIDTH = 64
SLOT_BYTES = 2 * WIDTH * WIDTH


class Branches(nn.Module):
    """Layers that every step reads, and layers of which it reads one half or the other."""

    def __init__(self, shared: int, each: int) -> None:
        super().__init__()
        self.shared, self.one, self.other = (nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n)) for n in (shared, each, each))

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        for layer in (*self.shared, *(self.other if other else self.one)):
            x = torch.tanh(layer(x))
        return x.square().mean()


@contextmanager
def compiled(shared: int, each: int = 0, kind: type[Branches] = Branches, **options: Any) -> Iterator[tuple[Any, Any, FetchedUnits]]:
    """Model, optimizer and the units that come to slots."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = kind(shared, each).to(torch.bfloat16)
    plain = torch.optim.AdamW(made.parameters(), lr=1e-2)
    with graphs_interpreted():
        model, optimizer = hytrain_fx.compile(made, plain, weights="streamed", k=0, workers=1, timeout_s=20.0, **options)
        yield model, optimizer, session_of(model).nodes.fetched
        hytrain_fx.close(model)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def train(model: Any, optimizer: Any, steps: int, **arguments: Any) -> None:
    for step in range(steps):
        model(batch(step), **arguments).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("fit", [1, 2])
def test_where_slots_do_not_fit_fewer_units_come_ahead(fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first forward on, also where memory runs out a second time. No error is seen."""
    make = SlotPool._make

    def within(pool: SlotPool, wanted: int) -> Slot:
        if pool.nbytes + wanted > fit * SLOT_BYTES:
            raise torch.OutOfMemoryError("no more slots fit")
        return make(pool, wanted)

    monkeypatch.setattr(SlotPool, "_make", within)
    with compiled(6) as (model, optimizer, units):
        train(model, optimizer, 4)
        assert units.ahead == fit - 1
        assert units.slot_bytes == fit * SLOT_BYTES


def test_all_slots_of_a_solved_depth_are_made() -> None:
    """At once, though updates are so late that nothing has come ahead. Memory is as estimated."""
    with compiled(6) as (model, optimizer, units):
        session = session_of(model)
        session.engine.set_delay(Stage.CPU_UPDATE, 2000.0)
        train(model, optimizer, 2)
        session.eager.streamed.follow(FetchDepth(4, 0.0, 0.0, 5 * SLOT_BYTES, None, capped=False))
        assert units.slot_bytes == 5 * SLOT_BYTES
        train(model, optimizer, 2)
        memory = hytrain_fx.explain(model).memory
        assert memory.estimate is not None
        assert memory.weight_slots_bytes == memory.estimate.weight_slots_bytes == 5 * SLOT_BYTES
        units.look_ahead(3)
        assert "3 units are brought ahead of need, where 4 were solved" in str(hytrain_fx.explain(model).details())


def test_slots_are_made_for_what_steps_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for weights that no graph reads, nor before a step. Without room none is made ahead."""
    depth = FetchDepth(6, 0.0, 0.0, 0, None, capped=False)
    with compiled(3, 3) as (model, optimizer, units):
        streamed = session_of(model).eager.streamed
        streamed.follow(depth)
        assert units.slot_bytes == 0
        train(model, optimizer, 2)
        streamed.follow(depth)
        assert units.slot_bytes == 6 * SLOT_BYTES
        units.drop_slots()
        with monkeypatch.context() as patch:
            patch.setattr(SlotPool, "_make", no_room)
            streamed.follow(depth)
        assert units.slot_bytes == 0
        train(model, optimizer, 1)


def test_no_room_for_a_slot_ahead_of_need_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be repeated: it goes on with the slots that there are, and so do later steps."""
    with compiled(6) as (model, optimizer, units):
        engine = session_of(model).engine
        units.look_ahead(4)
        issued, late = engine.issued, True
        # in forwards updates are late, so that slots ahead of need are first wanted in a backward
        monkeypatch.setattr(engine, "issued", lambda rows: not late and issued(rows))
        for step in range(4):
            late = True
            loss = model(batch(step))
            late = False
            with monkeypatch.context() as patch:
                patch.setattr(SlotPool, "_make", no_room)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert units.slot_bytes < 5 * SLOT_BYTES
        assert units.ahead == units.slot_bytes // SLOT_BYTES - 1
        assert f"{units.ahead} unit" in str(hytrain_fx.explain(model).details())


def test_a_branch_that_is_not_taken_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was brought ahead for it gives way with the step: others come ahead as before."""
    came: list[bool] = []
    take = SlotPool.take_ahead

    def counted(pool: SlotPool, nbytes: int) -> Slot | None:
        slot = take(pool, nbytes)
        came.append(slot is not None)
        return slot

    monkeypatch.setattr(SlotPool, "take_ahead", counted)
    with compiled(3, 4) as (model, optimizer, _):
        train(model, optimizer, 3)
        train(model, optimizer, 2, other=True)
        came.clear()
        train(model, optimizer, 2, other=True)
        assert sum(came) > len(came) / 2


class Halfway(Branches):
    """Its first layers run without gradients, in graphs of their own."""

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        with torch.no_grad():
            for layer in self.other:
                x = torch.tanh(layer(x))
            torch._dynamo.graph_break()
        return super().forward(x)


def test_layers_without_gradients_are_part_of_a_step() -> None:
    """Their weights come ahead in training, though their graphs are those of an evaluation."""
    with compiled(3, 1, Halfway) as (model, optimizer, units):
        train(model, optimizer, 3)
        kinds = {graph.kind for graph in session_of(model).capture.graphs}
        assert kinds == {GraphKind.INFERENCE, GraphKind.FORWARD, GraphKind.BACKWARD}
        assert len(set(units._order._last)) == 5


def test_an_evaluation_does_not_change_what_comes_ahead() -> None:
    """The order of a step is that of steps, whatever is evaluated between forward and backward."""
    with compiled(5) as (model, optimizer, units):
        train(model, optimizer, 2)
        before = list(units._order._last)
        loss = model(batch(0))
        with torch.no_grad():
            for number in range(3):
                model(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert units._order._last == before
