"""Failures that would silently train on with wrong weights, provoked in the whole system.

Bits are right with the cure and wrong without it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import DroppedNodeError, GraphInvariantError, HytrainError
from hytrain_fx.passes import ops
from hytrain_fx.torch_private import compiling

from .loops import HYPER, Twins, assert_same, plain_loop, weights
from .models import Batches, mlp

pytestmark = pytest.mark.inductor  # that it drops nodes is among the facts; what its kernels do: test_fused_failures.py


class Scale(nn.Module):
    """Its backward reads `weight` in a pointwise op: d_x = d_y * weight + mm.

    Inductor moves that op into the kernel after the gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) + x * self.weight)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Scale() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().sum()  # type: ignore[no-any-return]


# ---- early write-back ----


def spoil_at_release(twins: Twins, patch: pytest.MonkeyPatch, release_early: bool) -> None:
    """Each weight is overwritten at the first moment at which the engine may do so.

    step() then writes the new one, whatever is there. With `release_early` that moment is as soon
    as the gradient has left, whoever still reads the weight. The first step is left alone: there
    weights that restart() has loaded reach the masters.
    """
    nodes, parameters = twins.session.nodes, twins.session.table.parameters
    offload_and_step, release = nodes.offload_and_step, nodes.release
    stepped: set[int] = set()

    def spoil(rows: Sequence[int]) -> None:
        for row in stepped.intersection(rows):  # as the engine writes, past torch; 0.011 everywhere
            ctypes.memset(parameters[row].data_ptr(), 0x3C, parameters[row].nbytes)

    def offload_and_spoil(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        offload_and_step(rows, grads)
        if release_early:
            spoil(rows)

    def release_and_spoil(rows: Sequence[int]) -> None:
        release(rows)
        spoil(rows)
        stepped.update(rows)

    patch.setattr(nodes, "offload_and_step", offload_and_spoil)
    patch.setattr(nodes, "release", release_and_spoil)


def test_a_weight_written_ahead_of_its_last_reader_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight released with its gradient, not after its readers, is overwritten too early.

    The gradients below it are wrong. Compared with the same graphs: Inductor makes one addmm of the
    plain graph's d_x, whose last bits differ on some machines.
    """
    twins = Twins(lambda: (Scales(), [(torch.randn(5, 8),) for _ in range(3)]), k=0, timeout_s=20.0)

    def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
        _, optimizer = twins.restart(lr=0.3)
        return plain_loop(3)(twins.ours, optimizer, twins.batches), weights(twins.ours)

    plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    losses, expected = trained()
    with monkeypatch.context() as patch:
        spoil_at_release(twins, patch, release_early=False)
        found, same = trained()
        assert found == losses
        assert_same(same, expected)
    with monkeypatch.context() as patch:
        spoil_at_release(twins, patch, release_early=True)
        _, wrong = trained()
        assert any(not torch.equal(value, expected[name]) for name, value in wrong.items())
    twins.close()


# ---- nodes that do not run ----


@pytest.fixture
def small() -> Iterator[tuple[Any, Any, Batches]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0, timeout_s=1.0)
    yield model, optimizer, batches
    if hasattr(model._compiled_call_impl, "session"):
        with contextlib.suppress(HytrainError):  # some of these tests leave an update that can never end
            hytrain_fx.close(model)


@pytest.mark.parametrize(
    ("node", "expected", "message"),
    [
        ("grad_offload", DroppedNodeError, r"never offloaded \(first\.weight"),
        ("cpu_step", DroppedNodeError, "cpu_step"),
        ("reload", DroppedNodeError, "reload"),
        ("wait", DroppedNodeError, "forward graph 0 ran wait for 6 rows, expected 7"),
    ],
)
def test_a_node_that_does_not_run_for_one_row_is_an_error(
    small: tuple[Any, Any, Batches], node: str, expected: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of node is missed by something: without one, training does not go on."""
    model, optimizer, batches = small
    plain_loop(1)(model, optimizer, batches)
    nodes = session_of(model).nodes
    real = getattr(nodes, node)

    def without_row_0(rows: Sequence[int], *grads: Any) -> None:
        kept = [at for at, row in enumerate(rows) if row != 0]
        if kept:
            real([rows[at] for at in kept], *([values[at] for at in kept] for values in grads))

    def one_by_one(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        nodes.grad_offload(rows, grads)
        for kind in (nodes.cpu_step, nodes.gpu_step, nodes.reload):
            kind(rows)

    monkeypatch.setattr(nodes, "offload_and_step", one_by_one)
    monkeypatch.setattr(nodes, node, without_row_0)
    with pytest.raises(expected, match=message):
        plain_loop(2)(model, optimizer, batches)


def test_a_lost_release_is_made_up_for_by_step(small: tuple[Any, Any, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    """step() comes after all readers: a row that no node released is released there."""
    model, optimizer, batches = small
    monkeypatch.setattr(session_of(model).nodes, "release", lambda rows: None)
    losses = plain_loop(4)(model, optimizer, batches)
    assert len(set(losses)) == 4


def test_nodes_dropped_by_the_compiler_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators without the mark of a side effect vanish from every backward graph: an error.

    Otherwise weights would stand still.
    """
    from torch._inductor import config as inductor_config

    marked = torch.fx.node._side_effectful_functions
    removed = (ops.ALL_OPS - {ops.WAIT}) & marked
    compile_fx_inner = compiling.compile_fx_inner

    def unmarked(*args: Any, **kwargs: Any) -> Any:
        marked.difference_update(removed)
        try:
            return compile_fx_inner(*args, **kwargs)
        finally:
            marked.update(removed)

    assert removed
    torch._dynamo.reset()
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    monkeypatch.setattr(compiling, "compile_fx_inner", unmarked)
    try:
        # The cache on disk knows nothing of the mark: it would give a whole graph here, and this
        # one to others.
        with inductor_config.patch(fx_graph_cache=False), pytest.raises(DroppedNodeError, match="graph 1 ran grad_offload for 0 rows"):
            plain_loop(2)(model, optimizer, batches)
    finally:
        hytrain_fx.close(model)


def test_operators_without_the_mark_of_a_side_effect_are_refused() -> None:
    """If the mark is missing when the passes run, the error names the pass that inserts the node.

    Nothing is compiled.
    """
    marked = torch.fx.node._side_effectful_functions
    torch._dynamo.reset()
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters()), k=0)
    try:
        marked.discard(ops.GRAD_OFFLOAD)
        with pytest.raises(GraphInvariantError, match="after insert_grad_offload: nobody uses the result of node"):
            plain_loop(1)(model, optimizer, batches)
    finally:
        marked.add(ops.GRAD_OFFLOAD)
        hytrain_fx.close(model)
