"""Which optimizers have a kernel, which states it keeps, and what a step of it takes.

One row of `KERNEL_UPDATES` for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch

from hytrain_fx.ir.states import ADAMW, LION, StateTable
from hytrain_fx.runtime.arithmetic import AdamScalars
from hytrain_fx.runtime.lion import Lion, LionScalars
from hytrain_fx.runtime.scalars import UpdateScalars

ScalarsOf = Callable[[Mapping[str, object], float, bool], UpdateScalars]
"""The scalars of a step.

From a group's options, the number of the step (1 for the first), and whether in the form of torch's
CUDA kernels.
"""


@dataclass(frozen=True, slots=True)
class KernelUpdate:
    """The states of one optimizer, and the scalars of a step.

    The latter raises UnsupportedError for options that no step can take.
    """

    table: StateTable
    scalars: ScalarsOf


def _adam(group: Mapping[str, object], step: float, torch_cuda: bool, *, decoupled: bool) -> AdamScalars:
    return AdamScalars.of(group, step, decoupled=decoupled or bool(group.get("decoupled_weight_decay")), torch_cuda=torch_cuda)


KERNEL_UPDATES: Final[Mapping[type[torch.optim.Optimizer], KernelUpdate]] = MappingProxyType({
    torch.optim.AdamW: KernelUpdate(ADAMW, partial(_adam, decoupled=True)),
    torch.optim.Adam: KernelUpdate(ADAMW, partial(_adam, decoupled=False)),
    Lion: KernelUpdate(LION, lambda group, step, torch_cuda: LionScalars.of(group, step)),
})
"""By the exact classes. A class derived from one of them may have another step."""


def kernel_update(optimizer: torch.optim.Optimizer) -> KernelUpdate | None:
    """The kernel's update; None for an optimizer whose own step is to run."""
    return KERNEL_UPDATES.get(type(optimizer))
