"""For tests of checkpoints: a small model with the same batches every time.

Its optimizer is of either kind; `through_a_file` gives values back as a file would.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

import hytrain_fx

from .loops import HYPER
from .models import Batches, mlp


def start(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, Batches]:
    torch.manual_seed(seed)
    model, batches = mlp()
    torch.manual_seed(7)
    batches = [(torch.randn(5, 6),) for _ in range(3)]
    return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]


def ours(model: nn.Module, k: int = 0, **hyper: Any) -> Any:
    torch._dynamo.reset()
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **{**HYPER, **hyper}), k=k)[1]


def plain(model: Any, **hyper: Any) -> Any:
    torch._dynamo.reset()
    model.compile()
    return torch.optim.AdamW(model.parameters(), foreach=False, **{**HYPER, **hyper})


def through_a_file(*values: Any) -> Any:
    """As torch.save and torch.load(weights_only=True) give it back."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
