"""Stand-ins that are used again: only where nobody can tell, and nothing is kept alive for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hytrain_fx.errors import GradientConsumedError
from hytrain_fx.gradients.sources import StandIns, is_in_slot
from hytrain_fx.gradients.standin import GradStandIn

from .held_gradient import HeldGradient, gradient, standin_of
from .loops import Twins, plain_loop
from .models import mlp


def left(standins: StandIns, keep: Callable[[GradStandIn, nn.Parameter], object] = lambda standin, parameter: None) -> tuple[int, object]:
    """Make a stand-in `.grad`, then leave it; the user keeps what `keep` gives.

    Gives the address of the stand-in, and what was kept.
    """
    parameter = nn.Parameter(torch.zeros(3, 4))
    standin = standins.make(0, parameter, HeldGradient(gradient()))
    parameter.grad = standin
    kept = keep(standin, parameter)
    standins.leave(0, standin)
    if kept is not parameter:
        parameter.grad = None
    return id(standin), kept


def mark(standin: GradStandIn, parameter: nn.Parameter) -> object:
    standin.seen_by_me = True  # type: ignore[attr-defined]
    return None


KEPT: dict[str, Callable[[GradStandIn, nn.Parameter], object]] = {
    "the stand-in": lambda standin, parameter: standin,
    "a list with it": lambda standin, parameter: [standin],
    "a weak reference": lambda standin, parameter: weakref.ref(standin),
    "the parameter, .grad still set": lambda standin, parameter: parameter,
    "an attribute of their own on it": mark,
}


def test_a_stand_in_that_nobody_holds_is_used_again() -> None:
    """A stand-in that nobody holds is used again, with its new source's values and parameter."""
    standins = StandIns()
    address, _ = left(standins)
    parameter = nn.Parameter(torch.zeros(3, 4))
    again = standins.make(0, parameter, HeldGradient(gradient() + 1))
    assert id(again) == address
    parameter.grad = again
    assert torch.equal(again + 0, gradient() + 1)
    assert type(parameter.grad) is torch.Tensor


@pytest.mark.parametrize("kept", KEPT)
def test_what_the_user_keeps_is_not_used_again(kept: str) -> None:
    """Where the user keeps a reference or a mark, a new stand-in is made."""
    standins = StandIns()
    address, holder = left(standins, KEPT[kept])
    again = standins.make(0, nn.Parameter(torch.zeros(3, 4)), HeldGradient(gradient()))
    assert again is not holder
    assert id(again) != address or not isinstance(holder, (GradStandIn, list, nn.Parameter))
    assert not hasattr(again, "seen_by_me")
    assert not isinstance(holder, weakref.ref) or holder() is not again


class Slots:
    """What a source asks of the slots."""

    def __init__(self) -> None:
        self.generation, self.taken, self.gone = [0, 0], set[int](), set[int]()

    def name(self, row: int) -> str:
        return str(row)

    def shards_of(self, row: int) -> None:
        """All gradients are whole."""


KEPT_OF_SLOTS: dict[str, Callable[[GradStandIn, nn.Parameter], object]] = {
    **KEPT,
    "its state": lambda standin, parameter: standin.grad_state,
    "its source": lambda standin, parameter: standin.grad_state.source,
    "a detached twin": lambda standin, parameter: standin.detach(),
}


