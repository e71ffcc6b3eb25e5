"""`state_dict()` of weights that rest on the host, in inference mode."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx

from .loops import HYPER, assert_same

OPTIONS: dict[str, Any] = {"weights": "streamed", "workers": 1, "timeout_s": 60.0}


class Tied(nn.Module):
    """Three layers of one width, the first and the last of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(32, 32) for _ in range(3))
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return y.float().pow(2).mean()


def batch() -> torch.Tensor:
    return torch.arange(128.0).view(4, 32).sin().to(torch.bfloat16)


def train(model: Any, optimizer: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def trained() -> Iterator[tuple[Any, Any]]:
    """Ours after two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = Tied().to(torch.bfloat16)
    model, optimizer = hytrain_fx.compile(made, torch.optim.AdamW(made.parameters(), **HYPER), **OPTIONS)
    train(model, optimizer, 2)
    yield model, optimizer
    hytrain_fx.close(model)


def test_weights_are_saved_in_inference_mode(trained: tuple[Any, Any]) -> None:
    """`state_dict()` has the same values there, and what is written into them is followed."""
    model, optimizer = trained
    with torch.inference_mode():
        saved = model.state_dict()
    expected = copy.deepcopy(saved)
    assert_same({name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}, expected)
    with torch.inference_mode():
        saved["second.weight"].mul_(2)
        assert torch.equal(model.state_dict()["second.weight"], expected["second.weight"] * 2)
    assert not saved["second.weight"].is_inference()
    saved["second.weight"].mul_(2)
    assert torch.equal(model.second.weight.detach(), expected["second.weight"] * 4)
    train(model, optimizer)


def test_weights_are_loaded_in_inference_mode(trained: tuple[Any, Any]) -> None:
    """`load_state_dict()` there, also of values made there: the same steps follow."""
    model, optimizer = trained
    begin = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2)
    expected = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        model.load_state_dict({name: value + 0 for name, value in begin[0].items()})
        assert_same(model.state_dict(), begin[0])
    optimizer.load_state_dict(begin[1])
    train(model, optimizer, 2)
    assert_same(model.state_dict(), expected)
