"""Two models with two optimizers in one loop.

Each is compiled for itself, and gradients go through both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, assert_same, weights

Models = tuple[Any, Any]
Train = Callable[[Models, tuple[Any, Any]], list[float]]
KS = {"host": (0, 0), "one each": (0, 2), "device": (2, 2)}


class Net(nn.Module):
    """Two layers."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ins, 6), nn.Linear(6, outs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def agree(train: Train, make: Callable[[], Models], ks: tuple[int, int] = (0, 0)) -> None:
    """Two models compiled by hytrain_fx train with the bits of two models compiled by torch.

    Those have optimizers made by hand.
    """
    losses: list[list[float]] = []
    left: list[list[dict[str, torch.Tensor]]] = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        models = make()
        owned = [p for p in models[1].parameters() if id(p) not in {id(q) for q in models[0].parameters()}]
        parameters = (list(models[0].parameters()), owned)
        if ours:
            adams = [torch.optim.AdamW(each, **HYPER) for each in parameters]
            options: dict[str, Any] = {"workers": 1, "timeout_s": 20.0}
            optimizers: Any = tuple(hytrain_fx.compile(m, o, k=k, **options)[1] for m, o, k in zip(models, adams, ks, strict=True))
            for model in models:
                for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
                    session_of(model).engine.set_delay(stage, 500)
        else:
            optimizers = tuple(HandAdam(each, **HYPER) for each in parameters)
            for model in models:
                model.compile()
        torch.manual_seed(1)
        losses.append(train(models, optimizers))
        left.append([weights(model) for model in models])
        for model in models if ours else ():
            hytrain_fx.close(model)
    assert losses[1] == losses[0]
    for found, expected in zip(left[1], left[0], strict=True):
        assert_same(found, expected)


