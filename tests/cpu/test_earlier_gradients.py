"""Earlier micro-batches' gradients come back ahead of the nodes that add to them.

The tests say when, how many, what is used, and what is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from hytrain_fx.capture.parameters import build_table
from hytrain_fx.gradients.slots import SlotReader
from hytrain_fx.ir.plan import Placement
from hytrain_fx.ir.states import ADAMW_DEFAULT
from hytrain_fx.runtime.engine import CommitItem, RowSpec, Stage
from hytrain_fx.runtime.fallback.engine import TorchEngine
from hytrain_fx.runtime.states.store import StateStore

from .loops import Twins, assert_same, plain_loop, weights, whole_pieces
from .models import Batches, mlp

ANY = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def bf16() -> tuple[nn.Module, Batches]:
    model, batches = mlp()
    return model.to(torch.bfloat16), [tuple(x.to(torch.bfloat16) for x in batch) for batch in batches]


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Batches]], dict[str, Any]]] = {
    "states on the host": (bf16, {"k": 0}),
    "states on both": (mlp, {"k": 2}),
    "updates begin early": (mlp, {"k": 0, "speculate": True}),
    "torch engine": (mlp, {"k": 0, "engine": "torch"}),
}


@pytest.fixture(scope="module", params=CASES)
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    """Gradients land late: what is brought back is on its way for a while."""
    make, options = CASES[request.param]
    made = Twins(make, workers=None if "engine" in options else 2, timeout_s=20.0, **options)
    made.agree(plain_loop(1))
    made.session.engine.set_delay(Stage.D2H, 300)
    yield made
    made.session.engine.set_delay(Stage.D2H, 0)
    made.close()


class Mixed(nn.Module):
    """Parameters of several dtypes, sizes and orders of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(5, 7))
        self.narrow = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(6, 4).t().to(torch.bfloat16))
        self.last = nn.Parameter(torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last))


def test_gradients_of_any_form_share_one_block_of_memory() -> None:
    """Each gradient comes back in its parameter's shape, strides and dtype.

    One fetch of all gives the same as a fetch for each.
    """
    model = Mixed()
    table = build_table(model, torch.optim.AdamW(model.parameters()))
    engine = TorchEngine(table.device, 1 << 20, 20.0)
    try:
        for parameter in table.parameters:
            engine.add_row(RowSpec(parameter.numel(), 0, parameter.detach()))
        states = StateStore(table.parameters, [0] * len(table), [ADAMW_DEFAULT] * len(table), engine)
        states.allocate(whole_pieces([p.numel() for p in table.parameters], [Placement.CPU] * len(table)), None)
        grads = [torch.randn_like(p) for p in table.parameters]
        engine.set_delay(Stage.D2H, 2_000)
        engine.grad_offload(range(len(table)), grads)
        reader, rows = SlotReader(table, engine), (0, 1, 2, 3)
        number, coming = reader.begin(rows)
        assert len({gradient.untyped_storage().data_ptr() for gradient in coming}) == 1
        for found in (reader.finish(number, rows, coming), [reader.read(row) for row in rows]):
            for gradient, grad, parameter in zip(found, grads, table.parameters, strict=True):
                assert (gradient.dtype, gradient.stride()) == (parameter.dtype, parameter.stride())
                assert torch.equal(gradient, grad)
    finally:
        engine.close()


