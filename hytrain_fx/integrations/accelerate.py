"""Accelerate: `prepare` with the optimizer offloaded. The loop stays as it is.

    from hytrain_fx.integrations.accelerate import prepare

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

Nothing of Accelerate's is imported: the accelerator is handed over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError


def prepare(accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, *others: Any, **options: Any) -> tuple[Any, ...]:
    """Compile `model` and `optimizer`, and give all objects as `accelerator.prepare` has them.

    `others` are loaders and schedulers; a scheduler may have been made on the given optimizer.
    `options` are those of `hytrain_fx.compile`.

    A checkpoint is loaded after it. Raises UnsupportedError where Accelerate would wrap the model,
    and what `hytrain_fx.compile` raises.
    """
    require_one_device(accelerator)
    if accelerator.device_placement:
        model.to(accelerator.device)  # compile() numbers what is on the device
    model, offloaded = hytrain_fx.compile(model, optimizer, **options)
    prepared: tuple[Any, ...] = accelerator.prepare(model, offloaded, *others)
    return prepared


def require_one_device(accelerator: Any) -> None:
    """Raise UnsupportedError where `accelerator.prepare` would wrap the model (DDP, FSDP...)."""
    found = accelerator.distributed_type.value
    if found != "NO":
        raise UnsupportedError(
            f"Accelerate is set up for {found}; expected one process on one device. Start the script without `accelerate launch`, "
            "torchrun or a plugin for several devices"
        )
