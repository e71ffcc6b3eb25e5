"""The model that a row names: a Llama shape (`llama`), or a family of the zoo (`families`).

Every model is called with a batch by name, and returns its loss or an output that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks import families, llama
from benchmarks.case import CannotRun

Batch = dict[str, torch.Tensor]


def build(size: str, length: int, device: torch.device, dtype: torch.dtype, checkpointing: bool = False) -> nn.Module:
    """The model of a size, seed 0, in training mode. Raises CannotRun for another name."""
    if not families.is_family(size):
        return llama.build(size, length, device, dtype, checkpointing)
    model = families.build(size, device, dtype)
    if checkpointing:
        if not hasattr(model, "gradient_checkpointing_enable"):
            raise CannotRun(f"family {size!r} cannot recompute activations; leave --checkpointing out")
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


def batches(size: str, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
    """Random batches, the same ones for every row."""
    if families.is_family(size):
        return families.batches(size, batch, length, device, dtype)
    return llama.batches(size, batch, length, device)


def blocks(size: str, model: nn.Module) -> list[nn.Module]:
    """The modules that a compile block by block takes."""
    return families.blocks(size, model) if families.is_family(size) else list(model.model.layers)  # type: ignore[union-attr,arg-type]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer is for."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_of(model: Callable[..., Any], batch: Batch) -> torch.Tensor:
    """The loss of one batch."""
    found = model(**batch)
    loss: torch.Tensor = found if isinstance(found, torch.Tensor) else found.loss
    return loss
