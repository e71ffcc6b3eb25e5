"""The user's own optimizer in a compiled model: bits, checkpoints, options, refusals.

Training has the plain loop's bits with rows on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.errors import EngineError, UnsupportedError
from hytrain_fx.ir.plan import Placement

from .loops import TorchAdam, assert_same, plain_loop, weights
from .models import Batches
from .optimizers import EVERY, TRACED, GlobalNorm, OwnNorm, make
from .saved import start, through_a_file
from .test_rules import assert_same_entry

CHECKED = ["SGD nesterov", "RMSprop", "Adafactor"]


def trained(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters that the optimizer is for: Muon takes only matrices."""
    for p in model.parameters():
        p.requires_grad_(name != "Muon" or p.dim() == 2)
    return [p for p in model.parameters() if p.requires_grad]


def clipped(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Clip, accumulate over two batches, and use a scheduler.

    One step has no gradient of one parameter.
    """
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses = []
    for step in range(7):
        for i in range(2):
            loss = model(*batches[(step + i) % len(batches)])
            loss.backward()
        clip_grad_norm_(model.parameters(), 0.05)
        if step == 3:
            next(p for p in model.parameters() if p.requires_grad).grad = None
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", EVERY)
def test_training_has_the_plain_loops_bits(name: str) -> None:
    """Losses, weights and checkpoint are the plain loop's, with rows on the host and on the device.

    The loop clips, accumulates and has a scheduler.
    """
    results = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        model, batches = start()
        optimizer: Any = make(name, trained(model, name))
        if is_ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=2)
        else:
            model.compile()
        results.append((clipped(model, optimizer, batches), weights(model), optimizer.state_dict()))
        if is_ours:
            assert {Placement.CPU, Placement.GPU} == set(session_of(model).states.placement.values())
            assert name.split()[0] in str(hytrain_fx.explain(model))
            hytrain_fx.close(model)
    (expected, plain_weights, plain_saved), (found, our_weights, our_saved) = results
    assert found == expected
    assert_same(our_weights, plain_weights)
    assert our_saved["param_groups"] == plain_saved["param_groups"]
    assert our_saved["state"].keys() == plain_saved["state"].keys()
    for number, entry in plain_saved["state"].items():
        assert_same_entry(our_saved["state"][number], entry)


@pytest.mark.parametrize("from_ours", [True, False], ids=["ours to plain", "plain to ours"])
@pytest.mark.parametrize("name", CHECKED)
def test_checkpoints_go_both_ways(name: str, from_ours: bool) -> None:
    """Three steps by one side, through a file, three by the other: the bits of six plain steps."""
    model, batches = start()
    model.compile()
    whole = make(name, model.parameters())
    for _ in range(2):
        plain_loop(3)(model, whole, batches)
    expected, saved = weights(model), None
    for is_ours in (from_ours, not from_ours):
        torch._dynamo.reset()
        model, batches = start()
        optimizer: Any = make(name, model.parameters())
        if is_ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=2)
        else:
            model.compile()
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        plain_loop(3)(model, optimizer, batches)
        saved = through_a_file(model.state_dict(), optimizer.state_dict())
        if is_ours:
            hytrain_fx.close(model)
    assert saved is not None
    assert_same(saved[0], expected)


@pytest.mark.parametrize("name", CHECKED)
def test_states_load_in_the_dtype_that_the_optimizer_makes(name: str) -> None:
    """A bf16 run's checkpoint in an fp32 run: the bits are those of plain torch."""
    before, batches = start(torch.bfloat16)
    narrow = make(name, before.parameters())
    plain_loop(2)(before, narrow, batches)
    results: list[Any] = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        model, batches = start()
        optimizer: Any = make(name, model.parameters())
        if is_ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=2)
        else:
            model.compile()
        saved = through_a_file(before.state_dict(), narrow.state_dict())  # torch steps on in a loaded `step` itself
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        plain_loop(3)(model, optimizer, batches)
        results.append((weights(model), optimizer.state_dict()["state"]))
        if is_ours:
            hytrain_fx.close(model)
    assert_same(results[1][0], results[0][0])
    for number, entry in results[0][1].items():
        assert_same_entry(results[1][1][number], entry)


@pytest.fixture(scope="module")
def ours() -> Iterator[Callable[[], tuple[Any, Any, Batches]]]:
    """One model with bf16 parameters and SGD, two units on the device."""
    torch._dynamo.reset()
    model, batches = start(torch.bfloat16)
    _, optimizer = hytrain_fx.compile(model, make("SGD nesterov", model.parameters()), k=2)
    yield lambda: (model, optimizer, batches)
    hytrain_fx.close(model)


