"""Loops under torch.set_default_device or set_default_dtype have the bits of loops without.

On a GPU programs set "cuda"; here it is "meta", whose tensors have no values: a tensor that the
library makes without saying where would have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of

from .loops import HYPER, assert_same, weights

STEPS = 8  # the profile is there after 7
META = torch.device("meta")


def trained(options: dict[str, Any], *, under_meta: bool) -> dict[str, Any]:
    """Clipped, scaled steps, a checkpoint loaded between them, and an optimizer's own options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48)).to(torch.bfloat16)
    batches = [torch.randn(4, 48, dtype=torch.bfloat16) for _ in range(STEPS)]
    losses = []
    with META if under_meta else nullcontext():
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **options)
        for step, batch in enumerate(batches):
            loss = (model(batch).float() - 1.0).square().mean()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 3:
                optimizer.load_state_dict(optimizer.state_dict())
                model.load_state_dict(model.state_dict())
        session, saved = session_of(model), optimizer.state_dict()["state"]
        found = {"losses": losses, "weights": weights(model),
                 "profile": session.planning.profile, "troubles": session.planning.aside.troubles,
                 "states": {f"{row} {name}": value for row, state in saved.items() for name, value in state.items()}}
        hytrain_fx.close(model)
    return found


@pytest.mark.parametrize("options", [{}, {"k": 0}, {"weights": "streamed", "k": 0}, {"moments": "bf16"}, {"engine": "torch"}],
                         ids=lambda of: ",".join(map(str, of.values())) or "solved")
def test_a_default_device_changes_nothing(options: dict[str, Any]) -> None:
    """Losses, weights and states have the same bits; steps are measured, and no trouble is told."""
    found, expected = trained(options, under_meta=True), trained(options, under_meta=False)
    assert found["profile"] is not None
    assert found["troubles"] == ()
    assert found["losses"] == expected["losses"]
    assert_same(found["weights"], expected["weights"])
    assert_same(found["states"], expected["states"])


class Averaging(torch.optim.Optimizer):
    """It says which dtype its states have."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                state["average"].lerp_(parameter.grad, 0.3)
                parameter.sub_(state["average"], alpha=group["lr"])


@pytest.fixture
def bf16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hytrain_fx.Lion])
def test_step_counts_are_whole_under_another_default_dtype(kind: Any, bf16_by_default: None) -> None:
    """The number 257, which bf16 does not have, is saved after 256 steps and one."""
    torch._dynamo.reset()
    plain = nn.Linear(4, 4, dtype=torch.float32)
    model, optimizer = hytrain_fx.compile(plain, kind(plain.parameters(), lr=1e-3))
    for already in (0, 256):
        saved = optimizer.state_dict()
        for state in saved["state"].values():
            state["step"].fill_(already)
        optimizer.load_state_dict(saved)
        model(torch.ones(2, 4, dtype=torch.float32)).sum().backward()
        optimizer.step()
    assert [float(state["step"]) for state in optimizer.state_dict()["state"].values()] == [257.0, 257.0]
    hytrain_fx.close(model)


def test_an_optimizer_of_the_user_under_another_default_dtype(bf16_by_default: None) -> None:
    """It is tried with a parameter in fp32, as it will be given."""
    torch._dynamo.reset()
    plain = nn.Linear(256, 256, dtype=torch.float32)
    model, optimizer = hytrain_fx.compile(plain, Averaging(plain.parameters(), lr=0.1))
    before = plain.weight.detach().clone()
    model(torch.ones(2, 256, dtype=torch.float32)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(plain.weight, before)
    hytrain_fx.close(model)
