"""weights="auto": the place of weights is decided from bytes, and again where memory runs out.

A CPU has no bound, so tests say what its room is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.weights_choice import WeightsChoice
from hytrain_fx.runtime import memory
from hytrain_fx.session import giving_way, memory_pressure, weights_choice

from .loops import assert_same, weights
from .test_memory_pressure import SHORT, WIDTH, Net, train

OPTIONS: dict[str, Any] = {"workers": 1, "timeout_s": 60.0, "warmup_steps": 2}
PARAMS = 6 * (WIDTH * WIDTH + WIDTH)
LITTLE, MUCH = 2 * PARAMS, 100 * PARAMS


@pytest.fixture(autouse=True)
def enough() -> Iterator[None]:
    """Nothing runs out unless a test says so."""
    torch._dynamo.reset()
    yield
    SHORT.update(forward=0, backward=0)


def room_of(patch: pytest.MonkeyPatch, nbytes: float) -> None:
    """The device has as much for a model."""
    patch.setattr(memory, "room_bytes", lambda device, own_bytes: nbytes)


def made(dtype: torch.dtype = torch.bfloat16, breaks: bool = False) -> nn.Module:
    """The same each time."""
    torch.manual_seed(0)
    return Net(breaks).to(dtype)


def compiled(model: Any, **options: Any) -> tuple[Any, Any]:
    """With weights="auto", if nothing else is said."""
    options = {"weights": "auto", **OPTIONS, **options}
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.01), **options)


def run_out_in_a_loss(model: Any, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    """A forward whose loss ran out of memory: only the allocator has counted that."""
    model(torch.randn(8, WIDTH, dtype=torch.bfloat16))
    patch.setattr(memory_pressure, "_errors_of_allocator", lambda device: 1)
    optimizer.zero_grad()


@functools.cache
def as_resident() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of nine steps with weights on the device."""
    torch._dynamo.reset()
    model, optimizer = compiled(made(), weights="resident", gpu_states=0.0)
    found = train(model, optimizer, range(9)), weights(model)
    hytrain_fx.close(model)
    torch._dynamo.reset()
    return found


def choice_of(model: Any) -> WeightsChoice:
    """As explain has it."""
    found = hytrain_fx.explain(model).weights_choice
    assert found is not None
    return found


def test_what_fits_rests_on_the_device_and_what_does_not_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bit is the same, and explain has the place and its numbers, also as values."""
    ends = []
    for nbytes, place in ((MUCH, "resident"), (LITTLE, "streamed")):
        torch._dynamo.reset()
        room_of(monkeypatch, nbytes)
        model, optimizer = compiled(made(), gpu_states=0.0)
        ends.append((train(model, optimizer, range(6)), weights(model)))
        choice = choice_of(model)
        assert (choice.place, choice.needs.weights_bytes, choice.room_bytes) == (place, 2 * PARAMS, nbytes)
        assert choice.needs.streamed_bytes == 2 * 6 * WIDTH * WIDTH
        assert choice.needs.slots_bytes == 3 * 2 * WIDTH * WIDTH
        found = hytrain_fx.explain(model)
        assert f'weights="auto": {place}, as they ' in " ".join(found.details().split())
        assert found.to_dict()["weights_choice"]["place"] == place
        assert len(session_of(model).states.streamed) == (6 if place == "streamed" else 0)
        hytrain_fx.close(model)
    assert ends[0][0] == ends[1][0]
    assert_same(ends[0][1], ends[1][1])


def test_a_model_on_the_meta_device_is_decided_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same numbers, before anything is loaded. Then no weight comes to the device."""
    values = weights(made())
    for nbytes in (MUCH, LITTLE):
        room_of(monkeypatch, nbytes)
        whole = weights_choice.choice_of(weights_choice.with_weights_chosen(
            model := made(), torch.optim.AdamW(model.parameters()), hytrain_fx.Config(weights="auto")))
        with hytrain_fx.on_meta():
            meta = made()
        model, _ = compiled(meta, device="cpu", loader=values.__getitem__)
        assert choice_of(model) == whole
        away = [of for of in session_of(model).states.streamed.values() if not of.has_memory]
        assert len(away) == (6 if nbytes == LITTLE else 0)
        hytrain_fx.close(model)


def test_options_that_put_states_on_the_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """k by its units, whose weights are no longer away; gpu_states by its bytes, or its share."""
    room_of(monkeypatch, MUCH)

    def needs(**options: Any) -> Any:
        model = made()
        config = weights_choice.with_weights_chosen(
            model, torch.optim.AdamW(model.parameters()), hytrain_fx.Config(weights="auto", **options))
        choice = weights_choice.choice_of(config)
        assert choice is not None
        return choice.needs

    assert needs(k=2).states_bytes == 2 * (WIDTH * WIDTH + WIDTH) * (12 + 2)
    assert needs(k=2).streamed_bytes == 4 * 2 * WIDTH * WIDTH
    assert needs(gpu_states=0.5).states_bytes == 6 * PARAMS
    assert needs(gpu_states=1000).states_bytes == 1000
    assert needs().states_bytes == 0


