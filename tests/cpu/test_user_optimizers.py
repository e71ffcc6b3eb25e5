"""What a user's optimizer reads besides its gradient and state, and what else its class does.

Every loop here also runs in plain torch, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx

from .loops import assert_same, weights
from .models import Batches
from .optimizers import WithRate
from .saved import start

Loop = Callable[[Any, Any, Batches], list[Any]]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def assert_as_plain(make: Make, loop: Loop) -> None:
    """What the loop gives, and the weights after it, have the bits of plain torch.

    Rows are on both sides.
    """
    results = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        model, batches = start()
        optimizer: Any = make(model)
        if is_ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=2)
        else:
            model.compile()
        try:
            results.append((loop(model, optimizer, batches), weights(model)))
        finally:
            if is_ours:
                hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


def steps(count: int, between: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None) -> Loop:
    """An ordinary loop; `between` is called after each step, with its number."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(count):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            between(model, optimizer, step)
        return losses

    return loop


class Clipped(WithRate):
    """Clips each gradient's elements by an attribute of its own, or by one in its group."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, clip: Any = 1.0) -> None:
        super().__init__(params, lr)
        self.clip = clip
        for group in self.param_groups:
            group.setdefault("bound", 1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            bound = group["bound"]
            most = min(float(self.clip), float(bound.min()) if isinstance(bound, torch.Tensor) else bound)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.clamp(-most, most), alpha=group["lr"])


# ---- Options that are tensors ----


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_learning_rate_of_one_element_follows_its_scheduler(shape: tuple[int, ...]) -> None:
    """Whatever its shape, the next step has the value that a scheduler has written into it."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return steps(5, lambda *_: scheduler.step())(model, optimizer, batches)

    assert_as_plain(lambda model: torch.optim.SGD(model.parameters(), torch.full(shape, 0.1), momentum=0.9, foreach=False), loop)


@pytest.mark.parametrize("size", [3, 1000])
def test_every_element_of_an_option_counts(size: int) -> None:
    """A step that reads a tensor of its group finds what is in it now, however large it is."""

    def tighter(model: Any, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["bound"][size // 2] = 0.01 / (step + 1)

    assert_as_plain(lambda model: Clipped([{"params": list(model.parameters()), "bound": torch.ones(size)}]), steps(4, tighter))


class Bound:
    """An object that a class keeps its numbers in."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_numbers_within_an_object_count() -> None:
    """A step reads an attribute of an object that the optimizer holds as it is now."""
    bound = Bound(1.0)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        bound.value = 1.0

        def tighter(model: Any, optimizer: Any, step: int) -> None:
            bound.value = 0.01 / (step + 1)

        return steps(4, tighter)(model, optimizer, batches)

    assert_as_plain(lambda model: Clipped(model.parameters(), clip=bound), loop)


class Drawing(WithRate):
    """Scales its step by what a random generator of its own gives next."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, 0.1)
        self.random = Random(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        scale = self.random.random()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * scale)


def test_an_object_that_a_step_changes_goes_on_from_there() -> None:
    """Also where its state is not in attributes, as of a random generator."""
    assert_as_plain(lambda model: Drawing(model.parameters()), steps(4))
