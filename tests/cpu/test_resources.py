"""Start-up by phase and memory by tier of real sessions: as data, logged and explained."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.startup import Phase
from hytrain_fx.runtime import launch
from hytrain_fx.runtime.native.engine import NativeEngine
from hytrain_fx.runtime.states.slabs import HostSlab, Pinning
from hytrain_fx.session.resources import pinning_of

from .explained import compiled
from .loops import whole_pieces
from .models import Batches
from .test_placements import plan_of

WARMUP = 2
COLD = 2


def wide() -> tuple[nn.Module, Batches]:
    """Large enough that rounding is small beside it."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Wide(), [(torch.randn(4, 64),) for _ in range(3)]


@pytest.mark.parametrize(("options", "steps"), [({"k": 1}, COLD), ({}, COLD + WARMUP)])
def test_start_up_ends_with_the_first_full_speed_step(options: dict[str, Any], steps: int) -> None:
    """With k given, start-up ends with the first warm step.

    Else it ends with the first step under the solved plan. Later steps change nothing.
    """
    with compiled(wide, warmup_steps=WARMUP, **options) as (model, step):
        session = session_of(model)
        for _ in range(steps):
            assert not session.startup.complete
            step()
        assert session.startup.first_step_us == 0
        step()
        found = session.startup
        assert found.complete
        assert found.warm_up_steps == steps
        step()
        assert session.startup == found
    for phase in (Phase.SETUP, Phase.ENGINE, Phase.MASTERS, Phase.COMPILE_FORWARD, Phase.COMPILE_BACKWARD, Phase.PASSES,
                  Phase.WARM_UP, Phase.PLAN, Phase.FIRST_STEP):
        assert found.spent_us(phase) > 0, phase
    assert found.pinned_bytes == found.host_memory_us == 0
    assert found.own_us < found.total_us - found.compile_forward_us - found.compile_backward_us


def test_the_passes_are_not_counted_as_compiling() -> None:
    """The time of the passes is at least what the passes themselves say."""
    with compiled(wide, k=0) as (model, step):
        step()
        session = session_of(model)
        assert session.startup.passes_us >= sum(graph.rewrite_seconds for graph in session.capture.graphs) * 1e6


def test_it_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The estimate is logged before any allocation, both tables at full speed, each once."""
    with caplog.at_level(logging.INFO, logger="hytrain_fx"), compiled(wide, k=2) as (_, step):
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["memory, estimated"]
        for _ in range(COLD + 3):
            step()
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert told.count("memory, estimated") == told.count("start-up, measured") == told.count("estimated  ") == 1


def test_nothing_is_estimated_for_nobody() -> None:
    """Without a listener no text is made; explain still has the estimate."""
    with compiled(wide, k=2) as (model, _):
        assert hytrain_fx.explain(model).memory.estimate is not None


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 2}, {"k": 4}])
def test_the_estimate_is_right_within_5_per_cent(options: dict[str, Any]) -> None:
    """The estimate of memory by tier is right in a session that has run to full speed.

    The explanation shows both.
    """
    with compiled(wide, **options) as (model, step):
        for _ in range(COLD + 1):
            step()
        found = hytrain_fx.explain(model)
        session = session_of(model)
        engine_ring: Any = getattr(session.engine, "_ring", None)
    memory, estimate = found.memory, found.memory.estimate
    assert estimate is not None
    assert memory.device_states_bytes == pytest.approx(estimate.device_states_bytes, rel=0.05)
    assert memory.host_bytes == pytest.approx(estimate.host_bytes, rel=0.05)
    assert memory.weights_bytes == estimate.weights_bytes == sum(p.nbytes for p in session.table.parameters)
    assert engine_ring is None or engine_ring.nbytes == estimate.ring_bytes == memory.ring_bytes
    text, raw = found.details(), json.loads(found.to_json())
    assert "device: states resting there" in text
    assert "first full-speed step" in text
    assert raw["memory"]["estimated"]["host_states_bytes"] == estimate.host_states_bytes
    assert raw["startup"]["measured"]["complete"] is True


def test_the_estimate_follows_the_plan() -> None:
    """After the states have moved, the estimate is for their new placement."""
    with compiled(wide, k=0) as (model, step):
        step()
        session = session_of(model)
        before = hytrain_fx.explain(model).memory
        session.drain()
        numels = [parameter.numel() for parameter in session.table.parameters]
        session.states.move(whole_pieces(numels, [Placement.GPU] * len(numels)), None)
        after = hytrain_fx.explain(model).memory
    assert before.device_states_bytes == after.host_bytes == 0
    assert after.estimate is not None
    assert after.device_states_bytes == after.estimate.device_states_bytes > 0


def test_memory_for_streaming_is_lent_to_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the plan streams nothing, the ring has the memory that staging would take.

    Each plan changes that, and the estimate knows it. Weights stay those of a session whose plan
    never changed.
    """
    for name, nbytes in {"TRANSIT_BYTES": 60_000, "STAGING_BYTES": 20_000, "_RING_SLACK_BYTES": 0}.items():
        monkeypatch.setattr(launch, name, nbytes)

    def trained(plans: dict[int, Placement]) -> list[torch.Tensor]:
        with compiled(wide, k=0) as (model, step):
            session, sizes = session_of(model), {Placement.CPU: 60_000, Placement.STREAM: 40_000}
            engine, streams = session.engine, Placement.CPU
            assert isinstance(engine, NativeEngine)
            for number in range(8):
                if number in plans:
                    streams = plans[number]
                    session.place(plan_of(session, [Placement.CPU, streams]))
                step()
                memory = hytrain_fx.explain(model).memory
                assert memory.estimate is not None
                assert engine._ring.nbytes == memory.ring_bytes == memory.estimate.ring_bytes == sizes[streams]
                assert (engine._staging is not None) == (memory.estimate.staging_bytes > 0) == (streams is Placement.STREAM)
            return [parameter.detach().clone() for parameter in model.parameters()]

    plans = {2: Placement.STREAM, 4: Placement.CPU, 5: Placement.STREAM, 7: Placement.CPU}
    for found, expected in zip(trained(plans), trained({}), strict=True):
        assert torch.equal(found, expected)


def test_pinning_counts_each_batch_once() -> None:
    """Slabs that were pinned together share their figures."""
    slabs = [HostSlab(64) for _ in range(4)]
    slabs[0].pinning = slabs[1].pinning = Pinning(1000, 2.0, 3.0)
    slabs[2].pinning = Pinning(500, 1.0, 1.0)
    assert pinning_of(slabs) == (1500, 7.0)
