"""The floor, everything on the GPU, and hytrain_fx."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from benchmarks.case import Case
from benchmarks.models import Batch
from benchmarks.trainer import backward_of
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.memory import HOST_SHARE


def floor(case: Case, model: nn.Module, device: torch.device) -> Trainer[Batch]:
    """Compiled forward and backward, no optimizer."""
    return loops.floor(model, backward_of(case, model, device))


def all_gpu(case: Case, model: nn.Module, device: torch.device) -> Trainer[Batch]:
    """Compiled, everything on the device, with fused AdamW."""
    return loops.on_device(model, backward_of(case, model, device), fused=True)


def reference(case: Case, model: nn.Module, device: torch.device) -> Trainer[Batch]:
    """As `all_gpu`, with AdamW(foreach=True), whose bits are those of hytrain_fx."""
    return loops.on_device(model, backward_of(case, model, device), foreach=True)


def ours(case: Case, model: nn.Module, device: torch.device, *, barrier: bool = False) -> Trainer[Batch]:
    """hytrain_fx with the case's options."""
    return loops.ours(model, backward_of(case, model, device), options_of(case), barrier=barrier)


def options_of(case: Case) -> dict[str, Any]:
    """Options of `compile`.

    Where host memory is capped states may take the share of it that `report` and `plan` leave them.
    """
    capped = {} if case.host_memory_gb is None else {"host_memory": int(HOST_SHARE * 1e9 * case.host_memory_gb)}
    return capped | dict(option_of(text) for text in case.options)


def option_of(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` as a name and a Python literal, or a string where it is none."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
