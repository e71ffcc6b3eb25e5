"""What a forward writes to its own weights trains on: in its graphs, between them, by aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx

from .loops import HYPER, HandAdam, assert_same, weights

STEPS = 5
Write = Callable[[Any, "Writer"], object]
"""Given the weight and its module. A graph that reads `calls` would be made for each number."""


def _sliced(w: Any, of: Writer) -> None:
    w.data[0] = 1.0


def _added(w: Any, of: Writer) -> None:
    alias = w.data
    alias += 0.125


def _assigned(w: Any, of: Writer) -> None:
    w.data = w.data * 0.5


def _replaced(w: Any, of: Writer) -> None:
    w.data = torch.full((8, 16), 0.25 / (of.calls + 1), dtype=torch.bfloat16)


def _replaced_once(w: Any, of: Writer) -> None:
    if of.calls == 2:
        _replaced(w, of)


def _read_and_assigned(w: Any, of: Writer) -> None:
    """What the next forward reads is in memory that this one has given."""
    w.data = w.data * (0.5 if float(w.detach().float().norm()) > 1.0 else 1.5)


IN_GRAPHS: dict[str, Write] = {
    "mul_": lambda w, of: w.mul_(0.5),
    "data.mul_": lambda w, of: w.data.mul_(0.5),
    "data[0] =": _sliced,
    "data +=": _added,
    "a view's data": lambda w, of: w.view(-1)[:8].data.zero_(),
    "relu_ of data": lambda w, of: torch.relu_(w.data),
    "relu(inplace) of data": lambda w, of: nn.functional.relu(w.data, inplace=True),
    "out= data": lambda w, of: torch.mul(w.data, 0.5, out=w.data),
    "foreach of data": lambda w, of: torch._foreach_mul_([w.data], 0.5),
    "data =": _assigned,
}
IN_EAGER_CODE: dict[str, Write] = {**{name: IN_GRAPHS[name] for name in ("data.mul_", "data[0] =", "data =")}, "other data": _replaced,
                                   "other data once": _replaced_once, "read, then data =": _read_and_assigned}


class Writer(nn.Module):
    """Writes the weight of its second layer before it uses it."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.second.weight, self)
        loss: torch.Tensor = self.second(torch.tanh(self.first(x))).float().square().mean()
        return loss


class EagerWriter(Writer):
    """The same, in code that is not captured."""

    def __init__(self, write: Write) -> None:
        super().__init__(torch.compiler.disable(write))


def trained(kind: type[Writer], write: Write, options: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of training and of evaluations, and the last weights. `options`: None is plain."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = kind(write).to(torch.bfloat16)
    optimizer: Any
    if options is None:
        model.compile()
        optimizer = HandAdam(model.parameters(), **HYPER)
    else:
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **options)
    losses = []
    for step in range(STEPS):
        model.calls = step
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(torch.ones(2, 8, dtype=torch.bfloat16)).item())
    found = losses, weights(model)
    if options is not None:
        hytrain_fx.close(model)
        assert_same(weights(model), found[1])
    return found


OPTIONS: dict[str, dict[str, Any]] = {"host": {"k": 0}, "some on the device": {"k": 2}, "streamed": {"k": 0, "weights": "streamed"},
                                      "early": {"k": 0, "speculate": True}}


@pytest.mark.sample(14)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("kind", "name"), [*((Writer, name) for name in IN_GRAPHS), *((EagerWriter, name) for name in IN_EAGER_CODE)],
                         ids=[*IN_GRAPHS, *(f"eager {name}" for name in IN_EAGER_CODE)])
def test_what_a_forward_writes_trains_on(kind: type[Writer], name: str, options: str) -> None:
    """With the bits of the plain loop, evaluations that write too, and after `close()`."""
    write = (IN_GRAPHS if kind is Writer else IN_EAGER_CODE)[name]
    losses, after = trained(kind, write, None)
    our_losses, our_after = trained(kind, write, OPTIONS[options])
    assert our_losses == losses
    assert_same(our_after, after)
