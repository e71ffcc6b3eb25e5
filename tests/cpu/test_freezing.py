"""Parameters frozen and unfrozen between steps: while frozen they sit out, as in the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError
from hytrain_fx.session import call_gate
from hytrain_fx.session.call_gate import find_session

from .loops import HYPER, Twins, plain_loop
from .models import Batches, mlp


def notice_frozen(model: Any) -> None:
    """Have the plain loop compile again: with torch 2.11 it goes on without what was unfrozen."""
    if find_session(model) is None and torch.__version__ < "2.13":
        torch._dynamo.reset()


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 2}, {"k": 1, "stream": 1.0}, {"k": 0, "engine": "torch"}], ids=str)
def test_what_is_frozen_after_compile_is_unfrozen_later(options: dict[str, Any]) -> None:
    """All but the head may be frozen at once, unfrozen after some steps, and frozen again.

    The bits are the plain loop's.
    """
    made = Twins(mlp, timeout_s=20.0, **options)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(7):
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith("last") or 2 <= step < 5)
            notice_frozen(model)
            loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        model.requires_grad_(True)
        return losses

    made.agree(loop)
    made.close()


@pytest.mark.sample(4)
@pytest.mark.parametrize("options", [{"k": 0}, {"gpu_states": 1.0}, {"k": 1, "stream": 1.0}, {"k": 0, "engine": "torch"}], ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_is_frozen_between_a_forward_and_its_backward_gets_no_gradient(options: dict[str, Any], steps_before: int) -> None:
    """Autograd adds nothing to a leaf that is frozen between forward and backward.

    Its neighbours in the layer are trained, also where the graphs have never run before.
    """
    made = Twins(mlp, timeout_s=20.0, **options)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(steps_before)(model, optimizer, batches)
        model(*batches[0]).backward()
        loss = model(*batches[1])
        frozen = model.body[0].weight
        frozen.requires_grad_(False)
        loss.backward()
        losses += [float(p.grad.double().sum()) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        loss = model(*batches[2])
        model.first.requires_grad_(False)
        loss.backward()
        losses += [float(p.grad is None) for p in (*model.first.parameters(), frozen)]
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
        return losses + plain_loop(2)(model, optimizer, batches)

    made.agree(loop)
    made.close()


FEW_LAYOUTS = 3


class Deep(nn.Module):
    """More layers than `FEW_LAYOUTS`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(FEW_LAYOUTS + 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def deep() -> tuple[nn.Module, Batches]:
    return Deep(), [(torch.randn(3, 6),) for _ in range(3)]


@pytest.mark.filterwarnings("error:the model's parameters have changed places")
def test_layers_may_be_unfrozen_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers may be unfrozen in more stages than layouts are compiled at a time.

    Graphs of early stages are dropped, and each stage is compiled.
    """
    monkeypatch.setattr(call_gate, "MOST_LAYOUTS", FEW_LAYOUTS)
    monkeypatch.setattr(call_gate, "OUT_OF_USE_CALLS", 4)
    made = Twins(deep, k=0, timeout_s=20.0)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for stage in range(len(model.layers)):
            for at, layer in enumerate(model.layers):
                layer.requires_grad_(at >= len(model.layers) - 1 - stage)
            notice_frozen(model)
            losses += plain_loop(2)(model, optimizer, batches)
        return losses

    with torch._dynamo.config.patch(recompile_limit=64):  # the plain loop would go on in eager code
        made.agree(loop)
    made.close()


def test_a_frozen_weight_is_read_before_anything_else_has_read_it() -> None:
    """Unfrozen later, it gets the gradients of eager code that the plain loop has."""
    made = Twins(mlp, k=0, timeout_s=20.0)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        model.last.requires_grad_(False)
        losses = plain_loop(2)(model, optimizer, batches)
        losses.append(float(model.last.weight.detach().sum()))
        model.last.requires_grad_(True)
        notice_frozen(model)
        for _ in range(2):
            loss = model(*batches[0]) + model.last.weight.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    made.agree(loop)
    made.close()


def test_a_model_frozen_at_compile_is_refused_with_the_way_out() -> None:
    """A model frozen at compile() is refused; the error says to freeze it afterwards.

    A GAN's discriminator in the generator's turn is such a model.
    """
    model, _ = mlp()
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"freeze it after hytrain_fx\.compile"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER))
