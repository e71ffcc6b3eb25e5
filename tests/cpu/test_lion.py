"""Lion, the second native kernel, has the bits of hytrain_fx.Lion's plain step.

This holds wherever states are, in any loop.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import LION
from hytrain_fx.runtime.engine import RowStates
from hytrain_fx.runtime.lion import Lion, LionScalars
from hytrain_fx.runtime.native import build
from hytrain_fx.runtime.native.engine import NativeEngine

from .adamw_operands import KINDS, VARIANTS, Operands, assert_same_bits, kernel_, operands
from .adamw_rows import row_of
from .engine_loop import host_states
from .loops import TorchAdam, assert_same, weights
from .models import Batches
from .saved import through_a_file
from .test_cuda_kernel_on_cpu import Run, run_rows
from .test_guess import SLOT_BYTES, ClippedLoop
from .test_placements import plan_of

__all__ = ["run_rows"]  # the fixture, for this file too

GROUP: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACES = [(Placement.CPU,), (Placement.GPU,), (Placement.STREAM,), tuple(Placement)]


def lion_operands(n: int, kind: str, dtype: torch.dtype) -> Operands:
    """Operands with directions of 0 among them, where a weight must stay, also -0."""
    o = operands(n, n, kind, dtype, None if dtype == torch.float32 else dtype)
    o.vmax = None
    o.m[::7], o.grad[::7], o.master[::21] = 0.0, 0.0, -0.0
    return o


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", ["native", *VARIANTS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_is_the_plain_step(dtype: torch.dtype, variant: str, kind: str) -> None:
    """Master, state and rounded weight agree on any instruction set.

    Tails are included, and factors act as `grad.mul_` applies them.
    """
    if variant != "native" and platform.machine() != "x86_64":
        pytest.skip("builds x86 instruction sets")
    flags = build.FLAGS if variant == "native" else (*(flag for flag in build.FLAGS if flag != "-march=native"), *VARIANTS[variant])
    for n in (1, 63, 1003):
        found = lion_operands(n, kind, dtype)
        expected = found.clone()
        kernel_(found, LionScalars.of(GROUP, factors=(0.3, 1.7)), build.load(("kernels_c.cpp",), flags=flags))
        grad = expected.grad.clone().mul_(0.3).mul_(1.7).float()
        parameter = nn.Parameter(expected.master)
        plain = Lion([parameter], **GROUP)
        plain.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": expected.m}
        parameter.grad = grad
        plain.step()
        if expected.out is not None:
            expected.out.copy_(expected.master)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "dtype"), [(6, torch.float32), (7, torch.bfloat16)])
def test_the_cuda_kernel_has_the_bits_of_the_cpus(run_rows: Run, number: int, dtype: torch.dtype, kind: str) -> None:
    """The kernel as C++: vectors and tails, also off 16 bytes.

    Values of any bits have NaN and infinities among them, and a skipped row stays.
    """
    scalars = LionScalars.of(GROUP, factors=(0.3,))
    for start, skip in ((0, 0.0), (1, 0.0), (0, 1.0)):
        found = lion_operands(700 + start, kind, dtype).cut(start, 700 + start)
        expected, left_out = found.clone(), torch.tensor([skip])
        run_rows(number, [row_of(found, scalars, None, left_out)])
        if not skip:
            kernel_(expected, scalars)
        assert_same_bits(found, expected)


def net(dtype: torch.dtype) -> tuple[Any, Batches]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).to(dtype)
    return model, [(torch.randn(5, 6).to(dtype),) for _ in range(3)]


def clipped(model: Any, optimizer: Any, batches: Batches) -> None:
    for step, norm in enumerate((1e9, 1e9, 1e-3, 1e9)):
        model(*batches[step % 3]).square().mean().backward()
        clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()


def scaled(model: Any, optimizer: Any, batches: Batches) -> None:
    """The second step overflows, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        loss = model(*batches[step % 3]).float().square().mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@functools.cache
def plain_weights(dtype: torch.dtype, loop: Any) -> dict[str, torch.Tensor]:
    """The same loop as on torch's own compiled model, trained once for all places of states.

    In fp32 that uses Lion itself, in 16 bits Lion on masters kept by hand.
    """
    model, batches = net(dtype)
    model.compile()
    own = Lion(model.parameters(), **GROUP) if dtype == torch.float32 else TorchAdam(model.parameters(), Lion, **GROUP)
    loop(model, own, batches)
    return weights(model)