class Watch:
    """Calls to nodes and engine, in order, and the memory that gradients were brought to."""

    def __init__(self, twins: Twins, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.memory: list[weakref.ref[torch.Tensor]] = []
        self._rows: dict[int, tuple[int, ...]] = {}
        engine, nodes = twins.session.engine, twins.session.nodes
        self._node, self._fetch, self._fetched, self._send = nodes.offload_and_step, engine.fetch, engine.fetched, engine.grad_offload
        patch.setattr(nodes, "offload_and_step", self.node)
        patch.setattr(engine, "fetch", self.fetch)
        patch.setattr(engine, "fetched", self.fetched)
        patch.setattr(engine, "grad_offload", self.send)

    def node(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.calls.append(("node", tuple(rows)))
        self._node(rows, grads)

    def send(self, rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        self.calls.append(("send", tuple(rows)))
        self._send(rows, grads)

    def fetch(self, rows: Sequence[int], out: torch.Tensor) -> int:
        self.calls.append(("fetch", tuple(rows)))
        self.memory.append(weakref.ref(out))
        number = self._fetch(rows, out)
        self._rows[number] = tuple(rows)
        return number

    def fetched(self, number: int) -> None:
        self.calls.append(("fetched", self._rows[number]))
        self._fetched(number)

    def of(self, kind: str) -> list[tuple[int, ...]]:
        return [rows for name, rows in self.calls if name == kind]


@contextmanager
def watched(twins: Twins) -> Iterator[Watch]:
    with pytest.MonkeyPatch.context() as patch:
        yield Watch(twins, patch)


def backward(model: Any, batches: Batches, times: int) -> None:
    for at in range(times):
        model(*batches[at % len(batches)]).backward()


def step(model: Any, optimizer: Any, batches: Batches, times: int) -> None:
    backward(model, batches, times)
    optimizer.step()
    optimizer.zero_grad()


def started(twins: Twins) -> tuple[Any, Any]:
    """Both optimizers, one step after the start.

    Until then rows count as used by eager code, which has loaded their weights.
    """
    reference, optimizer = twins.restart()
    step(twins.plain, reference, twins.batches, 1)
    step(twins.ours, optimizer, twins.batches, 1)
    return reference, optimizer


@ANY
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_one_fetch_for_each_unit_and_one_unit_ahead(twins: Twins, lengths: list[int]) -> None:
    """Each unit's gradients are fetched in one call, one unit ahead, after a step's first backward.

    The call comes when the node before is done and the unit's own has not begun. Its own node waits
    for it. Two units' gradients are never on their way at once. A first backward fetches nothing.
    """
    _, optimizer = started(twins)
    placement = twins.session.states.placement
    for length in lengths:
        for at in range(length):
            with watched(twins) as watch:
                backward(twins.ours, twins.batches, 1)
            nodes = watch.of("node")
            hosted = [tuple(row for row in rows if placement[row] is Placement.CPU) for rows in nodes]
            expected: list[tuple[str, tuple[int, ...]]] = []
            ahead = [("fetch", rows) for rows in hosted if rows] if at else []
            expected += ahead[:1]
            for node, rows in zip(nodes, hosted, strict=True):
                expected.append(("node", node))
                if rows:
                    expected += [("fetched", rows)] if at else []
                    expected.append(("send", rows))
                    ahead = ahead[1:]
                    expected += ahead[:1]
            assert watch.calls == expected
            assert not any(memory() for memory in watch.memory)
        optimizer.step()
        optimizer.zero_grad()


EDITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "read": lambda p: p.grad.sum(),  # type: ignore[union-attr]
    "scaled": lambda p: p.grad.mul_(0.5),  # type: ignore[union-attr]
    "edited": lambda p: p.grad.add_(1.0),  # type: ignore[union-attr]
    "zeroed": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "dropped": lambda p: setattr(p, "grad", None),
    "replaced": lambda p: setattr(p, "grad", torch.ones_like(p)),
}


def edit(model: Any, edits: dict[int, str]) -> None:
    for row, how in edits.items():
        parameter = list(model.parameters())[row]
        if parameter.grad is not None:
            EDITS[how](parameter)


EDITED = st.dictionaries(st.integers(0, 6), st.sampled_from(sorted(EDITS)), max_size=4)


@ANY
@given(between=st.lists(EDITED, min_size=1, max_size=3))
def test_gradients_edited_between_micro_batches(twins: Twins, between: list[dict[int, str]]) -> None:
    """Whatever is done to `.grad` between two backwards, the sums have the plain loop's bits."""

    optimizers = started(twins)
    for model, optimizer in zip((twins.plain, twins.ours), optimizers, strict=True):
        for _ in range(2):
            backward(model, twins.batches, 1)
            for edits in between:
                edit(model, edits)
                backward(model, twins.batches, 1)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(weights(twins.ours), weights(twins.plain))


@ANY
@given(edits=EDITED)
def test_gradients_edited_while_they_are_on_their_way(twins: Twins, edits: dict[int, str]) -> None:
    """What was brought for a row is freed if its `.grad` has been replaced since.

    The new gradient is added to what `.grad` is now.
    """
    first = twins.session.nodes.graph_calls[max(twins.session.nodes.graph_calls)][0]
    later = {row: how for row, how in edits.items() if row not in first}
    reference, optimizer = started(twins)
    offload_and_step = twins.session.nodes.offload_and_step

    def offload_and_edit(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        offload_and_step(rows, grads)
        if tuple(rows) == first:
            edit(twins.ours, later)

    for _ in range(2):
        backward(twins.plain, twins.batches, 1)
        edit(twins.plain, later)
        step(twins.plain, reference, twins.batches, 1)
        backward(twins.ours, twins.batches, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(twins.session.nodes, "offload_and_step", offload_and_edit)
            backward(twins.ours, twins.batches, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights(twins.ours), weights(twins.plain))


def test_a_backward_that_fails_between_nodes_leaves_nothing_behind(twins: Twins) -> None:
    """When a backward fails, what was on its way has been waited for and freed.

    After zero_grad() training goes on exactly.
    """
    reference, optimizer = started(twins)
    backward(twins.ours, twins.batches, 1)
    with watched(twins) as watch, pytest.MonkeyPatch.context() as patch:

        def fail(rows: Sequence[int]) -> None:
            raise RuntimeError("no more today")

        patch.setattr(twins.session.engine, "arm_cpu", fail)
        with pytest.raises(RuntimeError, match="no more today"):
            backward(twins.ours, twins.batches, 1)
        assert len(watch.of("fetch")) == len(watch.of("fetched")) == 2 > len(watch.of("node"))
    assert not any(memory() for memory in watch.memory)
    twins.ours.zero_grad()
    optimizer.zero_grad()
    for _ in range(2):
        step(twins.plain, reference, twins.batches, 3)
        step(twins.ours, optimizer, twins.batches, 3)
    assert_same(weights(twins.ours), weights(twins.plain))


def test_units_without_gradients_beside_one_that_has(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have none are no sums, though another row of the graph has a gradient.

    Where the backward fails, they have none again.
    """
    reference, optimizer = started(twins)
    nodes = twins.session.nodes
    several, offload_and_step, calls = set(nodes.gradients.parts.several), nodes.offload_and_step, count(1)
    for model in (twins.plain, twins.ours):
        first = next(model.parameters())
        first.grad = torch.ones_like(first)

    def fail(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        offload_and_step(rows, grads)
        if next(calls) == 3:
            raise RuntimeError("no more today")

    with monkeypatch.context() as patch:
        patch.setattr(nodes, "offload_and_step", fail)
        with pytest.raises(RuntimeError, match="no more today"):
            backward(twins.ours, twins.batches, 1)
    first, *others = twins.ours.parameters()
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(other.grad is None for other in others)
    step(twins.plain, reference, twins.batches, 1)
    step(twins.ours, optimizer, twins.batches, 1)
    assert_same(weights(twins.ours), weights(twins.plain))
    assert nodes.gradients.parts.several == several


def test_nodes_in_another_order_than_the_graphs(twins: Twins) -> None:
    """A node that the scheduler has moved fetches for itself.

    Every gradient is waited for once, and every bit is right.
    """
    calls = twins.session.nodes.graph_calls
    orders = dict(calls)
    try:
        calls.update((graph, order[::-1]) for graph, order in orders.items())
        reference, optimizer = started(twins)
        step(twins.plain, reference, twins.batches, 3)
        backward(twins.ours, twins.batches, 2)
        with watched(twins) as watch:
            step(twins.ours, optimizer, twins.batches[2:], 1)
        assert_same(weights(twins.ours), weights(twins.plain))
        assert sorted(watch.of("fetch")) == sorted(watch.of("fetched")) == sorted(watch.of("send"))
    finally:
        calls.update(orders)


def test_one_addition_for_a_unit(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all rows of a unit have an unedited gradient, no row is handled alone."""
    _, optimizer = started(twins)
    backward(twins.ours, twins.batches, 1)
    monkeypatch.setattr(twins.session.nodes.gradients, "_take_each", None)
    step(twins.ours, optimizer, twins.batches, 2)


@pytest.mark.parametrize("how", EDITS)
def test_an_edit_between_two_backwards_is_forgotten_with_its_step(twins: Twins, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit makes no gradient of eager code in the next step.

    There no row waits for the end of the backward, and none is added up apart.
    """
    optimizers = started(twins)
    several = set(twins.session.nodes.gradients.parts.several)
    for model, optimizer in zip((twins.plain, twins.ours), optimizers, strict=True):
        backward(model, twins.batches, 1)
        edit(model, dict.fromkeys(range(len(twins.session.table)), how))
        step(model, optimizer, twins.batches, 1)
    committed: list[CommitItem] = []
    commit = twins.session.engine.commit

    def noting(items: Sequence[CommitItem]) -> None:
        committed.extend(item for item in items if item.row < len(twins.session.table))  # a probe has a row of its own
        commit(items)

    monkeypatch.setattr(twins.session.engine, "commit", noting)
    for model, optimizer in zip((twins.plain, twins.ours), optimizers, strict=True):
        step(model, optimizer, twins.batches, 2)
    assert len(committed) == len(twins.session.table)
    assert not any(item.at_end for item in committed)
    assert twins.session.nodes.gradients.parts.several == several
    assert_same(weights(twins.ours), weights(twins.plain))