def test_16_bit_parameters_have_fp32_masters_and_states(ours: Callable[[], tuple[Any, Any, Batches]]) -> None:
    """Training has the bits of a loop that steps fp32 masters by hand.

    The checkpoint has the masters under `master`, and training goes on from there.
    """
    model, optimizer, batches = ours()
    plain_model, _ = start(torch.bfloat16)
    plain_model.compile()
    by_hand = TorchAdam(plain_model.parameters(), torch.optim.SGD, **TRACED["SGD nesterov"][1])
    expected = plain_loop(6)(plain_model, by_hand, batches)
    found = plain_loop(3)(model, optimizer, batches)
    saved = through_a_file(optimizer.state_dict())
    optimizer.load_state_dict(saved[0])
    found += plain_loop(3)(model, optimizer, batches)
    assert found == expected
    assert_same(weights(model), weights(plain_model))
    for parameter, plain in zip(model.parameters(), plain_model.parameters(), strict=True):
        entry = optimizer.state[parameter]
        assert entry["momentum_buffer"].dtype == torch.float32
        assert torch.equal(entry["master"], by_hand.masters[plain])


def test_states_of_a_parameter_can_be_taken_away_and_given(ours: Callable[[], tuple[Any, Any, Batches]]) -> None:
    """Deleted states are as before the first step; states that do not fit are refused.

    A refusal changes nothing.
    """
    model, optimizer, batches = ours()
    plain_loop(1)(model, optimizer, batches)
    parameter = model.first.weight
    entry = optimizer.state[parameter]
    for wrong, why in (({"momentum": entry["momentum_buffer"]}, "no momentum_buffer for first.weight, only .'momentum'.; is it of SGD"),
                       ({"momentum_buffer": torch.zeros(3)}, r"momentum_buffer of first.weight has shape \(3,\) in the checkpoint")):
        with pytest.raises(ValueError, match=why):
            optimizer.state[parameter] = wrong
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], entry["momentum_buffer"])
    del optimizer.state[parameter]
    assert parameter not in optimizer.state
    optimizer.state[parameter] = entry
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], entry["momentum_buffer"])


def test_states_move_between_host_and_device() -> None:
    """Rows that go to the device in mid-run keep the bits of the plain loop."""
    results = []
    for is_ours in (False, True):
        torch._dynamo.reset()
        model, batches = start()
        optimizer: Any = make("RMSprop", model.parameters())
        if is_ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=0)
        else:
            model.compile()
        losses = plain_loop(3)(model, optimizer, batches)
        if is_ours:
            session = session_of(model)
            units = session.planning.units()
            session.place(prefix_plan(units, len(units), source="by hand", reason=lambda unit: "moved"))
            assert set(session.states.placement.values()) == {Placement.GPU}
        losses += plain_loop(3)(model, optimizer, batches)
        results.append((losses, weights(model)))
        if is_ours:
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


def test_a_plan_is_solved_from_measured_times() -> None:
    """With k left open the update is timed on the device too.

    `explain` has the optimizer's note next to the plan.
    """
    torch._dynamo.reset()
    model, batches = start()
    _, optimizer = hytrain_fx.compile(model, make("Adafactor", model.parameters()), warmup_steps=1)
    plain_loop(6)(model, optimizer, batches)
    explained = hytrain_fx.explain(model)
    assert explained.profile is not None
    assert "cannot be traced" in explained.optimizer[0]
    assert explained.memory.estimate is not None
    assert explained.memory.device_states_bytes + explained.memory.host_bytes > 0
    hytrain_fx.close(model)


def test_what_cannot_be_had_is_refused() -> None:
    """What is not supported is an error that says why, and no thread is left.

    Such are LBFGS, a step over all parameters, other engines, streaming and a wrapped optimizer.
    """
    model, _ = start()
    for optimizer, options, why in (
        (torch.optim.LBFGS(model.parameters()), {}, "LBFGS needs all parameters at once"),
        (GlobalNorm(model.parameters()), {}, "GlobalNorm.step.. needs all parameters at once"),
        (torch.optim.SGD(model.parameters(), 0.1), {"engine": "native"}, "engine='native' with SGD: that is for AdamW, Adam, Lion"),
        (torch.optim.SGD(model.parameters(), 0.1), {"stream": 0.5}, "streamed states with SGD"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            hytrain_fx.compile(model, optimizer, **options)


def test_an_error_in_the_optimizer_is_reported() -> None:
    """What the step of a row raises comes out of the next call, with its own message."""
    torch._dynamo.reset()
    model, batches = start()
    _, optimizer = hytrain_fx.compile(model, OwnNorm(model.parameters()), k=0)
    plain_loop(1)(model, optimizer, batches)
    optimizer.param_groups[0]["lr"] = Decimal("0.1")  # a number that torch does not take
    with pytest.raises(EngineError, match="CPU update: unsupported operand"):
        plain_loop(2)(model, optimizer, batches)
    with pytest.raises(EngineError):
        hytrain_fx.close(model)
