"""A running program's plan follows the machine: states move, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.config import Config
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.session import Session

from .models import Batches, Mlp, mlp

SLOW_US = 20_000  # beside steps of about a millisecond
EVERY, WINDOW = 8, 3


@dataclass
class Run:
    """A compiled model in training; `losses` of every step so far."""

    session: Session
    model: Any
    optimizer: Any
    batches: Batches
    losses: list[float]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(*self.batches[len(self.losses) % len(self.batches)])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))


@contextmanager
def running(**options: Any) -> Iterator[Run]:
    """The small MLP from the same weights each time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module
    model, batches = mlp()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), warmup_steps=WINDOW, **options)
    try:
        yield Run(session_of(model), model, optimizer, batches, [])
    finally:
        hytrain_fx.close(model)


@pytest.mark.parametrize("stage", [Stage.CPU_UPDATE, Stage.H2D], ids=lambda stage: stage.name)
def test_the_plan_follows_a_host_that_becomes_slow(stage: Stage) -> None:
    """When workers, or copies back, become slow, units go to the device.

    No graph is captured for it, and losses keep their bits.
    """
    with running(replan_every=EVERY) as run:
        run.train(2 + WINDOW + 1)
        planning, graphs = run.session.planning, len(run.session.capture.graphs)
        assert planning.plan.source == "windowed"
        run.session.engine.set_delay(stage, SLOW_US)
        before, slow_from = planning.plan, run.session.steps_done
        while planning.plan.k < len(run.session.units) - 1 and run.session.steps_done < slow_from + 20:
            run.train(1)
        assert planning.plan.k >= len(run.session.units) - 1
        assert planning.plan.k >= before.k
        assert len(run.session.capture.graphs) == graphs
        placed = [place is Placement.GPU for place in run.session.states.placement.values()]
        assert sum(placed) >= len(placed) - 2
        run.train(3)
        losses, k = run.losses, 2
    with running(k=k) as fixed:
        fixed.train(len(losses))
        assert fixed.losses == losses


def test_a_plan_that_cannot_change_is_renewed() -> None:
    """With no room for states on the device the plan stays.

    What is predicted for it follows the measurements.
    """
    with running(replan_every=EVERY, gpu_states=0) as run:
        run.train(2 + WINDOW + 1)
        planning = run.session.planning
        first = planning.plan
        run.session.engine.set_delay(Stage.H2D, SLOW_US)
        run.train(20)
        assert len(planning.history) == 2
        assert planning.plan.rows == first.rows
        assert "looked at again after" in planning.plan.notes[-1]
        assert planning.verdict is not None
        assert not planning.verdict.moves
        assert planning.plan.predicted["step_us"] > 2 * first.predicted["step_us"]


def test_records_are_taken_only_in_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that change are measured `warmup_steps` at a time, and only those are recorded."""
    with running(replan_every=EVERY, gpu_states=0) as run:
        switched: list[bool] = []
        record = run.session.engine.record

        def switch(on: bool) -> None:
            switched.append(on)
            record(on)

        monkeypatch.setattr(run.session.engine, "record", switch)
        steps_on = 0
        for step in range(2 + WINDOW + 4 * EVERY):
            run.session.engine.set_delay(Stage.H2D, SLOW_US * (step // EVERY % 2))
            run.train(1)
            steps_on += bool(switched and switched[-1])
        windows = switched.count(False)
        assert windows >= 3
        assert steps_on <= WINDOW * (windows + 1)


def test_a_given_share_is_streamed_from_the_first_step_and_profiled() -> None:
    """`stream=0.5` streams about half of the parameters that are not resident; bits stay.

    It does so before and after the plan is solved.
    """
    with running(stream=0.5, gpu_states=0) as run:
        assert Placement.STREAM in run.session.states.placement.values()
        run.train(2 + WINDOW + 2)
        planning = run.session.planning
        assert planning.plan.source == "windowed"
        assert planning.plan.inputs["stream_share"] == 0.5
        assert planning.profile is not None
        assert planning.profile.can_stream
        streamed = planning.plan.numel(Placement.STREAM)
        assert 0.3 < streamed / planning.profile.params < 0.7
        rows = [row for row, place in run.session.states.placement.items() if place is Placement.STREAM]
        assert streamed == sum(run.session.table.parameters[row].numel() for row in rows)
        assert planning.plan.predicted["stream_bytes"] >= 12 * streamed
        assert "streamed" in str(hytrain_fx.explain(run.model))
        losses = run.losses
    with running(k=0) as fixed:
        fixed.train(len(losses))
        assert fixed.losses == losses


def test_a_fixed_k_streams_the_given_share_of_the_rest() -> None:
    """With k=1 and stream=1 the first unit is resident and every other one streamed."""
    with running(k=1, stream=1.0) as run:
        run.train(2 + WINDOW + 2)
        of_first = set(run.session.units[run.session.capture.unit_order[0]].rows)
        assert [place for row, place in run.session.states.placement.items() if row not in of_first] == [Placement.STREAM] * (
            len(run.session.table) - len(of_first))
        assert {run.session.states.placement[row] for row in of_first} == {Placement.GPU}
        assert run.session.planning.plan.source == "fixed k"


def test_on_a_cpu_nothing_is_streamed_that_was_not_asked_for() -> None:
    """`stream="auto"` is 0 with the model on the CPU, and no times for streaming are taken."""
    assert Config().stream == "auto"
    with running() as run:
        run.train(2 + WINDOW + 2)
        assert run.session.planning.profile is not None
        assert not run.session.planning.profile.can_stream
        assert Placement.STREAM not in run.session.states.placement.values()


def test_an_engine_that_cannot_stream_says_so() -> None:
    """A given share with the torch engine is an error that names both."""
    model = Mlp()
    with pytest.raises(UnsupportedError, match=r"stream=0\.5 streams states, and the torch engine cannot"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), engine="torch", stream=0.5)
