"""engine="deepspeed": DeepSpeedCPUAdam on the host's states, near the reference.

What it cannot do is refused.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError, EngineError
from hytrain_fx.ir.states import ADAMW
from hytrain_fx.runtime.arithmetic import AdamScalars, adamw_
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.fallback.host_updates import DeepSpeedAdam

from .engine_loop import EngineLoop, host_states
from .models import mlp

pytestmark = pytest.mark.sample(0)  # DeepSpeed's build alone takes over a minute

STEPS = 6
LR = 1e-2
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "no decay": {"weight_decay": 0.0},
    "maximize": {"maximize": True},
    "beta1 below a half": {"betas": (0.3, 0.9)},
    "eps 1e-3": {"eps": 1e-3},
    "lr 0": {"lr": 0.0},
}


@pytest.fixture(scope="module")
def update() -> Iterator[DeepSpeedAdam]:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    patch = pytest.MonkeyPatch()
    patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # where ninja is, in a venv not activated
    yield DeepSpeedAdam()
    patch.undo()


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_step_is_near_the_reference(update: DeepSpeedAdam, options: dict[str, Any], dtype: torch.dtype, decoupled: bool) -> None:
    """Masters are within 1e-5 of the way that they went.

    The hyper-parameters are recovered from the scalars; factors and both decays are tried.
    """
    torch.manual_seed(0)
    group = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1} | options
    weight = torch.randn(10_007).to(dtype)
    ours, reference = host_states(weight), host_states(weight)
    assert ours.slot is not None
    for step in range(1, STEPS + 1):
        grad = torch.randn(weight.numel()).to(dtype)
        scalars = AdamScalars.of(group, step, decoupled=decoupled, torch_cuda=False, factors=(0.3, 1.7) if step % 2 else ())
        ours.slot.copy_(grad)
        update(ours, scalars)
        adamw_(grad, reference.master, reference.states, scalars)
    torch.testing.assert_close(ours.master, reference.master, rtol=5e-7, atol=1e-5 * STEPS * LR)
    for found, expected, atol in zip(ours.states, reference.states, (1e-6, 1e-7), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)
    assert torch.equal(ours.slot, grad)  # it can be read until the next backward
    if dtype != torch.float32:
        assert ours.out is not None
        assert torch.equal(ours.out, ours.master.to(dtype))


def test_the_engine_runs_it_on_the_host_only(update: DeepSpeedAdam) -> None:
    """Rows on the host are near the reference, a row on the device has its bits."""
    engine = TorchEngine(torch.device("cpu"), 1 << 20, timeout_s=60.0, adam="deepspeed")
    try:
        assert engine.name == "deepspeed"
        loop = EngineLoop(engine, (70_000, 17, 4096), torch.float32, on_device=frozenset({2}))
        for _ in range(3):
            loop.step()
        engine.drain(range(3))
        for weight, state in zip(loop.weights, loop.reference, strict=True):
            torch.testing.assert_close(weight, state.master, rtol=5e-7, atol=3e-7)
        assert torch.equal(loop.weights[2], loop.reference[2].master)
    finally:
        engine.close()


def test_training_with_it_is_near_native_training(update: DeepSpeedAdam) -> None:
    """Losses of a whole loop agree to 1e-4."""
    losses: dict[str, list[float]] = {}
    for name in ("deepspeed", "native"):
        torch.manual_seed(0)
        model, batches = mlp()
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=LR), engine=name, k=0)
        losses[name] = []
        for batch in batches * 3:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        hytrain_fx.close(model)
    assert losses["deepspeed"] == pytest.approx(losses["native"], rel=1e-4)
    assert losses["native"][-1] < losses["native"][0]


def test_states_that_it_does_not_have_are_refused_before_training(update: DeepSpeedAdam) -> None:
    """States with a running maximum, and moments in bf16, are refused when placed."""
    states = host_states(torch.randn(10))
    with_maximum = replace(states, table=ADAMW, states=(*states.states, torch.zeros(10)))
    with pytest.raises(EngineError, match="row 3: DeepSpeedCPUAdam has no amsgrad"):
        update.require_supported(3, with_maximum)
    with pytest.raises(EngineError, match="DeepSpeedCPUAdam has no moments in bf16"):
        update.require_supported(3, host_states(torch.randn(10), narrow=True))


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing deepspeed is a ConfigError with the command that installs it; no thread is left."""
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    before = threading.active_count()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=re.escape("pip install hytrain-fx[deepspeed]")):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), engine="deepspeed")
    assert threading.active_count() == before


def test_an_op_that_does_not_build_is_an_engine_error(update: DeepSpeedAdam, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build's own message is handed on."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    def fail(self: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(CPUAdamBuilder, "load", fail)
    with pytest.raises(EngineError, match="no compiler here"):
        TorchEngine(torch.device("cpu"), 1 << 20, timeout_s=1.0, adam="deepspeed")
