"""A backward that ends in an error outside the graphs leaves no part of a sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .loops import Twins, plain_loop
from .models import Batches, mlp

Then = Callable[[Any, Any], object]


class Broken(torch.autograd.Function):
    """Its backward is an error."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("between the graphs")


@pytest.fixture(params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    yield made
    made.close()


def read(model: Any) -> list[float | None]:
    return [None if p.grad is None else float(p.grad.double().sum()) for p in model.parameters()]


def drop(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def replace(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)


def penalty_alone(model: Any, optimizer: Any) -> None:
    sum(p.sin().sum() for p in model.parameters()).backward()


THEN: dict[str, Then] = {
    "nothing": lambda model, optimizer: None,
    "read": lambda model, optimizer: read(model),
    "step": lambda model, optimizer: optimizer.step(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "drop": drop,
    "replace": replace,
    "penalty alone": penalty_alone,
}


@pytest.mark.parametrize("then", THEN)
def test_gradients_are_what_they_were(twins: Twins, then: str) -> None:
    """`.grad` is that of the micro-batch before, and whatever the loop makes of it stays so."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = plain_loop(1)(model, optimizer, batches)
        for _ in range(2):
            model(*batches[0]).backward()
            loss = Broken.apply(model(*batches[1])) + model(*batches[2])  # type: ignore[no-untyped-call]
            with pytest.raises(ArithmeticError):
                loss.backward()
            del loss
            found.append(THEN[then](model, optimizer))
            model(*batches[1]).backward()
            found.append(read(model))
            optimizer.step()
            optimizer.zero_grad()
        return found

    twins.agree(loop)