@pytest.mark.parametrize("kept", [None, *KEPT_OF_SLOTS])
def test_stand_ins_of_slots_are_given_again_together_or_not_at_all(kept: str | None) -> None:
    """Clean and of the newest gradient. Where the user keeps something of one, all are new."""
    standins, slots, parameters = StandIns(), Slots(), [nn.Parameter(torch.zeros(3, 4)) for _ in range(2)]

    def given() -> list[GradStandIn]:
        slots.generation = [count + 1 for count in slots.generation]
        return standins.in_slots((0, 1), parameters, slots, [None, None])  # type: ignore[arg-type]

    first = given()
    for row, standin in enumerate(first):
        parameters[row].grad = standin
        standin.grad_state.log(2.0)
        standins.leave(row, standin)
    holder = KEPT_OF_SLOTS[kept](first[1], parameters[1]) if kept else None
    addresses = [(id(standin), id(standin.grad_state)) for standin in first]
    del first, standin
    for parameter in parameters:
        if holder is not parameter:
            parameter.grad = None
    again = given()
    if kept is None:
        assert [(id(standin), id(standin.grad_state)) for standin in again] == addresses
    assert all(standin.factors == () and is_in_slot(standin, slots, row) for row, standin in enumerate(again))  # type: ignore[arg-type]
    of_second = (again[1], again[1].grad_state, again[1].grad_state.source)
    held = holder() if isinstance(holder, weakref.ref) else holder.grad_state if kept == "a detached twin" else holder  # type: ignore[attr-defined]
    assert held is None or not any(each is held for each in of_second)
    assert not hasattr(again[1], "seen_by_me")


def test_a_stand_in_whose_loan_has_ended_is_given_for_a_slot() -> None:
    """It has no state left; its row's states have moved from the device to the host since."""
    standins, slots, parameter = StandIns(), Slots(), nn.Parameter(torch.zeros(3, 4))
    standins.lend(0, standins.make(0, parameter, HeldGradient(gradient())))
    standins.end_loan(0)
    (given,) = standins.in_slots((0,), [parameter], slots, [None])  # type: ignore[arg-type]
    assert is_in_slot(given, slots, 0)  # type: ignore[arg-type]


def test_a_detached_twin_keeps_its_own_gradient() -> None:
    """The stand-in goes to another gradient; what was detached from it before does not."""
    standins = StandIns()
    _, twin = left(standins, lambda standin, parameter: standin.detach())
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = standins.make(0, parameter, HeldGradient(gradient() + 1))
    assert isinstance(twin, GradStandIn)
    assert torch.equal(twin + 0, gradient())


def test_a_loan_that_ends_keeps_no_gradient_alive() -> None:
    """The source of a lent stand-in dies with the loan, unless the user has the stand-in."""
    for user_has_it in (False, True):
        standins = StandIns()
        source = HeldGradient(gradient())
        alive = weakref.ref(source)
        standin: GradStandIn | None = standins.make(0, nn.Parameter(torch.zeros(3, 4)), source)
        assert standin is not None
        standins.lend(0, standin)
        if not user_has_it:
            standin = None
        del source
        standins.end_loan(0)
        assert (alive() is not None) == user_has_it
        assert standin is None or torch.equal(standin + 0, gradient())


@pytest.fixture(scope="module", params=[0, 4], ids=["states on the host", "states on the device"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    yield made
    made.close()


def test_training_uses_stand_ins_again(twins: Twins) -> None:
    """After a few steps no new ones are made, whoever drops the gradients."""

    def addresses(drop: Any) -> set[int]:
        plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
        twins.ours(*twins.batches[0]).backward()
        twins.optimizer.step()
        found = {id(standin_of(p)) for p in twins.ours.parameters()}
        drop()
        return found

    assert addresses(twins.optimizer.zero_grad) == addresses(twins.ours.zero_grad) == addresses(twins.optimizer.zero_grad)


def test_a_gradient_kept_over_a_step_never_shows_the_next_one(twins: Twins) -> None:
    """A kept `.grad`, or its detached twin, never shows the next gradient.

    On the device it has the old values. On the host it is gone after the next backward.
    """
    twins.ours(*twins.batches[0]).backward()
    twins.optimizer.step()
    kept = [p.grad for p in twins.ours.parameters()]
    kept += [p.grad.detach() for p in twins.ours.parameters() if p.grad is not None]
    on_device = twins.session.planning.plan.k > 0
    before = [g.clone() for g in kept if g is not None] if on_device else []
    twins.optimizer.zero_grad()
    plain_loop(2)(twins.ours, twins.optimizer, twins.batches[1:])
    twins.ours(*twins.batches[1]).backward()
    for i, grad in enumerate(kept):
        assert grad is not None
        if on_device:
            assert torch.equal(grad, before[i])
        else:
            with pytest.raises(GradientConsumedError):
                grad.sum()
    twins.optimizer.zero_grad()
