"""A small compiled model after some steps of the ordinary loop.

It is for the tests of what explain, inspect and timeline say of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import hytrain_fx

from .models import Batches, mlp

Step = Callable[[], None]


@contextmanager
def compiled(make: Callable[[], tuple[nn.Module, Batches]] = mlp, **options: Any) -> Iterator[tuple[nn.Module, Step]]:
    """The model of `make`, compiled with `options`, and a function that trains it for one step."""
    torch.manual_seed(0)
    model, batches = make()
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)

    def step() -> None:
        model(*batches[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        yield model, step
    finally:
        hytrain_fx.close(model)