def gan() -> Models:
    return Net(3, 4), Net(4, 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen judge", "unwanted gradients"])
@pytest.mark.parametrize("ks", KS.values(), ids=KS)
def test_a_generator_learns_through_a_judge(frozen: bool, ks: tuple[int, int]) -> None:
    """Two steps of the judge for one of the generator, whose loss goes through the judge.

    The judge's parameters are frozen or not.
    """

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        (make, judge), (makes, judges) = models, optimizers
        losses = []
        for step in range(6):
            noise, real = torch.randn(5, 3), torch.randn(5, 4)
            judges.zero_grad()
            loss = (F.softplus(-judge(real)) + F.softplus(judge(make(noise).detach()))).mean()
            loss.backward()
            judges.step()
            losses.append(float(loss.detach()))
            if step % 2:
                makes.zero_grad()
                if frozen:
                    judge.requires_grad_(False)
                loss = F.softplus(-judge(make(noise))).mean()
                loss.backward()
                assert not frozen or judge.first.weight.grad is not None  # what judges.step() left there
                makes.step()
                judge.requires_grad_(True)
                losses.append(float(loss.detach()))
        return losses

    agree(train, gan, ks)


@pytest.mark.parametrize("ks", KS.values(), ids=KS)
def test_one_loss_through_both(ks: tuple[int, int]) -> None:
    """An encoder and a decoder, each with an optimizer, after one backward.

    They are clipped together, then both step.
    """

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        losses = []
        for _ in range(5):
            x = torch.randn(5, 3)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = (models[1](models[0](x)) - x[:, :1]).square().mean()
            loss.backward()
            total = clip_grad_norm_([p for model in models for p in model.parameters()], 0.1)
            for optimizer in optimizers:
                optimizer.step()
            losses += [float(loss.detach()), float(total)]
        return losses

    agree(train, gan, ks)


def test_one_scaler_for_both() -> None:
    """GradScaler counts infinities for each optimizer: one step is skipped, the other is not."""

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        found = []
        for step in range(5):
            losses = [model(torch.randn(5, ins)).square().mean() for model, ins in zip(models, (3, 4), strict=True)]
            for at, loss in enumerate(losses):
                scaler.scale(loss * (float("inf") if (step, at) == (2, 1) else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            found += [*(float(loss.detach()) for loss in losses), scaler.get_scale()]
        return found

    agree(train, gan, (0, 1))


def test_models_that_learn_from_each_other() -> None:
    """Mutual distillation: each call gives the other's target; steps follow one another."""

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        losses = []
        for _ in range(4):
            x = torch.randn(5, 4)
            outs = [model(x) for model in models]
            for own, other, optimizer in zip(outs, reversed(outs), optimizers, strict=True):
                loss = (own - 0.5 * other.detach()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
        return losses

    agree(train, lambda: (Net(4, 2), Net(4, 2)), (0, 1))


class Headed(nn.Module):
    """A head on a trunk that is the other model's."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


def sharing() -> Models:
    first = Headed(nn.Linear(4, 6))
    return first, Headed(first.trunk)


@pytest.mark.parametrize("ks", KS.values(), ids=KS)
def test_a_layer_that_both_models_have(ks: tuple[int, int]) -> None:
    """The first model's optimizer has the shared trunk, the second's only its own head.

    Each loss reaches the trunk.
    """

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        losses = []
        for _ in range(5):
            x = torch.randn(5, 4)
            for optimizer in optimizers:
                optimizer.zero_grad()
            for model in models:
                loss = model(x).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
            for optimizer in optimizers:
                optimizer.step()
        return losses

    agree(train, sharing, (ks[0], min(ks[1], 1)))  # the second has one unit of its own


def test_a_gradient_of_a_gradient_is_torchs_error() -> None:
    """torch.compile has no double backward: a gradient penalty fails, as in plain torch.compile.

    Training goes on.
    """

    def train(models: Models, optimizers: tuple[Any, Any]) -> list[float]:
        x = torch.randn(5, 4).requires_grad_()
        out = models[1](x).sum()
        with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
            torch.autograd.grad(out, x, create_graph=True)[0].square().sum().backward()
        losses = []
        for _ in range(3):
            loss = models[1](torch.randn(5, 4)).square().mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            losses.append(float(loss.detach()))
        return losses

    agree(train, gan)


def test_one_optimizer_of_two_models_is_refused() -> None:
    """An optimizer that also has another model's parameters is an error that says so.

    One model that contains both is the way.
    """
    make, judge = gan()
    with pytest.raises(UnsupportedError, match="not the model's"):
        hytrain_fx.compile(make, torch.optim.AdamW([*make.parameters(), *judge.parameters()]))


def test_parts_of_a_compiled_container_may_be_called() -> None:
    """Two models in a ModuleDict with one optimizer run eagerly, and train as in plain torch."""
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        both: Any = nn.ModuleDict(dict(zip(("make", "judge"), gan(), strict=True)))
        optimizer: Any = HandAdam(both.parameters(), **HYPER)
        if ours:
            _, optimizer = hytrain_fx.compile(both, torch.optim.AdamW(both.parameters(), **HYPER), k=1)
        for _ in range(4):
            optimizer.zero_grad()
            both["judge"](both["make"](torch.randn(5, 3))).square().mean().backward()
            optimizer.step()
        results.append(weights(both))
        if ours:
            hytrain_fx.close(both)
    assert_same(results[1], results[0])


def compiled(model: nn.Module, ours: bool, k: int = 0) -> tuple[Any, Any]:
    """What to call for the model, and its optimizer.

    torch.compile() compiles an nn.Sequential; Module.compile() leaves it uncompiled.
    """
    if not ours:
        return torch.compile(model), HandAdam(model.parameters(), **HYPER)
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=k)


@pytest.mark.sample(0)
def test_two_models_with_two_optimizers() -> None:
    """A generator and a discriminator, each compiled, trained in turn through each other."""

    def train(ours: bool) -> list[dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        models = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        (make, makes), (judge, judges) = compiled(models[0], ours), compiled(models[1], ours, k=1)
        for _ in range(4):
            noise, real = torch.randn(6, 3), torch.randn(6, 4)
            judges.zero_grad()
            (F.softplus(-judge(real)) + F.softplus(judge(make(noise).detach()))).mean().backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-judge(make(noise))).mean().backward()  # leaves gradients in the judge that nobody wants
            makes.step()
        found = [weights(model) for model in models]
        for model in models if ours else ():
            hytrain_fx.close(model)
        return found

    for found, expected in zip(train(True), train(False), strict=True):
        assert_same(found, expected)


def test_a_compiled_part_of_a_larger_model() -> None:
    """Only a submodule is compiled, with its own optimizer; the rest trains in plain torch."""

    def train(ours: bool) -> list[dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        body, head = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), nn.Linear(4, 1)
        call, optimizer = compiled(body, ours)
        rest = torch.optim.SGD(head.parameters(), lr=0.1)
        for _ in range(3):
            head(call(torch.randn(6, 3))).square().mean().backward()
            for each in (optimizer, rest):
                each.step()
                each.zero_grad()
        found = [weights(body), weights(head)]
        if ours:
            hytrain_fx.close(body)
        return found

    for found, expected in zip(train(True), train(False), strict=True):
        assert_same(found, expected)
