"""Parameters frozen and unfrozen between steps: frozen after compile() they sit out, as in the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import UnsupportedError

from .loops import HYPER, Twins
from .models import Batches, mlp


@pytest.mark.parametrize("options", [{"k": 0}, {"k": 2}, {"k": 1, "stream": 1.0}, {"k": 0, "engine": "torch"}], ids=str)
def test_what_is_frozen_after_compile_is_unfrozen_later(options: dict[str, Any]) -> None:
    """All but the head frozen at once, unfrozen after some steps, frozen again: the bits of the plain loop."""
    made = Twins(mlp, timeout_s=20.0, **options)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(7):
            for name, p in model.named_parameters():
                p.requires_grad_(name.startswith("last") or 2 <= step < 5)
            loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        model.requires_grad_(True)
        return losses

    made.agree(loop)
    made.close()


def test_a_model_frozen_at_compile_is_refused_with_the_way_out() -> None:
    """A GAN's discriminator that is compiled in the generator's turn: freeze it after compile()."""
    model, _ = mlp()
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"freeze it after hytrain_fx\.compile"):
        hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER))
