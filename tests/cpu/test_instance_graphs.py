"""Blocks of one class around graph breaks: Dynamo captures one graph for all of them.

Ours have one graph for each block's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.capture.captured_graph import GraphKind
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from .loops import HandAdam, assert_same, weights
from .test_placements import plan_of

WIDTH, STEPS = 8, 8


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Each of `order` is a block that is called; a break comes after the first one."""

    def __init__(self, blocks: int, order: tuple[int, ...] = (), checkpoints: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(breaks=number == 1) for number in range(blocks)])
        self.order, self.checkpoints = order or tuple(range(blocks)), checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints and number == 2 else block(x)
        return x.square().mean()


def _freeze(model: Model) -> None:
    model.blocks[2].requires_grad_(False)


def _tie(model: Model) -> None:
    model.blocks[-1].up.weight = model.blocks[2].up.weight  # type: ignore[union-attr]


EAGER = "one checkpointed"  # Dynamo leaves a checkpoint after a break to eager code
CASES: dict[str, tuple[Callable[[], Model], Callable[[Model], None]]] = {
    "2 blocks": (lambda: Model(2), lambda _: None),
    "5 blocks": (lambda: Model(5), lambda _: None),
    "12 blocks, more than Dynamo recompiles": (lambda: Model(12), lambda _: None),
    "one of them frozen": (lambda: Model(4), _freeze),
    "two with one weight": (lambda: Model(4), _tie),
    "one called twice": (lambda: Model(4, order=(0, 1, 2, 3, 2)), lambda _: None),
    "in another order": (lambda: Model(4, order=(3, 1, 0, 2)), lambda _: None),
    EAGER: (lambda: Model(4, checkpoints=True), lambda _: None),
}


def _made(case: str) -> Model:
    torch.manual_seed(0)
    make, change = CASES[case]
    model = make()
    change(model)
    return model


def _train(model: Any, optimizer: Any, *, evaluates: bool, sizes: tuple[int, ...]) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(sizes[step % len(sizes)], WIDTH))
        loss.backward()
        if evaluates:
            with torch.no_grad():
                losses.append(float(model(torch.ones(2, WIDTH))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _trained(model: Model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


LOOPS = {"plain": (False, (4,)), "evaluated": (True, (4,)), "shapes change": (False, (4, 6, 4, 3, 5))}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("evaluates", "sizes"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("case", CASES)
def test_blocks_of_one_class_train_as_plain(case: str, evaluates: bool, sizes: tuple[int, ...]) -> None:
    """Same bits with all states on the host and mixed, updates delayed.

    Every block's gradients are taken by nodes of its own graphs.
    """
    torch._dynamo.reset()
    plain = _made(case)
    expected = _train(torch.compile(plain), HandAdam(_trained(plain), lr=1e-2), evaluates=evaluates, sizes=sizes)
    for places in ([Placement.CPU], list(Placement)):
        torch._dynamo.reset()
        model: Any = _made(case)
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(_trained(model), lr=1e-2), k=0, engine="native", warmup_steps=10**6)
        session = session_of(model)
        session.place(plan_of(session, places))
        session.engine.set_delay(Stage.CPU_UPDATE, 500.0)
        assert _train(model, optimizer, evaluates=evaluates, sizes=sizes) == expected
        taken = {row for graph in session.capture.graphs if graph.kind is GraphKind.BACKWARD for row in graph.grad_rows}
        eager = set(range(8, 12)) if case == EAGER else set()
        assert taken == set(range(len(session.table))) - eager
        hytrain_fx.close(model)
        assert_same(weights(model), weights(plain))
