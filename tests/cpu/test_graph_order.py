"""Kernels are launched in the order of the graph: a layer's gradients leave when they are there."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from benchmarks import llama
from hytrain_fx.api import session_of
from hytrain_fx.ir.limits import UNITS_AHEAD
from hytrain_fx.session.nodes import SessionNodes

from .loops import assert_same

pytestmark = pytest.mark.fused_kernels

WIDTH, LAYERS, TOKENS = 128, 12, 8


@contextmanager
def recorded(*kinds: str) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """The calls of nodes of these kinds, in order: kind and rows."""
    ran: list[tuple[str, tuple[int, ...]]] = []

    def recording(kind: str, call: Callable[..., None]) -> Callable[..., None]:
        def record_and_call(self: SessionNodes, rows: Sequence[int], *others: Any) -> None:
            ran.append((kind, tuple(rows)))
            call(self, rows, *others)

        return record_and_call

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            patch.setattr(SessionNodes, kind, recording(kind, getattr(SessionNodes, kind)))
        yield ran


def train(marked: str = "fetch", **options: Any) -> tuple[list[int], int]:
    """Two steps of a model of few tokens.

    Rows in the order in which the last backward's gradients left, -1 for each node of the kind
    `marked`. And the bytes of the device's slots.
    """
    torch._dynamo.reset()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(torch.bfloat16)
    with recorded(marked, "offload_and_step") as ran:
        model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, **options)
        for _ in range(2):
            ran.clear()
            model(torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        slot_bytes = hytrain_fx.explain(model).memory.weight_slots_bytes
        hytrain_fx.close(model)
    return [row for kind, rows in ran for row in ([-1] if kind == marked else rows)], slot_bytes


def test_gradients_leave_layer_by_layer() -> None:
    """The last layer's first; a layer's weights are fetched when those behind it have left.

    Few tokens: a gradient of a weight is larger than all activations, so an order with less memory,
    as Inductor estimates it, makes all of them at the end.
    """
    seen, slot_bytes = train(weights="streamed")
    layers = [row // 2 for row in seen if row >= 0]
    assert layers == sorted(layers, reverse=True)
    assert set(layers) == set(range(LAYERS))
    fetched = [at for at, row in enumerate(seen) if row < 0]
    assert all(any(row >= 0 for row in seen[one:other]) for one, other in itertools.pairwise(fetched[1:]))
    assert slot_bytes == (UNITS_AHEAD + 1) * 2 * WIDTH * WIDTH


def test_a_layers_gradients_leave_before_the_next_weights_come() -> None:
    """As the graph has it, also where activations are recomputed.

    The layers of this Llama rotate by the same tables. So the compiler would make gradients of one
    layer and activations of the next in one kernel, behind the next layer's weights.
    """
    torch._dynamo.reset()
    on_cpu = torch.device("cpu")
    model = llama.build("tiny", 16, on_cpu, checkpointing=True)
    with recorded("fetch", "offload_and_step") as ran:
        model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0, weights="streamed")
        loss = model(**next(llama.batches("tiny", 1, 16, on_cpu))).loss
        ran.clear()
        loss.backward()
    require_layers_in_turn(ran, session_of(model).table.names, 2)
    hytrain_fx.close(model)


def require_layers_in_turn(ran: Sequence[tuple[str, tuple[int, ...]]], names: Sequence[str], layers: int) -> None:
    """Weights of the last of a Llama's layers come, its gradients leave, then the layer before."""
    found = [(kind, int(layer[1])) for kind, rows in ran if (layer := re.search(r"layers\.(\d+)\.", names[rows[0]]))]
    assert found == [(kind, layer) for layer in reversed(range(layers)) for kind in ("fetch", "offload_and_step")]


def test_the_users_option_goes_before_ours() -> None:
    """Who asks Inductor for its own order gets it: here all that reads weights comes last.

    Streamed weights do not come earlier for it: that would take slots for all layers.
    """
    ours, _ = train("release")
    asked = {"reorder_for_peak_memory": True}
    its, _ = train("release", options=asked)
    assert -1 in ours[: 2 * LAYERS]
    assert -1 not in its[: 2 * LAYERS]
    _, slot_bytes = train(weights="streamed", options=asked)
    assert slot_bytes == (UNITS_AHEAD + 1) * 2 * WIDTH * WIDTH


class Sums(nn.Module):
    """Two layers that read one tensor, and a residual connection around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.one(x) + self.other(x)
        loss: torch.Tensor = (x + self.last(x)).float().square().mean()
        return loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_sums_that_inductor_joins_stay_joined(dtype: torch.dtype) -> None:
    """Releases leave them so: gradients have the bits of plain torch.compile's."""

    def gradients(**options: Any) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Sums().to(dtype)
        if options:
            model, _ = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), **options)
        else:
            model.compile()
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)).backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        if options:
            hytrain_fx.close(model)
        return found

    plain = gradients()
    streamed: list[dict[str, Any]] = [{"k": 0, "weights": "streamed"}] if dtype == torch.bfloat16 else []
    for options in [{"k": 0}, {"k": 2}, *streamed]:
        assert_same(gradients(**options), plain)
