"""Models of every shape that users bring have the bits of the plain compiled model.

Its optimizer is made by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .loops import Make, compare, plain_loop
from .models import CASES, Batches, broken_gpt, gpt

pytestmark = pytest.mark.fused_kernels


class TwoInputs(nn.Module):
    """Two towers, keyword arguments, one module used twice and one not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared = nn.Linear(4, 5), nn.Linear(3, 5), nn.Linear(5, 5)
        self.unused = nn.Linear(2, 2)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, a: torch.Tensor, b: torch.Tensor, *, weight: float = 1.0) -> torch.Tensor:
        self.seen += 1
        joined = self.shared(torch.tanh(self.left(a))) * self.shared(torch.sigmoid(self.right(b)))
        return (weight * self.scale * joined).square().mean()  # type: ignore[no-any-return]


class Dropped(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(torch.relu(self.first(x)), 0.5, self.training)).square().mean()  # type: ignore[no-any-return]


class ChannelsLast(nn.Module):
    """Weights whose memory has another order than their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mixed = nn.Parameter(torch.randn(4, 4).t())
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.conv(x).mean((2, 3)) @ self.mixed).square().mean()  # type: ignore[no-any-return]


class Branching(nn.Module):
    """The way through the model depends on a value: two graphs, of which a step runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.small, self.large = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        out = self.large(h) if h.sum() > 6 else self.small(h)
        return out.square().mean()  # type: ignore[no-any-return]


def two_inputs() -> tuple[nn.Module, Batches]:
    return TwoInputs(), [(torch.randn(7, 4), torch.randn(7, 3)) for _ in range(3)]


def dropped() -> tuple[nn.Module, Batches]:
    return Dropped(), [(torch.randn(8, 6),) for _ in range(3)]


def channels_last() -> tuple[nn.Module, Batches]:
    return ChannelsLast(), [(torch.randn(2, 3, 6, 6),) for _ in range(3)]


def branching() -> tuple[nn.Module, Batches]:
    return Branching(), [(torch.randn(4, 6) * size,) for size in (0.2, 3.0, 0.2)]


def lengths() -> tuple[nn.Module, Batches]:
    model, _ = gpt()
    return model, [(torch.randint(0, 19, (2, length)),) for length in (6, 9, 4, 13)]


MODELS: dict[str, Make] = {
    **CASES,
    "graph break": broken_gpt,
    "two inputs": two_inputs,
    "dropout": dropped,
    "channels last": channels_last,
    "branching": branching,
    "changing lengths": lengths,
}


# The inserted nodes part the softmax's backward from the sum over its rows; both round, and 3e-8
# becomes more over the steps.
CLOSE = {"cnn": 1e-5}


@pytest.mark.sample(0)  # .ci/run names one
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_with_the_bits_of_the_plain_one(name: str) -> None:
    """Losses, weights and buffers after six steps, with two units on the device.

    The same random numbers are drawn.
    """
    compare(MODELS[name], plain_loop(6), k=2, rtol=CLOSE.get(name, 0.0))


@pytest.mark.sample(0)
def test_autocast_over_fp32_parameters() -> None:
    """Under bf16 autocast the gradients are fp32 and the weights those of the plain loop."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    compare(gpt, loop, k=1)


@pytest.mark.sample(0)
def test_train_and_eval_in_turn() -> None:
    """model.eval() between training steps, with and without gradients, changes no bits.

    Evaluation has other graphs, the same weights and the same running statistics.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for _ in range(3):
            losses += plain_loop(1)(model, optimizer, batches)
            model.eval()
            with torch.no_grad():
                losses.append(float(model(*batches[1])))
            with torch.inference_mode():
                losses.append(float(model(*batches[2])))
            model.train()
        return losses

    compare(CASES["cnn"], loop, k=1, rtol=CLOSE["cnn"])
