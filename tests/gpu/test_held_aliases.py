"""Whoever holds a weight's memory on the GPU finds the new values after `step()`.

They come in the order of the compute stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from ..cpu.test_placements import plan_of
from .feed_forward import ADAMW, batches, build, deterministic, loss_of

__all__ = ["deterministic"]  # the fixture, for this file too

PLACES = {"host": [Placement.CPU], "device": [Placement.GPU], "streamed": [Placement.STREAM], "all three": list(Placement)}
KINDS: dict[str, Callable[[Any], list[torch.Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "data": lambda model: [p.data for p in model.parameters()],
    "DLPack": lambda model: [torch.utils.dlpack.from_dlpack(p.detach()) for p in model.parameters()],
}


@pytest.mark.filterwarnings("ignore:the memory of")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_alias_is_never_stale(dtype: torch.dtype, places: list[Placement], kind: str) -> None:
    """In 20 steps with slow updates every alias equals the weight right after step().

    It has changed, too.
    """
    model: Any = build(dtype)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **ADAMW), k=0, warmup_steps=1000)
    session_of(model).place(plan_of(session_of(model), places))
    data, held = batches(), KINDS[kind](model)
    for step in range(20):
        if step == 3:
            session_of(model).engine.set_delay(Stage.CPU_UPDATE, 3000)
        loss_of(model, next(data)).backward()
        before = [tensor.clone() for tensor in held]
        optimizer.step()
        seen = [tensor.clone() for tensor in held]  # in the order of the compute stream, without a wait of the host
        optimizer.zero_grad()
        assert any(not torch.equal(a, b) for a, b in zip(before, seen, strict=True))
        for tensor, parameter in zip(seen, model.parameters(), strict=True):
            assert torch.equal(tensor, parameter.detach())
    assert len(session_of(model).held.rows) == len(held)
    hytrain_fx.close(model)
