"""Lightning with its optimizers offloaded: a callback, and the LightningModule stays as it is.

    from hytrain_fx.integrations.lightning import Offload

    trainer = lightning.Trainer(callbacks=[Offload()])

Lightning has moved the module to its device and called `configure_optimizers` when a fit starts,
and loads optimizer states from a checkpoint after that.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import hytrain_fx
from hytrain_fx.errors import UnsupportedError


class Offload(lightning.Callback):  # type: ignore[misc]
    """Offloads each optimizer of `configure_optimizers` for one fit.

    Options are those of `hytrain_fx.compile`.

    Afterwards the model is a plain one: Lightning moves it to the CPU. States of the optimizers can
    still be read and saved.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._compiled: list[nn.Module] = []

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Give the trainer offloaded optimizers instead of its own.

        Raises UnsupportedError where the trainer uses several devices, and what
        `hytrain_fx.compile` raises.
        """
        _require_one_device(trainer)
        offloaded = []
        for optimizer in trainer.optimizers:
            module, ours = hytrain_fx.compile(trained_module(pl_module, optimizer), optimizer, **self._options)
            self._compiled.append(module)
            offloaded.append(ours)
        trainer.optimizers = offloaded

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Close what was compiled: the strategy moves the module to the CPU next."""
        self._close()

    def on_exception(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException) -> None:
        """Close what was compiled: no `on_train_end` follows."""
        self._close()

    def _close(self) -> None:
        while self._compiled:
            hytrain_fx.close(self._compiled.pop())


def trained_module(whole: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The part of a LightningModule whose calls are compiled.

    It is the direct child that has every parameter of `optimizer`. Where no child has them all, it
    is the LightningModule itself, and `training_step` should call `self(...)`.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for child in whole.children():
        if wanted <= {id(parameter) for parameter in child.parameters()}:
            return child
    return whole


def _require_one_device(trainer: lightning.Trainer) -> None:
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise UnsupportedError(
            f"the Trainer's strategy is {type(trainer.strategy).__name__}; expected one process on one device. "
            "Give it devices=1 and no strategy"
        )
