"""A `.grad` that the loop gives to another parameter is that one's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .loops import Loop, compare
from .models import Batches, mlp
from .test_two_models import Net, agree

Move = Callable[[Any, Any], None]


def swap(one: Any, other: Any) -> None:
    one.grad, other.grad = other.grad, one.grad


def take(one: Any, other: Any) -> None:
    one.grad = other.grad


def give(one: Any, other: Any) -> None:
    other.grad = one.grad


def take_scaled(one: Any, other: Any) -> None:
    other.grad.mul_(0.5)
    one.grad = other.grad.detach()


def take_and_edit(one: Any, other: Any) -> None:
    one.grad, other.grad = other.grad, one.grad + 0.01


MOVES: dict[str, Move] = {move.__name__: move for move in (swap, take, give, take_scaled, take_and_edit)}


def moving(move: Move, *, backwards: int = 1) -> Loop:
    """Steps of so many backwards, with a move after the first and one before `step()`."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):
            for number in range(backwards):
                loss = model(*batches[(step + number) % len(batches)])
                loss.backward()
                losses.append(float(loss.detach()))
                move(model.body[0].weight, model.body[2].weight)
                move(model.body[2].bias, model.first.bias)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return loop


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("move", MOVES)
def test_step_reads_a_moved_gradient(move: str, k: int) -> None:
    """Two parameters may exchange gradients, or share one, before `step()`."""
    compare(mlp, moving(MOVES[move]), k=k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_backward_adds_to_a_moved_gradient(k: int) -> None:
    """The next micro-batch's gradient is added to what the parameter has been given."""
    compare(mlp, moving(swap, backwards=3), k=k)


def test_a_check_for_nan_reads_a_moved_gradient() -> None:
    """With `on_nonfinite` the gradients that are checked are those that `step()` takes."""
    compare(mlp, moving(swap), k=0, on_nonfinite="skip")


@pytest.mark.parametrize("k", [0, 2])
def test_a_parameter_without_a_gradient_is_given_one(k: int) -> None:
    """A parameter that no graph reads may be given another's gradient."""

    def make() -> tuple[nn.Module, Batches]:
        model: Any
        model, batches = mlp()
        model.unused = nn.Linear(8, 8)
        return model, batches

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            model.unused.weight.grad = model.body[0].weight.grad
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    compare(make, loop, k=k)


def test_a_gradient_moves_to_another_model() -> None:
    """A gradient of one compiled model may be the `.grad` of another's parameter."""

    def train(models: Any, optimizers: Any) -> list[float]:
        losses = []
        for _ in range(3):
            for model in models:
                loss = model(torch.randn(4, 5)).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
            models[0].first.weight.grad = models[1].first.weight.grad
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    agree(train, lambda: (Net(5, 3), Net(5, 3)))
