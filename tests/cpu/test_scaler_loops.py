"""GradScaler with accumulation, saved and loaded on the way, and switched off.

The plain uses are in test_user_hooks. AOTAutogradCache is off, as there: torch 2.11 would serve the
plain loop in one dtype of autocast the code that was compiled for the other.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from hytrain_fx.torch_private.compiling import autograd_cache_off

from .loops import compare
from .models import Batches, mlp


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_scaler_with_accumulation_and_its_checkpoint(k: int, every: int) -> None:
    """One unscale_ of the sum, a clip, a skipped step; the scaler is saved and loaded."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        found = []
        for step in range(5):
            for micro in range(every):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = model(*batches[(step + micro) % 3]).float() / every
                scaler.scale(loss * (float("inf") if step == 2 and micro == 0 else 1.0)).backward()
                found.append(float(loss.detach()))
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            saved = scaler.state_dict()
            scaler = torch.amp.GradScaler("cpu", growth_interval=2)
            scaler.load_state_dict(saved)
            found.append(scaler.get_scale())
        return found

    with autograd_cache_off():
        compare(mlp, loop, k=k)


@pytest.mark.parametrize("k", [0, 2])
def test_a_scaler_that_is_off(k: int) -> None:
    """GradScaler(enabled=False) around the loop changes nothing."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        losses = []
        for step in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(*batches[step]).float()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    with autograd_cache_off():
        compare(mlp, loop, k=k)