@pytest.mark.parametrize(("dtype", "loop"), [*((dtype, clipped) for dtype in DTYPES), *((dtype, scaled) for dtype in DTYPES[:2])])
@pytest.mark.parametrize("places", PLACES, ids=lambda places: "-".join(places))
def test_training_has_the_bits_of_the_plain_loop(dtype: torch.dtype, places: tuple[Placement, ...], loop: Any) -> None:
    """Clipped and scaled, states on the CPU, on the device, streamed, and one after the other."""
    model, batches = net(dtype)
    _, optimizer = hytrain_fx.compile(model, Lion(model.parameters(), **GROUP), k=0, engine="native")
    session = session_of(model)
    session.place(plan_of(session, places))
    assert {session.states[row].table for row in range(6)} == {LION}
    loop(model, optimizer, batches)
    expected = plain_weights(dtype, loop)
    assert_same(weights(model), expected)
    hytrain_fx.close(model)


def test_the_torch_engine_has_the_same_bits() -> None:
    """Without a C++ compiler, masters of bf16 weights on the host and on the device."""
    model, batches = net(torch.bfloat16)
    _, optimizer = hytrain_fx.compile(model, Lion(model.parameters(), **GROUP), k=1, engine="torch")
    clipped(model, optimizer, batches)
    assert_same(weights(model), plain_weights(torch.bfloat16, clipped))
    hytrain_fx.close(model)


class LionLoop(ClippedLoop):
    """With Lion's states and numbers."""

    def _states(self, weight: torch.Tensor, halves: bool) -> RowStates:
        states = host_states(weight)
        return replace(states, table=LION, states=states.states[:1])

    def _scalars(self) -> LionScalars:
        return LionScalars.of(GROUP)


def test_guesses_are_made_and_put_right() -> None:
    """fp32: a late factor is guessed, and a wrong guess is updated again.

    That starts from a shadow slot, which has two arrays.
    """
    engine = NativeEngine(torch.device("cpu"), 2, 40 << 20, 20.0, shadow_bytes=40 * SLOT_BYTES)
    try:
        loop = LionLoop(engine, (700_000, 70_000), torch.float32, amsgrad=False)
        for factor in [1.0] * 6 + [0.5, 0.5]:
            loop.step(factor)
            loop.check()
        counts = engine.guess_counts()
        assert counts.params > counts.redone > 0
        assert counts.shadow_bytes % (SLOT_BYTES // 3 * LION.tensors) == 0
    finally:
        engine.close()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_checkpoint_is_a_plain_lions(dtype: torch.dtype) -> None:
    """A state dict holds step, exp_avg and a 16-bit parameter's master.

    Resuming elsewhere gives the bits of never having stopped.
    """
    model, batches = net(dtype)
    _, first = hytrain_fx.compile(model, Lion(model.parameters(), **GROUP), k=0)
    clipped(model, first, batches)
    saved, states = through_a_file(model.state_dict(), first.state_dict())
    assert states["state"][0].keys() == {"step", "exp_avg"} | ({"master"} if dtype == torch.bfloat16 else set())
    clipped(model, first, batches)
    expected = weights(model)
    hytrain_fx.close(model)
    for k in (0, 3) if dtype == torch.bfloat16 else (0, 3, None):
        model, _ = net(dtype)
        optimizer: Any = Lion(model.parameters(), **GROUP)
        if k is None:
            model.compile()
        else:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=k)
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
        clipped(model, optimizer, batches)
        assert_same(weights(model), expected)
        if k is not None:
            hytrain_fx.close(model)


def test_it_trains() -> None:
    """A loss comes down, with a closure too; options out of range are refused."""
    model, batches = net(torch.float32)
    optimizer = Lion(model.parameters(), lr=1e-2)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = (model(*batches[0]) - 1).square().mean()
        found.backward()
        return found

    assert float(loss()) > 0.5
    assert [float(optimizer.step(loss)) for _ in range(100)][-1] < 0.1
    for wrong in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="expected 0 <="):
            Lion(model.parameters(), **wrong)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(UnsupportedError, match="lr of a parameter group"):
        hytrain_fx.compile(model, optimizer)


def test_a_lion_of_the_users_own_runs_its_own_step() -> None:
    """A class derived from Lion has no kernel: its step may differ."""

    class Other(Lion):
        pass

    model, batches = net(torch.float32)
    _, optimizer = hytrain_fx.compile(model, Other(model.parameters(), **GROUP), k=0)
    assert session_of(model).rule is not None
    clipped(model, optimizer, batches)
    assert_same(weights(model), plain_weights(torch.float32, clipped))
    hytrain_fx.close(model)
