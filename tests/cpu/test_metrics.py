"""`hytrain_fx.metrics`: each figure is what the session, `explain` and the marks say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.planning.marks import Mark, StepMarks
from hytrain_fx.runtime.energy import Counter, Meter
from hytrain_fx.session import resources
from hytrain_fx.session.step_metrics import METRICS

from .loops import plain_loop
from .models import Mlp, mlp
from .test_placements import plan_of

ENERGY = {"gpu_energy_joules", "cpu_energy_joules"}


@pytest.fixture
def compiled() -> Iterator[Callable[..., tuple[Any, Any, Any]]]:
    """Makes a compiled model, its optimizer and batches; closes it at the end."""
    made: list[Any] = []

    def make(optimizer_class: Any = torch.optim.AdamW, lr: float = 1e-2, **options: Any) -> tuple[Any, Any, Any]:
        torch._dynamo.reset()
        model, batches = mlp()
        given = {name: options.pop(name) for name in ("momentum",) if name in options}
        _, optimizer = hytrain_fx.compile(model, optimizer_class(model.parameters(), lr=lr, **given), **options)
        made.append(model)
        return model, optimizer, batches

    yield make
    for model in made:
        hytrain_fx.close(model)


def assert_bytes_are_explained(model: Any) -> None:
    """Bytes by tier are those that `explain` adds up."""
    found, memory = hytrain_fx.metrics(model), hytrain_fx.explain(model).memory
    assert found["host_state_bytes"] == memory.host_bytes
    assert found["device_state_bytes"] == memory.device_states_bytes


def test_the_figures_are_the_sessions(compiled: Any) -> None:
    """What is not known yet is left out; then every key but energy is there, in METRICS' order."""
    model, optimizer, batches = compiled(k=0)
    assert {"step_seconds", "step_call_seconds", "exposed_seconds"}.isdisjoint(hytrain_fx.metrics(model))
    plain_loop(3)(model, optimizer, batches)
    session, found = session_of(model), hytrain_fx.metrics(model)
    assert list(found) == [name for name in METRICS if name not in ENERGY]
    assert found["step_seconds"] == session.step_us[-1] / 1e6
    assert found["step_call_seconds"] == session.in_step_us / 1e6
    assert (found["steps_done"], found["steps_captured"], found["steps_skipped"], found["k_units"]) == (3, 3, 0, 0)
    assert (found["resident_share"], found["streamed_share"], found["host_share"]) == (0.0, 0.0, 1.0)
    assert found["host_state_bytes"] > 0
    assert_bytes_are_explained(model)


def test_bytes_and_shares_follow_a_move(compiled: Any) -> None:
    """States that have moved are counted where they rest now."""
    model, optimizer, batches = compiled(k=0)
    plain_loop(1)(model, optimizer, batches)
    session = session_of(model)
    before = hytrain_fx.metrics(model)
    plan = plan_of(session, [Placement.GPU, Placement.CPU, Placement.STREAM])
    session.place(plan)
    found = hytrain_fx.metrics(model)
    for name, place in (("resident", Placement.GPU), ("streamed", Placement.STREAM), ("host", Placement.CPU)):
        assert found[f"{name}_share"] == pytest.approx(plan.numel(place) / sum(p.numel() for p in model.parameters()))
    assert found["host_state_bytes"] < before["host_state_bytes"]
    assert_bytes_are_explained(model)


def test_states_that_the_first_step_makes_are_counted(compiled: Any) -> None:
    """SGD's momentum comes with the first update; by then the sums were asked for already."""
    model, optimizer, batches = compiled(torch.optim.SGD, momentum=0.9, k=0)
    before = hytrain_fx.metrics(model)["host_state_bytes"]
    plain_loop(1)(model, optimizer, batches)
    hytrain_fx.settle(model)  # the updates of the newest step may still be under way
    assert hytrain_fx.metrics(model)["host_state_bytes"] > before
    assert_bytes_are_explained(model)


@pytest.mark.parametrize("engine", ["native", "torch"])
def test_steps_left_out_are_counted(compiled: Any, engine: str) -> None:
    """A step with a NaN gradient counts as done and as skipped, however it is left out."""
    model, optimizer, batches = compiled(k=0, engine=engine, on_nonfinite="skip")
    bad = [tuple(torch.full_like(part, float("nan")) for part in batches[0])]
    for given in (batches[:1], bad, batches[:1]):
        plain_loop(1)(model, optimizer, given)
    found = hytrain_fx.metrics(model)
    assert (found["steps_done"], found["steps_skipped"]) == (3, 1)


def test_exposed_time_is_the_sum_of_the_newest_steps_stalls() -> None:
    """Gates and what the loop is held up for count. Work between them and older steps do not."""
    marks = StepMarks(torch.device("cpu"))
    assert marks.last_stall_us() is None
    for stall_s in (0.05, 0.002):
        marks.mark(Mark.FORWARD_BEGIN)
        for unit in range(2):
            marks.mark(Mark.WAIT_BEGIN, unit)
            time.sleep(stall_s)
            marks.mark(Mark.WAIT_END, unit)
            time.sleep(0.001)
        with marks.held("read"):
            time.sleep(stall_s)
        marks.mark(Mark.FORWARD_END)
        marks.mark(Mark.GRADS, 0)
        marks.mark(Mark.BACKWARD_END)
        marks.end_step()
        newest = StepMarks(torch.device("cpu"))
        newest._finished.append(marks._finished[-1])
        assert marks.last_stall_us() == pytest.approx(sum(newest.median(2).stall_us))


def test_energy_is_there_where_it_is_asked_for_and_can_be_read(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier without a counter has no key. Nothing is read where energy is not asked for."""
    shown = iter([100, 350])
    meter = Meter({"cpu": (Counter(lambda: next(shown), 0.5, 1000),)}, {"gpu": "no GPU trains"})
    monkeypatch.setattr(resources, "meter_of", lambda device: meter)
    model, _, _ = compiled(k=0)
    assert ENERGY.isdisjoint(hytrain_fx.metrics(model))
    found = [hytrain_fx.metrics(model, energy=True) for _ in range(2)]
    assert [of["cpu_energy_joules"] for of in found] == [0.0, 125.0]
    assert "gpu_energy_joules" not in found[1]


def test_a_model_that_is_not_compiled_has_none() -> None:
    """The error says so."""
    with pytest.raises(UnsupportedError, match="not compiled"):
        hytrain_fx.metrics(Mlp())
