"""Checkpoints that an earlier version wrote, with what further training gave then.

The files are tests/cpu/data/*.pt.

    python -m tests.cpu.old_checkpoints FOLDER      writes such files with the present code

A file has `model` and `optimizer`, saved after three steps, and `then_model` and `then_optimizer`,
after three more. Gradients are numbers that every machine has exactly, set by hand: so is all that
follows from them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hytrain_fx

from .models import Mlp

DATA = Path(__file__).parent / "data"
STEPS = 3


@dataclass(frozen=True)
class Kind:
    """One of them: the model's dtype, its optimizer, and whether it trains under autocast."""

    dtype: torch.dtype
    optimizer: Callable[[Any], torch.optim.Optimizer]
    autocast: bool = False


KINDS = {
    "adamw_bf16": Kind(torch.bfloat16, lambda of: torch.optim.AdamW(of, lr=1e-2, weight_decay=0.1)),
    "adamw_fp32_amsgrad": Kind(torch.float32, lambda of: torch.optim.AdamW(of, lr=1e-2, weight_decay=0.1, amsgrad=True)),
    "adam_fp16": Kind(torch.float16, lambda of: torch.optim.Adam(of, lr=1e-2, weight_decay=0.1)),
    "adamw_autocast": Kind(torch.float32, lambda of: torch.optim.AdamW(of, lr=1e-2, weight_decay=0.1), autocast=True),
    # Powers of two: rounded once or twice, a product is the same.
    "sgd_bf16": Kind(torch.bfloat16, lambda of: torch.optim.SGD(of, lr=2.0**-4, momentum=0.5)),
}


@contextmanager
def compiled(kind: Kind, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A new model and its optimizer.

    Under autocast it has made one step, which is when weights get their copies.
    """
    torch._dynamo.reset()
    torch.manual_seed(3)
    model: Any = Mlp().to(kind.dtype)
    _, optimizer = hytrain_fx.compile(model, kind.optimizer(model.parameters()), **options)
    if kind.autocast:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(5, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model, optimizer
    hytrain_fx.close(model)


def train(model: Any, optimizer: Any, first: int) -> None:
    """Steps `first` to `first + STEPS` with gradients of multiples of 1/32 up to 1/4."""
    for step in range(first, first + STEPS):
        for row, parameter in enumerate(model.parameters()):
            numbers = (torch.arange(parameter.numel()) * 37 + step * 11 + row * 5) % 17 - 8
            parameter.grad = (numbers / 32).to(parameter.dtype).view(parameter.shape)
        optimizer.step()
        optimizer.zero_grad()


def write(folder: Path) -> None:
    """All files."""
    for name, kind in KINDS.items():
        with compiled(kind, k=0) as (model, optimizer):
            train(model, optimizer, 0)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved["model"] = {key: value.clone() for key, value in saved["model"].items()}
            train(model, optimizer, STEPS)
            then = {"then_model": model.state_dict(), "then_optimizer": optimizer.state_dict()}
            torch.save(saved | then, folder / f"{name}.pt")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
