"""Lightning with its optimizers offloaded: a callback, and the LightningModule stays as it is.

    from hytrain_fx.integrations.lightning import Offload

    trainer = lightning.Trainer(callbacks=[Offload()])

Lightning has moved the module to its device and called `configure_optimizers` when a fit starts,
and loads optimizer states from a checkpoint after that.

With several processes (`devices=2`, `strategy="ddp"`) hytrain_fx averages their gradients, and the
module is not wrapped in DistributedDataParallel. Samplers, barriers and checkpoints are the
strategy's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
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

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Keep the strategy from wrapping the module, which it would do next.

        Raises UnsupportedError for a strategy that shards the module or averages its own way.
        """
        if stage != "fit":
            return
        require_plain(trainer.strategy)
        self._close_before_teardown(trainer.strategy)
        if isinstance(trainer.strategy, DDPStrategy):
            trainer.strategy.configure_ddp = _leave_unwrapped

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Give the trainer offloaded optimizers instead of its own.

        Raises UnsupportedError where the strategy has wrapped the module all the same, or two
        optimizers have one module, and what `hytrain_fx.compile` raises.
        """
        _require_unwrapped(trainer.strategy)
        parts = [trained_module(pl_module, optimizer) for optimizer in trainer.optimizers]
        _require_apart(pl_module, parts)
        offloaded = []
        for part, optimizer in zip(parts, trainer.optimizers, strict=True):
            module, ours = hytrain_fx.compile(part, optimizer, **self._options)
            self._compiled.append(module)
            offloaded.append(ours)
        trainer.optimizers = offloaded

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Close what was compiled: the strategy moves the module to the CPU next."""
        self._close()

    def on_exception(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException) -> None:
        """Close what was compiled: no `on_train_end` follows.

        Of several processes the others may stand elsewhere. So this one waits for none of them,
        and the trainer has no optimizers any more: Lightning would move their states next, which
        are asked of all.
        """
        if self._compiled and trainer.world_size > 1:
            for module in self._compiled:
                session_of(module).leave_ranks()
            trainer.optimizers = []
        self._close()

    def _close_before_teardown(self, strategy: Any) -> None:
        """Close before the strategy moves the module to the CPU.

        A fit that has nothing to train ends without `on_train_end`.
        """
        plain = type(strategy).teardown  # the class's: a second fit of this trainer wraps no wrapper

        def teardown() -> None:
            try:
                self._close()
            finally:
                plain(strategy)

        strategy.teardown = teardown

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


def _require_apart(whole: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError where two optimizers have the same module.

    One within another is fine: its optimizer's updates hide nothing where the outer one is called.
    """
    for (i, one), (j, other) in itertools.combinations(enumerate(parts), 2):
        if one is other:
            name = next((f"self.{name}" for name, child in whole.named_children() if child is one), "the whole LightningModule")
            raise UnsupportedError(
                f"optimizers {i} and {j} of configure_optimizers, counted from 0, are both for {name}; expected a module for each. Put "
                "each optimizer's parameters in a direct child module of its own, which training_step calls, or train all with one "
                "optimizer"
            )


def require_plain(strategy: Any) -> None:
    """Raise UnsupportedError for a strategy that shards the module or averages its own way.

    Expected are one process, or several whose gradients DistributedDataParallel would average.
    """
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise UnsupportedError(
            f"the Trainer's strategy is {type(strategy).__name__}; expected processes with one device each, which have the whole module. "
            'Give it strategy="ddp", or devices=1 and no strategy'
        )
    asked = [name for name in ("ddp_comm_hook", "ddp_comm_state") if getattr(strategy, f"_{name}", None) is not None]
    if asked:
        raise UnsupportedError(
            f"the Trainer's strategy has a {asked[0]}, which DistributedDataParallel would use; expected none: hytrain_fx averages the "
            'gradients. Give the Trainer strategy="ddp"'
        )


def _leave_unwrapped() -> None:
    """Of a DDPStrategy: hytrain_fx averages the gradients."""


def _require_unwrapped(strategy: Any) -> None:
    if strategy.model is not strategy.lightning_module:
        raise UnsupportedError(
            f"the Trainer's {type(strategy).__name__} has wrapped the LightningModule in {type(strategy.model).__name__}; expected the "
            'plain module when a fit starts. Give the Trainer strategy="ddp"'
        )
