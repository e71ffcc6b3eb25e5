"""The streamed share follows what running steps show, and no bit of the training does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hytrain_fx.cost_model.balance import streamed_share
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import FinishTimes, Stage

from .engine_loop import EngineLoop
from .loops import Twins, plain_loop
from .models import Batches, gpt
from .test_streaming import running


def test_the_engine_tells_when_updates_of_each_kind_ended() -> None:
    """Of the step before the last commit; slow CPU updates end later, a kind that did not run has 0."""
    with running() as engine:
        loop = EngineLoop(engine, (5000, 6000), torch.float32, streamed=frozenset([1]))
        loop.step()
        loop.check()
        assert engine.finish_times() == FinishTimes(), "nothing had ended when the first step was committed"
        engine.set_delay(Stage.CPU_UPDATE, 30_000)
        loop.step()
        loop.check()
        first = engine.finish_times()
        assert first.cpu_us > 0
        assert first.streamed_us > 0
        loop.step()
        loop.check()
        assert engine.finish_times().cpu_us > 15_000
    with running() as engine:
        loop = EngineLoop(engine, (5000,), torch.float32)
        for _ in range(2):
            loop.step()
            loop.check()
        assert engine.finish_times().cpu_us > 0
        assert engine.finish_times().streamed_us == 0


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    def make() -> tuple[torch.nn.Module, Batches]:
        model, batches = gpt()
        return model.to(torch.bfloat16), batches

    made = Twins(make, workers=2, replan_every=0)
    made.restart()
    plain_loop(10)(made.ours, made.optimizer, made.batches)  # the first plan is solved
    made.session.planning.profile = None  # one of a CPU has no times for streaming: nothing is predicted with it
    yield made
    made.close()


@pytest.mark.parametrize(("ends", "grows"), [(FinishTimes(9e6, 3e6), True), (FinishTimes(3e6, 9e6), False), (FinishTimes(9e6, 0), None)])
def test_shares_move_towards_the_kind_that_ends_early(
    twins: Twins, ends: FinishTimes, grows: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While steps show that one kind ends late, parameters go to the other, a few at a time, and the training is the reference's."""
    planning = twins.session.planning
    monkeypatch.setattr(twins.session.engine, "finish_times", lambda: ends)
    seen: list[float] = []

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses: list[float] = []
        if model is twins.ours:
            why = dict.fromkeys(("reason", "streamed_reason"), lambda unit: "test")
            planning._put_in_force(prefix_plan(planning.units(), 0, source="windowed", share=0.5, **why))
        for _ in range(12):
            losses += plain_loop(1)(model, optimizer, batches)
            if model is twins.ours:
                seen.append(streamed_share(planning.plan))
        return losses

    twins.agree(loop)
    if grows is None:
        assert set(seen) == {seen[0]}
        return
    assert seen[-1] > 0.5 if grows else seen[-1] < 0.5
    assert seen == sorted(seen, reverse=not grows)
    assert any(note.startswith("the streamed share was balanced") for note in planning.plan.notes)
    assert planning.placement_of(planning.plan) == twins.session.states.placement
    assert Placement.GPU not in twins.session.states.placement
