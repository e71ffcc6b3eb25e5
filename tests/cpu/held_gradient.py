"""Gradients held elsewhere, for tests.

A source counts what is asked of it. A parameter's gradient is real or a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hytrain_fx.errors import GradientConsumedError
from hytrain_fx.gradients.standin import GradStandIn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
KNOWN = ((2.0, True), (2.0, False), (float("inf"), True))
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gradient(dtype: torch.dtype = torch.float32, device: str = "cpu", shape: tuple[int, ...] = (3, 4)) -> Tensor:
    """The same random numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


class HeldGradient:
    """Implements GradSource. `known`: the (order, foreach) pairs whose norm is available."""

    shards = None

    def __init__(self, gradient: Tensor, known: Iterable[tuple[float, bool]] = ()) -> None:
        self.fetches = 0
        self.wanted: list[tuple[float, bool]] = []
        self.live = True
        self._gradient = gradient.detach().clone()
        self._known = frozenset(known)

    def fetch(self) -> Tensor:
        if not self.live:
            raise GradientConsumedError("the gradient was used by step()")
        self.fetches += 1
        return self._gradient.clone()

    home = fetch

    def norm(self, ord: float, foreach: bool, scale: float = 1.0) -> Tensor | None:
        if scale != 1.0 or (ord, foreach) not in self._known or not self._gradient.numel():
            return None
        gradient = self._gradient
        result: Tensor = torch._foreach_norm([gradient], ord)[0] if foreach else torch.linalg.vector_norm(gradient, ord)
        return result

    def note_norm_wanted(self, ord: float, foreach: bool, scale: float = 1.0) -> None:
        if scale == 1.0:
            self.wanted.append((ord, foreach))

    def is_live(self) -> bool:
        return self.live


def stood_in(gradient: Tensor, known: Iterable[tuple[float, bool]] = ()) -> tuple[nn.Parameter, HeldGradient]:
    """A parameter of the gradient's metadata whose `.grad` is a stand-in for it."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    source = HeldGradient(gradient, known)
    parameter.grad = GradStandIn(parameter, source)
    return parameter, source


def with_real(gradient: Tensor) -> nn.Parameter:
    """A parameter of the gradient's metadata with a copy of it as `.grad`."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def grad_of(parameter: Tensor) -> Tensor:
    """`parameter.grad`, which must be there."""
    assert parameter.grad is not None
    return parameter.grad


def standin_of(parameter: Tensor) -> GradStandIn:
    """`parameter.grad`, which must be a stand-in."""
    assert isinstance(parameter.grad, GradStandIn)
    return parameter.grad


def bits(value: Any) -> Any:
    """A value that is equal for equal bits; every NaN counts as one.

    Tensors give dtype, shape and integer view, containers are converted item by item.
    """
    if isinstance(value, Tensor):
        plain = value.detach().clone().cpu()
        if plain.is_floating_point():
            plain = torch.where(plain.isnan(), torch.full_like(plain, float("nan")), plain)
            plain = plain.contiguous().reshape(-1).view(INTEGERS[plain.element_size()])
        return str(value.dtype), tuple(value.shape), plain.reshape(-1).tolist()
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return value


def outcome(call: Callable[[], Any]) -> Any:
    """The bits a call returns, or the type of what it raises."""
    try:
        return bits(call())
    except (RuntimeError, IndexError, NotImplementedError, TypeError) as error:
        return type(error)
