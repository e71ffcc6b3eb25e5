"""What only the torch engine has: it is the fallback, with threads in Python.

Factors are tensors. Whole training is compared with the native engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.config import Config
from hytrain_fx.errors import DroppedNodeError, EngineError, HytrainWarning
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.engine import CommitItem, RowSpec, Stage
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.fallback.lanes import Lane
from hytrain_fx.runtime.launch import make_engine

from .engine_loop import GROUP, EngineLoop, device_states, host_states
from .models import gpt

SCALARS = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False)


@pytest.fixture
def engine() -> Iterator[TorchEngine]:
    made = TorchEngine(torch.device("cpu"), 1 << 20, timeout_s=20.0)
    yield made
    made.close()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HYTRAIN_FX_CACHE", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_auto_says_so_and_takes_the_torch_engine() -> None:
    """The warning names what is missing; the engine works."""
    weight = torch.randn(10)
    with pytest.warns(HytrainWarning, match="slower torch engine is used.*no-such-compiler"):
        engine = make_engine(Config(), [weight])
    assert engine.name == "torch"
    loop = EngineLoop(engine, (10,), torch.bfloat16)
    loop.step()
    loop.check()
    engine.close()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_native_engine_is_refused() -> None:
    """Who asks for the native engine gets it or an error."""
    with pytest.raises(EngineError, match="no-such-compiler"):
        make_engine(Config(engine="native"), [torch.randn(10)])


def trained(dtype: torch.dtype, engine: Any, k: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and weights of a few clipped steps."""
    torch.manual_seed(0)
    model, batches = gpt()
    model = model.to(dtype)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine=engine, k=k)
    losses = []
    for batch in batches * 2:
        loss = model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = [p.detach().clone() for p in model.parameters()]
    hytrain_fx.close(model)
    return losses, weights


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_has_the_native_engine_s_bits(dtype: torch.dtype, k: int) -> None:
    """Losses and weights of a clipped loop agree in every bit.

    Units are on the host only, or on both sides.
    """
    losses, weights = trained(dtype, "torch", k)
    native_losses, native_weights = trained(dtype, "native", k)
    assert losses == native_losses
    assert len(set(losses)) > 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, native_weights, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factors_on_the_device_are_waited_for(engine: TorchEngine, dtype: torch.dtype) -> None:
    """A factor may be a tensor that arrives after the gradient has landed.

    It gives the bits of the number that it holds.
    """
    weight, grad = torch.randn(1000).to(dtype), torch.randn(1000).to(dtype)
    reference = host_states(weight)
    engine.add_row(RowSpec(1000, 0, weight))
    engine.place_on_host(0, host_states(weight))
    engine.grad_offload([0], [grad])
    engine.arm_cpu([0])
    engine.arm_reload([0])
    engine.set_delay(Stage.D2H, 20_000)
    engine.commit([CommitItem(0, SCALARS, factors=(0.3, torch.tensor(0.7), 1.1))])
    engine.drain([0])
    numbers = tuple(torch.tensor(f).item() for f in (0.3, 0.7, 1.1))
    scalars = AdamScalars.of(GROUP, 1, decoupled=True, torch_cuda=False, factors=numbers)
    adamw_(grad, reference.master, reference.states, scalars)
    assert torch.equal(weight, reference.master.to(dtype))


