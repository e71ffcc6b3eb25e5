"""Learning-rate schedulers, closures, GradScaler and hooks around the compiled optimizer.

They have the bits of the same loop on a plain optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

import hytrain_fx

from .loops import HYPER, HandAdam, Loop, Twins, compare, plain_loop
from .models import Batches, mlp

STEPS = 6
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.8),
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 4], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.3, 1.0, 4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 1e-3, 1e-2, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 3e-2, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1.0, 2), lrs.ExponentialLR(o, 0.7)], [2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.3, 3), lrs.ExponentialLR(o, 0.7)]),
    "SWALR": lambda o: SWALR(o, 1e-3, anneal_epochs=3),
}


@pytest.fixture(scope="module")
def twins() -> Iterator[Twins]:
    made = Twins(mlp, k=1, workers=2, timeout_s=20.0)
    yield made
    made.close()


def scheduled(make: Callable[[Any], Any], steps: int = STEPS) -> Loop:
    """Steps with a scheduler made on the loop's own optimizer; rates are compared too."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        return _steps(model, optimizer, make(optimizer), batches, steps)

    return loop


def _steps(model: Any, optimizer: Any, scheduler: Any, batches: Batches, steps: int) -> list[float]:
    found = []
    for step in range(steps):
        loss = model(*batches[step % 3])
        loss.backward()
        optimizer.step()
        plateau = isinstance(scheduler, lrs.ReduceLROnPlateau)
        scheduler.step(loss.item()) if plateau else scheduler.step()
        optimizer.zero_grad()
        found += [float(loss.detach()), float(optimizer.param_groups[0]["lr"]), float(optimizer.param_groups[0]["betas"][0])]
    return found


def test_every_scheduler_of_torch_is_tried() -> None:
    """Every scheduler that torch has is in this file."""
    bases = {"LRScheduler", "Optimizer", "Counter", "Tensor"}
    found = {name for name, kind in vars(lrs).items() if isinstance(kind, type) and issubclass(kind, lrs.LRScheduler)} - bases
    assert {name for name in found if not name.startswith("_")} <= SCHEDULERS.keys()


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error:.*lr_scheduler.step:UserWarning")
def test_a_scheduler_made_after_compile(twins: Twins, name: str) -> None:
    """Rates, momenta, losses and weights are those of the plain loop.

    torch does not think the order of calls wrong.
    """
    twins.agree(scheduled(SCHEDULERS[name]))


@pytest.mark.filterwarnings("error:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"])
def test_a_scheduler_made_before_compile(name: str) -> None:
    """The scheduler holds the user's old optimizer, and its rates reach the new one.

    It does not warn that step() was overridden or never called.
    """
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **HYPER) if ours else HandAdam(model.parameters(), **HYPER)
        scheduler = SCHEDULERS[name](optimizer)
        if ours:
            _, optimizer = hytrain_fx.compile(model, optimizer)
        else:
            model.compile()
        results.append(_steps(model, optimizer, scheduler, batches, STEPS))
        if ours:
            hytrain_fx.close(model)
    assert results[1] == results[0]


def test_a_schedulers_state_is_saved_and_loaded(twins: Twins) -> None:
    """scheduler.state_dict() between two halves of a run gives the same rates as one run."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer)
        found = _steps(model, optimizer, scheduler, batches, 3)
        saved, rate = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
        scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer)
        scheduler.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = rate
        return found + _steps(model, optimizer, scheduler, batches, 3)

    twins.agree(loop)


def test_a_closure(twins: Twins) -> None:
    """step(closure) runs the closure with gradients enabled, steps, and returns its loss."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(*batches[step])
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(float(optimizer.step(closure).detach()))
        return losses

    twins.agree(loop)


def test_the_old_optimizer_object_steps_for_the_new_one() -> None:
    """A loop that kept its own optimizer object trains the same.

    step and zero_grad reach the compiled one.
    """
    compare(mlp, plain_loop(4))  # compare() hands the loop the user's own object
    torch._dynamo.reset()
    model, batches = mlp()
    old = torch.optim.AdamW(model.parameters())
    _, new = hytrain_fx.compile(model, old)
    assert isinstance(new, torch.optim.Optimizer)
    assert old.param_groups is new.param_groups
    model(*batches[0]).backward()
    old.step()
    assert new.state_dict()["state"][0]["step"] == 1
    assert old.state_dict()["state"][0]["step"] == 1
    old.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    hytrain_fx.close(model)


def test_step_hooks_of_the_optimizer_run(twins: Twins) -> None:
    """Hooks registered on the optimizer run before and after each step, as in torch."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        calls: list[str] = []
        handles = [
            optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_: calls.append("after")),
        ]
        losses = plain_loop(2)(model, optimizer, batches)
        for handle in handles:
            handle.remove()
        return [*losses, *calls]

    found: list[Any] = twins.agree(loop)
    assert found[2:] == ["before", "after"] * 2


def test_freezing_a_group_in_mid_run_by_its_rate(twins: Twins) -> None:
    """lr = 0 for some steps: moments go on, weights stay, as in torch."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        optimizer.param_groups[0]["lr"] = 0.0
        losses += plain_loop(2)(model, optimizer, batches)
        optimizer.param_groups[0]["lr"] = 1e-2
        return losses + plain_loop(2)(model, optimizer, batches)

    twins.agree(loop)


def test_a_parameter_frozen_in_mid_run_keeps_its_weight() -> None:
    """requires_grad_(False) midway stops gradient and update.

    With True again, the moments go on from where they were.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for trained in (True, False, True):
            model.first.requires_grad_(trained)
            losses += plain_loop(2)(model, optimizer, batches)
        return losses

    compare(mlp, loop, k=1)
