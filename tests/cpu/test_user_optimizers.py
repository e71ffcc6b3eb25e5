"""What a user's optimizer reads besides its gradient and state, and what else its class does.

Every loop here also runs in plain torch, with the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import EngineError, HytrainError

from .loops import assert_same, plain_loop, weights
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
        return plain_loop(5, lambda *_: scheduler.step())(model, optimizer, batches)

    assert_as_plain(lambda model: torch.optim.SGD(model.parameters(), torch.full(shape, 0.1), momentum=0.9, foreach=False), loop)


@pytest.mark.parametrize("size", [3, 1000])
def test_every_element_of_an_option_counts(size: int) -> None:
    """A step that reads a tensor of its group finds what is in it now, however large it is."""

    def tighter(model: Any, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["bound"][size // 2] = 0.01 / (step + 1)

    assert_as_plain(lambda model: Clipped([{"params": list(model.parameters()), "bound": torch.ones(size)}]), plain_loop(4, tighter))


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

        return plain_loop(4, tighter)(model, optimizer, batches)

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
    assert_as_plain(lambda model: Drawing(model.parameters()), plain_loop(4))


# ---- What a loop has put on a parameter ----


class Multiplied(WithRate):
    """Reads a rate's factor, and a mask, from the parameter; where asked, divides by its norm."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, *, traced: bool = True) -> None:
        super().__init__(params, lr)
        self.traced = traced

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad * p.mask if hasattr(p, "mask") else p.grad
                    scale = 1.0 if self.traced else max(float(p.norm()), 0.5)
                    p.add_(grad, alpha=-group["lr"] * float(getattr(p, "lr_mult", 1.0)) / scale)


def marked(model: Any, *, traced: bool = True, **marks: Any) -> torch.optim.Optimizer:
    """An optimizer of parameters two of which carry marks, each another value."""
    for number, parameter in enumerate((model.first.weight, model.last.weight)):
        for key, value in marks.items():
            setattr(parameter, key, value / (number + 1))
    return Multiplied(model.parameters(), traced=traced)


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "op by op"])
@pytest.mark.parametrize("mult", [0.1, torch.tensor(0.1), torch.tensor([0.1])], ids=["float", "0-d", "1-d"])
def test_a_step_reads_what_is_on_its_parameter(traced: bool, mult: Any) -> None:
    """Each step has the value that is there now, also one that the loop has just set."""

    def other(model: Any, optimizer: Any, step: int) -> None:
        if step == 1:
            model.first.weight.lr_mult = 0.7
        if step == 2:
            del model.last.weight.lr_mult

    assert_as_plain(lambda model: marked(model, traced=traced, lr_mult=mult), plain_loop(4, other))


def test_a_number_on_a_parameter_may_be_written_in_place() -> None:
    """A tensor of one element that is there counts with what is in it now."""

    def twice(model: Any, optimizer: Any, step: int) -> None:
        model.first.weight.lr_mult.mul_(2)

    assert_as_plain(lambda model: marked(model, lr_mult=torch.tensor([0.1])), plain_loop(4, twice))


@pytest.mark.parametrize("size", [6, 600])
def test_a_mask_on_a_parameter_holds(size: int) -> None:
    """It is a tensor of the parameter's shape, of any size, and may change between steps."""

    def make(model: Any) -> torch.optim.Optimizer:
        model.first = nn.Linear(6, 8 * size)
        model.body[0] = nn.Linear(8 * size, 8)
        for p in model.parameters():
            torch.manual_seed(p.numel())
            p.mask = torch.rand(p.shape).round()
            nn.init.normal_(p, std=0.1)
        return Multiplied(model.parameters())

    assert_as_plain(make, plain_loop(4, lambda model, optimizer, step: model.first.weight.mask[step].fill_(step % 2)))


class Marking(WithRate):
    """Counts on the parameter, from some count of steps on."""

    def __init__(self, params: Iterable[Any], begins: int, *, traced: bool) -> None:
        super().__init__(params)
        self.begins, self.traced = begins, traced

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] if self.traced else group["lr"] / max(float(p.norm()), 0.5))
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    if state["count"] > self.begins:
                        p.stepped = True


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "op by op"])
@pytest.mark.parametrize("begins", [0, 4], ids=["at once", "later"])
def test_what_a_step_puts_on_a_parameter_is_refused(begins: int, traced: bool) -> None:
    """It would be lost. At compile, or at the step that does it first."""
    torch._dynamo.reset()
    model, batches = start()
    compiled = False
    try:
        with pytest.raises(HytrainError, match=r"Marking.step.. sets 'stepped' on a parameter, .* optimizer.state.parameter."):  # noqa: PT012
            _, optimizer = hytrain_fx.compile(model, Marking(model.parameters(), begins, traced=traced), k=1)
            compiled = True
            plain_loop(begins)(model, optimizer, batches)
            assert begins
            plain_loop(2)(model, optimizer, batches)
    finally:
        if compiled:
            with contextlib.suppress(EngineError):
                hytrain_fx.close(model)