def test_a_commit_with_a_dropped_node_commits_nothing(engine: TorchEngine) -> None:
    """If one row of a step cannot be committed, no row is.

    The repaired step still gives the reference's bits.
    """
    loop = EngineLoop(engine, (10, 10), torch.float32)
    grads = [torch.randn(10) for _ in range(2)]
    for row in range(2):
        engine.grad_offload([row], [grads[row]])
        engine.arm_cpu([row])
    engine.arm_reload([0])
    items = [CommitItem(row, SCALARS) for row in range(2)]
    with pytest.raises(DroppedNodeError, match="row 1"):
        engine.commit(items)
    assert not engine.pending(0)
    engine.arm_reload([1])
    engine.commit(items)
    for grad, state in zip(grads, loop.reference, strict=True):
        adamw_(grad, state.master, state.states, SCALARS)
    loop.check()


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_new_weight_is_no_edit_of_the_parameter(engine: TorchEngine, on_device: bool) -> None:
    """The engine's writes leave the parameter's version alone.

    A session takes a new version for a write from outside.
    """
    parameter = torch.nn.Parameter(torch.randn(100))
    weight, before = parameter.detach(), parameter.detach().clone()
    engine.add_row(RowSpec(100, 0, weight))
    if on_device:
        engine.place_on_device(0, device_states(weight))
        engine.commit([CommitItem(0, SCALARS, grad=torch.ones(100), at_end=True)])
    else:
        engine.place_on_host(0, host_states(weight))
        engine.grad_offload([0], [torch.ones(100)])
        engine.arm_cpu([0])
        engine.arm_reload([0])
        engine.commit([CommitItem(0, SCALARS)])
    engine.drain([0])
    assert not torch.equal(parameter.detach(), before)
    assert parameter._version == 0


def test_errors_name_the_parameter(engine: TorchEngine) -> None:
    """Where a row has a name, the error of a call says it once, and so does a failed worker's."""
    weight = torch.randn(10)
    engine.add_row(RowSpec(10, 0, weight, name="head.weight"))
    engine.place_on_host(0, host_states(weight))
    with pytest.raises(EngineError, match=r"row 0 \(head.weight\) is committed without a gradient"):
        engine.commit([CommitItem(0, SCALARS)])
    engine.fail_next_update(0)
    engine.grad_offload([0], [torch.ones(10)])
    engine.arm_cpu([0])
    engine.arm_reload([0])
    engine.commit([CommitItem(0, SCALARS)])
    with pytest.raises(EngineError, match=r"injected failure in row 0 \(head.weight\)$"):
        engine.wait([0])


def test_an_error_on_a_lane_is_raised_with_its_cause(engine: TorchEngine) -> None:
    """A copy that fails on its thread is the cause of the error at the next wait: no time-out."""
    EngineLoop(engine, (10,), torch.float32)
    failure = ValueError("the copy went wrong")

    def wrong() -> None:
        raise failure

    engine._lanes.run(Lane.D2H, wrong)
    engine._lanes.record(Lane.D2H).sync()
    with pytest.raises(EngineError, match="the copy went wrong") as raised:
        engine.wait([0])
    assert raised.value.__cause__ is failure


@pytest.mark.parametrize("lane", [Lane.D2H, Lane.H2D], ids=lambda lane: lane.name)
def test_an_engine_ended_from_its_own_thread_finishes_first(lane: Lane) -> None:
    """The garbage collector may end a model on any thread, also on the engine's own.

    What is committed still arrives, and all threads end.
    """
    before = threading.active_count()
    engine = TorchEngine(torch.device("cpu"), 1 << 20, timeout_s=20.0)
    loop = EngineLoop(engine, (100_000, 10), torch.bfloat16)
    engine.set_delay(Stage.CPU_UPDATE, 5_000)
    loop.step()

    def end() -> None:
        engine.drain(range(2))
        engine.close()

    engine._lanes.run(lane, end)
    deadline_s = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(1e-3)
    assert threading.active_count() == before
    for weight, state in zip(loop.weights, loop.reference, strict=True):
        assert torch.equal(weight, state.master.to(weight.dtype))


def test_times_of_every_stage_are_recorded(engine: TorchEngine) -> None:
    """One step gives a record of each stage of each row, none ending before it began.

    The update's time is the sum of its records.
    """
    loop = EngineLoop(engine, (70_000, 10), torch.bfloat16, on_device=frozenset({1}))
    engine.record(True)
    loop.step()
    loop.check()
    records = engine.take_records()
    seen: dict[int, set[Any]] = {row: {r.stage for r in records if r.row == row} for row in range(2)}
    assert seen == {0: {Stage.D2H, Stage.CPU_UPDATE, Stage.H2D}, 1: {Stage.GPU_UPDATE}}
    assert all(r.begin_us <= r.end_us for r in records)
    updates_us = sum(r.end_us - r.begin_us for r in records if r.stage is Stage.CPU_UPDATE)
    assert engine.cpu_update_us(0) == pytest.approx(updates_us)
    assert engine.take_records() == []
