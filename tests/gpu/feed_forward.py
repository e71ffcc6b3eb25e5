"""The network that whole loops on a GPU train, its plain loop, and a check of `step()`.

The check is that `step()` waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.plan import Placement

from ..cpu.test_placements import plan_of

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
STEPS = 8


class Block(nn.Module):
    """Norm and two linear layers, as in a transformer's feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + changed


class Net(nn.Module):
    """Embedding, blocks, head; with `breaks` a graph break before the head."""

    def __init__(self, width: int = 512, blocks: int = 4, breaks: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        if self.breaks:
            torch._dynamo.graph_break()
        logits: torch.Tensor = self.head(hidden)
        return logits


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same kernels in the same order, so that bits can be compared."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, 100, (4, 16), generator=generator).cuda()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def build(dtype: torch.dtype, breaks: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(breaks=breaks).to(dtype).cuda()


def backward(model: nn.Module, data: Iterator[torch.Tensor], micro_batches: int) -> torch.Tensor:
    """The gradients of one step; gives the last loss."""
    for _ in range(micro_batches):
        loss = loss_of(model, next(data)) / micro_batches
        loss.backward()
    return loss


def plain(
    dtype: torch.dtype, clip: float | None, breaks: bool = False, micro_batches: int = 1
) -> tuple[list[float], list[torch.Tensor]]:
    """The same compiled model with torch.optim.AdamW(foreach=True).

    16-bit weights have fp32 masters kept by hand.
    """
    model = build(dtype, breaks)
    model.compile()
    parameters = list(model.parameters())
    masters = parameters if dtype == torch.float32 else [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer, losses, data = torch.optim.AdamW(masters, foreach=True, **ADAMW), [], batches()
    for _ in range(STEPS):
        loss = backward(model, data, micro_batches)
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        if masters is not parameters:
            for master, p in zip(masters, parameters, strict=True):
                assert p.grad is not None
                master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not parameters:
            with torch.no_grad():
                for master, p in zip(masters, parameters, strict=True):
                    p.copy_(master)
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in parameters]


def assert_step_returns_early(k: int, places: Sequence[Placement] = ()) -> None:
    """`step()` has returned before the backward's last kernel has run.

    The plan has these places, where given, else it has `k`.
    """
    torch.manual_seed(0)
    net = Net(width=1536, blocks=8).to(torch.bfloat16).cuda()
    model, optimizer = hytrain_fx.compile(net, torch.optim.AdamW(net.parameters(), **ADAMW), k=k)
    session, data = session_of(model), batches()
    for step in range(5):  # compiled, and allocations made
        if step == 2 and places:
            session.place(plan_of(session, places))
        loss_of(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.drain()
    tokens = next(data)
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    loss_of(model, tokens).backward()
    end = torch.cuda.Event()
    end.record()
    optimizer.step()
    assert not end.query()
    optimizer.zero_grad()
    hytrain_fx.close(model)
