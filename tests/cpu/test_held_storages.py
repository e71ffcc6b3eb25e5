"""What counts as holding a weight: 16-bit copies, and storages that weights share or leave.

Writes that come before the first step count too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.weights.held import HeldWeights

from .loops import HYPER, HandAdam, assert_same, plain_loop, weights
from .models import Mlp, mlp

Held = Callable[[], list[torch.Tensor]]


class FourInOne(nn.Module):
    """All weights in one storage."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 48 + 8 + 8 + 1)
        self.a, self.b = nn.Parameter(flat[:48].view(8, 6)), nn.Parameter(flat[48:56].view(1, 8))
        self.c, self.d = nn.Parameter(flat[56:64]), nn.Parameter(flat[64:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(F.linear(x, self.a, self.c)), self.b, self.d).square().mean()


def _data(model: Any) -> Held:
    kept = [p.data for p in model.parameters()]
    return lambda: kept


def _numpy(model: Any) -> Held:
    kept = [p.detach().numpy() for p in model.parameters()]
    return lambda: [torch.from_numpy(array) for array in kept]


def _reading_loop(model: Any, optimizer: Any, held: Held) -> list[Any]:
    found: list[Any] = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 12).reshape(2, 6))
        loss.backward()
        optimizer.step()
        found += [float(loss.detach()), [tensor.double().sum().item() for tensor in held()]]
        optimizer.zero_grad()
    return found


def _agree(make: Callable[[], Any], hold: Callable[[Any], Held], loop: Callable[[Any, Any, Held], list[Any]], *, early: bool) -> None:
    """The loop with slow updates finds what it finds on a plain model.

    `early`: the aliases are from before `compile`.
    """
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = make()
        held = hold(model) if early else list
        optimizer: Any = HandAdam(model.parameters(), **HYPER)
        if ours:
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
            for stage in (Stage.CPU_UPDATE, Stage.H2D):
                session_of(model).engine.set_delay(stage, 3000)
        else:
            model.compile()
        results.append((loop(model, optimizer, held if early else hold(model)), weights(model)))
        if ours:
            assert session_of(model).held.rows
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.filterwarnings("ignore:the memory of")
@pytest.mark.parametrize("early", [True, False], ids=["before compile", "after compile"])
def test_an_alias_of_a_weight_with_a_16_bit_copy_shows_the_new_one(early: bool) -> None:
    """Under autocast an alias counts although the engine frees the fp32 weight."""

    def loop(model: Any, optimizer: Any, held: Held) -> list[Any]:
        found: list[Any] = []
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.linspace(-1, 1, 12).reshape(2, 6))
            loss.backward()
            optimizer.step()
            found += [float(loss.detach()), [tensor.double().sum().item() for tensor in held()]]
            optimizer.zero_grad()
        return found

    _agree(Mlp, _data, loop, early=early)


@pytest.mark.filterwarnings("ignore:the memory of")
@pytest.mark.parametrize("hold", [_data, _numpy], ids=["data", "NumPy"])
def test_a_write_before_the_first_step_counts(hold: Callable[[Any], Held]) -> None:
    """A write through an alias counts, though no step has looked for holders yet.

    It comes between backward and step; the alias is from before `compile`.
    """

    def loop(model: Any, optimizer: Any, held: Held) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.linspace(-1, 1, 12).reshape(2, 6))
            loss.backward()
            for tensor in held():
                tensor.mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    _agree(Mlp, hold, loop, early=True)


@pytest.mark.filterwarnings("ignore:the memory of")
def test_a_kept_storage_counts() -> None:
    """`untyped_storage()` is one Python object however often it is asked for.

    Who keeps it holds the weight.
    """

    def hold(model: Any) -> Held:
        kept = [(p.detach().untyped_storage(), p.dtype, p.numel()) for p in model.parameters()]
        return lambda: [torch.empty(0, dtype=dtype).set_(storage, 0, (count,)) for storage, dtype, count in kept]  # type: ignore[call-overload]

    _agree(Mlp, hold, _reading_loop, early=True)


@pytest.mark.filterwarnings("ignore:the memory of")
def test_an_alias_of_a_storage_that_one_weight_has_left_is_seen() -> None:
    """After one weight has left a shared storage, holders of the other weights still count."""

    def loop(model: Any, optimizer: Any, held: Held) -> list[Any]:
        found = _reading_loop(model, optimizer, held)
        model.c.data = model.c.data.clone()
        found += _reading_loop(model, optimizer, held)
        kept = model.a.detach()
        return found + _reading_loop(model, optimizer, lambda: [kept])

    _agree(FourInOne, lambda model: list, loop, early=False)


def test_weights_put_into_one_vector_are_held_by_nobody() -> None:
    """After `vector_to_parameters` all weights share a storage, and nobody holds it.

    Once the vector is dropped no step waits.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
    plain_loop(2)(model, optimizer, batches)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).detach(), model.parameters())
    plain_loop(2)(model, optimizer, batches)
    assert session_of(model).held.rows == ()
    hytrain_fx.close(model)


@pytest.mark.filterwarnings("ignore:the memory of")
def test_weights_that_other_processes_map_are_held() -> None:
    """After `share_memory()`, before or after `compile`, every step waits.

    Nobody can count who reads in other processes.
    """
    for early in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any
        model, batches = mlp()
        if early:
            model.share_memory()
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0)
        if not early:
            plain_loop(1)(model, optimizer, batches)
            assert session_of(model).held.rows == ()
            model.share_memory()
        plain_loop(2)(model, optimizer, batches)
        assert session_of(model).held.rows == tuple(range(len(list(model.parameters()))))
        hytrain_fx.close(model)


def test_garbage_that_held_a_weight_is_not_taken_for_ours() -> None:
    """Garbage that held a weight is not taken for ours.

    Collected while the library takes its own aliases, it would leave a weight that seems held for
    good.
    """
    weight = nn.Parameter(torch.zeros(3))
    held = HeldWeights([weight], ["weight"])
    gc.collect()
    garbage: list[Any] = [weight.detach()]
    garbage.append(garbage)
    del garbage
    thresholds = gc.get_threshold()
    try:
        with held.ours():
            gc.set_threshold(100)
            more = [[number] for number in range(1000)]  # the collector would run many times
            del more
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert held.find(lambda rows: None) == ()
    assert gc.isenabled()
