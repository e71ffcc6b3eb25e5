"""Steps of a small DiT, and where its gradients leave in the generated code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch._inductor.utils import run_and_get_code

import hytrain_fx
from benchmarks.plain_models import Dit

from .generated_order import call_distances

BLOCKS = 4
BITS_SHOW = 2.0**20
"""A learning rate with which a weight shows the bits of its gradient."""


def dit_step(passes: Any, device: str = "cpu", width: int = 32) -> tuple[list[torch.Tensor], list[int]]:
    """Weights after a bf16 step, and lines of code from each offload to the next. None: plain."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Dit(width=width, layers=BLOCKS, heads=2, side=8, classes=10).bfloat16()
    latents, noise, times = (of.bfloat16().to(device) for of in (*torch.randn(2, 2, 4, 8, 8), torch.tensor([3.0, 700.0])))
    model = model.to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=BITS_SHOW)
    if passes is None:
        model.compile()
    else:
        model, optimizer = hytrain_fx.compile(model, optimizer, passes=passes)
    loss = model(latents=latents, noise=noise, times=times, classes=torch.tensor([1, 2], device=device))
    _, codes = run_and_get_code(loss.backward)
    optimizer.step()
    lines = [call.line for code in codes for call in call_distances(code) if call.op == "offload_and_step"]
    weights = [p.detach().clone() for p in model.parameters()]
    if passes is not None:
        hytrain_fx.close(model)
    return weights, [late - early for early, late in pairwise(lines)]