@pytest.mark.parametrize(("make", "options", "said"), [
    (lambda p: torch.optim.SGD(p, lr=1e-2), {}, "for AdamW and Adam, and the optimizer is SGD"),
    (hytrain_fx.Lion, {}, "for AdamW and Adam, and the optimizer is Lion"),
    (torch.optim.AdamW, {"engine": "torch"}, "for the native engine, and engine='torch' was given"),
    (torch.optim.AdamW, {"speculate": True}, "speculate=True was given"),
    (torch.optim.AdamW, {"dtype": torch.float32}, "no weight is a bf16 matrix"),
    (torch.optim.AdamW, {"k": 6}, "no weight is a bf16 matrix that the CPU updates"),
], ids=["SGD", "Lion", "engine", "speculate", "fp32", "k"])
def test_what_cannot_be_streamed_stays_on_the_device(
    make: Callable[[Any], Any], options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains, and explain says why it is there."""
    room_of(monkeypatch, LITTLE)
    model: Any = made(options.pop("dtype", torch.bfloat16))
    model, _ = hytrain_fx.compile(model, make(model.parameters()), weights="auto", **OPTIONS, **options)
    assert choice_of(model).place == "resident"
    assert said in " ".join(hytrain_fx.explain(model).details().split())
    assert not session_of(model).states.streamed
    hytrain_fx.close(model)


def test_without_a_compiler_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What streaming compiles cannot be."""
    def fails() -> None:
        raise hytrain_fx.errors.EngineError("no g++")

    room_of(monkeypatch, LITTLE)
    monkeypatch.setattr(weights_choice, "can_put", fails)
    model, _ = compiled(made())
    assert "that needs a C++ compiler (no g++)" in str(choice_of(model))
    hytrain_fx.close(model)


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("step", [0, 4], ids=["first step", "later"])
def test_weights_that_turn_out_too_large_are_streamed(where: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the next forward on, with graphs captured again. Each loss and weight is as it was."""
    room_of(monkeypatch, MUCH)
    monkeypatch.setenv("HYTRAIN_FX_NAN_SLOTS", "1")
    expected, last = as_resident()
    model, optimizer = compiled(made(), gpu_states=0.0)

    def before(now: int) -> None:
        if where == "loss" and now == step:
            run_out_in_a_loss(model, optimizer, monkeypatch)
        elif where != "loss":
            SHORT[where] = int(now == step)

    assert train(model, optimizer, range(9), before) == expected
    assert_same(weights(model), last)
    session = session_of(model)
    assert len(session.states.streamed) == 6
    said = " ".join(hytrain_fx.explain(model).details().split())
    told = "code outside the model" if where == "loss" else f"a {where}"
    assert f"memory ran out in {told} after {step} steps, so weights are streamed from then on" in said
    assert len(session.capture.graphs) == (4 if step or where == "backward" else 3)
    hytrain_fx.settle(model)
    train(model, optimizer, range(1))
    assert session.nodes.fetched.bytes_fetched > 0
    hytrain_fx.close(model)


def test_states_give_way_before_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay on the device until no state is left there. The error says which comes next."""
    room_of(monkeypatch, MUCH)
    monkeypatch.setattr(giving_way, "LEAST_BYTES", MUCH)  # they go as a whole
    model, optimizer = compiled(made())
    train(model, optimizer, range(6))
    session = session_of(model)
    planning = session.planning
    assert planning.profile is not None
    planning.want(planning.solver.all_on_device(planning.profile, 1.0, planning.discipline), "all on the device")
    train(model, optimizer, range(1))
    for streamed, said in ((0, "half of these states go to the host"), (6, 'weights="auto" left the weights on the device')):
        assert not session.states.streamed
        SHORT["backward"] = 1
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).backward()
        assert said in raised.value.__notes__[0]
        optimizer.zero_grad()
        train(model, optimizer, range(1))
        assert session.resources.tiers().device_bytes == 0
        assert len(session.states.streamed) == streamed
    hytrain_fx.close(model)


def test_weights_that_stay_for_good_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward's error says what comes next, except with options that streaming forbids."""
    room_of(monkeypatch, MUCH)
    for options, streamed in (({}, True), ({"speculate": True}, False)):
        torch._dynamo.reset()
        model, optimizer = compiled(made(), **options)
        train(model, optimizer, range(2))
        SHORT["backward"] = 1
        with pytest.raises(torch.OutOfMemoryError) as raised:
            model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).backward()
        assert ('weights="auto" left the weights' in raised.value.__notes__[0]) is streamed
        optimizer.zero_grad()
        train(model, optimizer, range(2))
        assert len(session_of(model).states.streamed) == (6 if streamed else 0)
        hytrain_fx.close(model)


def test_room_of_a_gpu_counts_what_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory, what torch's allocator has idle, and what the model has there already.

    No more than the process may have, also where the allocator got more before that was set.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    for share, room_bytes in ((1.0, 1500), (0.15, 400), (0.1, 300)):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index, share=share: share)
        assert memory.room_bytes(torch.device("cuda"), 300) == room_bytes
    assert memory.room_bytes(torch.device("cpu"), 300) == float("inf")
