"""What every mode has in common: precision, clipping, accumulation, packages that are needed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.case import NEVER_REACHED, CannotRun, Case
from benchmarks.models import Batch, loss_of

Step = Callable[[Batch], torch.Tensor]


def precision(case: Case, device: torch.device) -> AbstractContextManager[object]:
    """The context of the forward: autocast where the parameters are fp32."""
    return torch.autocast(device.type, torch.bfloat16) if case.autocast else nullcontext()


def backward_of(case: Case, model: nn.Module, device: torch.device) -> Step:
    """Forward, backward and clipping, as a plain loop has them; gradients stay in `.grad`.

    Every micro-batch is the same.
    """

    number = itertools.count(1)

    def backward(batch: Batch) -> torch.Tensor:
        for _ in range(case.micro_batches):
            with precision(case, device):
                loss = loss_of(model, batch)
            loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NEVER_REACHED if next(number) % case.scaled_every else case.clip)
        return loss.detach()

    return backward


def require(package: str, module: str, mode: str) -> Any:
    """A module of a package that only one mode needs. Raises CannotRun if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CannotRun(f"mode {mode} needs {package}, which cannot be imported here ({error}): pip install {package}") from error
