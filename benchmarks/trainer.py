"""What every mode has in common: precision, clipping, accumulation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from benchmarks.case import NEVER_REACHED, Case
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
