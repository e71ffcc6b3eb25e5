"""The first step of models whose layers share a value, and where gradients leave in its code."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch._inductor.utils import run_and_get_code

import hytrain_fx
from benchmarks.families import Draws, family_of

from .generated_order import call_distances

DEEPER: Mapping[str, Mapping[str, int]] = {"dit": {"layers": 4, "width": 128, "heads": 2}, "t5": {"num_layers": 4}}
"""What is changed in the config of the zoo's small model."""
BITS_SHOW = 2.0**20
"""A learning rate with which a weight shows the bits of its gradient."""


def first_step(name: str, device: str, ours: bool = True) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights after a bf16 step by name, and lines of code from each offload to the next."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    family, size = family_of(f"{name}.small")
    config = {**size.config, **DEEPER[name]}
    model: Any = family.make(config).bfloat16().to(device).train()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=BITS_SHOW)
    if ours:
        model, optimizer = hytrain_fx.compile(model, optimizer)
    else:
        model.compile()
    batch = family.draw(Draws(torch.Generator(device=device).manual_seed(1), torch.bfloat16, size.batch, size.length), config)
    torch.manual_seed(0)
    made = model(**batch)
    loss = made if torch.is_tensor(made) else made.loss
    _, codes = run_and_get_code(loss.backward)
    optimizer.step()
    lines = [call.line for code in codes for call in call_distances(code) if call.op == "offload_and_step"]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if ours:
        hytrain_fx.close(model)
    return weights, [late - early for early, late in pairwise(lines)]


def differing(weights: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """By name of each weight whose bits differ: in how many elements."""
    assert weights.keys() == others.keys()
    counts = {name: int((weight != others[name]).sum()) for name, weight in weights.items() if not torch.equal(weight, others[name])}
    return {name: f"{count} of {weights[name].numel()}" for name, count in counts.items()}
