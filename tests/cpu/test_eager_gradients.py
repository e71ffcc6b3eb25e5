"""Gradients that eager code makes leave for the host as autograd makes them, not at `step()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.gradients.sources import is_in_slot
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.gradients.taking import SessionGradients
from hytrain_fx.planning.marks import Mark
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, assert_same, weights
from .test_eager_reads import Deep, Disabled, Recurrent, Uncaptured, batches_of

STEPS = 9
Loop = Callable[[Any, Any, int], None]


def backward(model: Any, batch: int = 0) -> None:
    x, y = batches_of()[batch]
    F.cross_entropy(model(x), y).backward()


def one(model: Any, optimizer: Any, step: int) -> None:
    backward(model)


def two(model: Any, optimizer: Any, step: int) -> None:
    backward(model)
    backward(model, 1)


def clipped(model: Any, optimizer: Any, step: int) -> None:
    backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def edited(model: Any, optimizer: Any, step: int) -> None:
    backward(model)
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2 if step % 2 else parameter.grad.add_(1e-3)


def dropped(model: Any, optimizer: Any, step: int) -> None:
    backward(model)
    optimizer.zero_grad()
    backward(model, 1)


def kept(model: Any, optimizer: Any, step: int) -> None:
    """The gradients stay for the next step's to be added to."""
    backward(model)
    if step % 3 == 0:
        optimizer.zero_grad()
        backward(model)


def several_in_one(model: Any, optimizer: Any, step: int) -> None:
    sum(F.cross_entropy(model(x), y) for x, y in batches_of()).backward()  # type: ignore[union-attr]


def with_second_order(model: Any, optimizer: Any, step: int) -> None:
    x, y = batches_of()[0]
    F.cross_entropy(model(x), y).backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.detach()


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def hooked(model: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
    backward(model)


LOOPS: dict[str, Loop] = {loop.__name__: loop for loop in (
    one, two, clipped, edited, dropped, kept, several_in_one, with_second_order, hooked)}


def train(model: Any, optimizer: Any, loop: Loop) -> None:
    for step in range(STEPS):
        loop(model, optimizer, step)
        optimizer.step()
        if loop is not kept:
            optimizer.zero_grad()


@contextmanager
def compiled(kind: type[Deep], **options: Any) -> Iterator[tuple[Any, Any]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = kind()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), **{"k": 0, "workers": 1} | options)
    for stage in (Stage.CPU_UPDATE, Stage.H2D, Stage.D2H):
        session_of(model).engine.set_delay(stage, 300.0)
    yield model, optimizer
    hytrain_fx.close(model)


@pytest.mark.sample(9)
@pytest.mark.parametrize("options", [{}, {"engine": "torch"}, {"k": 2}, {"speculate": True}], ids=["host", "torch engine", "k", "early"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [Uncaptured, Recurrent, Disabled])
def test_no_loop_changes_a_bit(kind: type[Deep], loop: str, options: dict[str, Any]) -> None:
    """Whatever is done with gradients that have left, weights have the plain loop's bits."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain: Any = kind()
    plain.compile()
    train(plain, HandAdam(plain.parameters(), **HYPER), LOOPS[loop])
    with compiled(kind, **options) as (model, optimizer):
        train(model, optimizer, LOOPS[loop])
        assert_same(weights(model), weights(plain))


def in_slots(model: Any) -> set[str]:
    """The parameters whose gradients are in their slots."""
    slots = session_of(model).nodes.gradients.slots
    found = enumerate(model.named_parameters())
    return {name for row, (name, p) in found if type(p.grad) is GradStandIn and is_in_slot(p.grad, slots, row)}


def test_they_have_left_when_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a model without a graph; `step()` sends none."""
    late: list[int] = []
    send = SessionGradients.offload_real

    def counted(gradients: SessionGradients, row: int, grad: torch.Tensor) -> None:
        late.append(row)
        send(gradients, row, grad)

    monkeypatch.setattr(SessionGradients, "offload_real", counted)
    with compiled(Uncaptured) as (model, optimizer):
        for _ in range(3):
            backward(model)
            assert in_slots(model) == {name for name, _ in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
    assert not late


class EagerFirst(Deep):
    """The first two layers belong to no graph, so their gradients come after every graph."""

    first = torch.compiler.disable(Deep.first)


@pytest.mark.parametrize("kind", [EagerFirst, Recurrent])
def test_they_are_measured_as_a_part_of_the_backward(kind: type[Deep]) -> None:
    """Each unit's backward has an end, also behind the last graph's."""
    with compiled(kind) as (model, optimizer):
        train(model, optimizer, one)
        session = session_of(model)
        marks = session.nodes.marks.finished()[-1]
        assert {unit for mark, unit, _ in marks if mark is Mark.GRADS} == set(session.nodes.unit_of)
        assert marks[-1][0] is Mark.BACKWARD_END


def test_of_a_parameter_that_a_graph_reads_too_they_stay() -> None:
    """The graph's part may come later in the same backward."""
    with compiled(Disabled) as (model, optimizer):
        train(model, optimizer, one)
        captured = session_of(model).nodes.captured_rows
        names = session_of(model).table.names
        assert {names[row] for row in captured} >= {"layers.3.weight"}
        backward(model)
        assert "layers.3.weight" not in in_slots(model)


def test_a_loop_that_adds_to_them_keeps_them_on_the_device() -> None:
    """Bringing them back would take the link twice. Once it stops adding, they leave again."""
    with compiled(Uncaptured) as (model, optimizer):
        train(model, optimizer, two)
        backward(model)
        assert in_slots(model) == set()
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        assert in_slots(model) == {name for name, _ in model.named_parameters()}
