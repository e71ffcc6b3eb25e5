"""Checkpoints: a plain AdamW's and ours are the same thing for fp32, resuming is never having stopped, masters go along for 16 bits."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.errors import HytrainError

from .loops import HYPER, HandAdam, assert_same, plain_loop, weights
from .models import Batches, Mlp, mlp

K = [0, 2, 9]


def start(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, Batches]:
    torch.manual_seed(seed)
    model, batches = mlp()
    torch.manual_seed(7)
    batches = [(torch.randn(5, 6),) for _ in range(3)]
    return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]


def ours(model: nn.Module, k: int = 0, **hyper: Any) -> Any:
    torch._dynamo.reset()
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **{**HYPER, **hyper}), k=k)[1]


def plain(model: Any, **hyper: Any) -> Any:
    torch._dynamo.reset()
    model.compile()
    return torch.optim.AdamW(model.parameters(), foreach=False, **{**HYPER, **hyper})


def through_a_file(*values: Any) -> Any:
    """As torch.save and torch.load(weights_only=True) give it back."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def described(state: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    return {
        number: {key: (tuple(v.shape), v.dtype) for key, v in entry.items()} for number, entry in sorted(state["state"].items())
    }


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_fp32_checkpoint_is_that_of_torch(k: int, amsgrad: bool) -> None:
    """Same keys, shapes and dtypes, same param_groups, values within 1e-6; nothing before the first step."""
    found_model, batches = start()
    found = ours(found_model, k, amsgrad=amsgrad)
    expected_model, _ = start()
    expected = plain(expected_model, amsgrad=amsgrad)
    assert found.state_dict()["state"] == expected.state_dict()["state"] == {}
    plain_loop(3)(found_model, found, batches)
    plain_loop(3)(expected_model, expected, batches)
    one, other = found.state_dict(), expected.state_dict()
    assert described(one) == described(other)
    strip = {"foreach", "fused", "capturable"}
    for a, b in zip(one["param_groups"], other["param_groups"], strict=True):
        assert {key: v for key, v in a.items() if key not in strip} == {key: v for key, v in b.items() if key not in strip}
        assert a.keys() == b.keys()
    torch.testing.assert_close(one["state"], other["state"], rtol=1e-5, atol=1e-8)
    assert list(found_model.state_dict()) == list(expected_model.state_dict())
    hytrain_fx.close(found_model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "then"), [(0, 0), (0, 9), (2, 0)])
def test_resuming_is_never_having_stopped(dtype: torch.dtype, k: int, then: int) -> None:
    """Saved after 3 steps, loaded into a new model with another plan, 3 more: the bits of 6 steps at one go."""
    model, batches = start(dtype)
    optimizer = ours(model, k)
    plain_loop(3)(model, optimizer, batches)
    saved, states = through_a_file(model.state_dict(), optimizer.state_dict())
    plain_loop(3)(model, optimizer, batches)
    expected = weights(model)
    hytrain_fx.close(model)

    model, _ = start(dtype, seed=5)
    optimizer = ours(model, then)
    model.load_state_dict(saved)
    optimizer.load_state_dict(states)
    plain_loop(3)(model, optimizer, batches)
    assert_same(weights(model), expected)
    hytrain_fx.close(model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_the_order_of_loading_does_not_matter(order: str) -> None:
    """bf16: masters from the checkpoint stay whether the weights are loaded before or after them."""
    model, batches = start(torch.bfloat16)
    optimizer = ours(model)
    plain_loop(3)(model, optimizer, batches)
    saved, states = through_a_file(model.state_dict(), optimizer.state_dict())
    plain_loop(3)(model, optimizer, batches)
    expected = weights(model)
    calls = [lambda: model.load_state_dict(saved), lambda: optimizer.load_state_dict(states)]
    for call in calls if order == "model first" else reversed(calls):
        call()
    plain_loop(3)(model, optimizer, batches)
    assert_same(weights(model), expected)
    hytrain_fx.close(model)


@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("how", ["state_dict", "compile in mid-run"])
def test_a_plain_run_goes_on_here(k: int, how: str) -> None:
    """Three steps of torch's AdamW, then three of ours, from its checkpoint or from the optimizer itself: as six of torch's."""
    expected_model, batches = start()
    expected = plain(expected_model)
    plain_loop(3)(expected_model, expected, batches)
    saved, states = through_a_file(expected_model.state_dict(), expected.state_dict())
    if how == "state_dict":
        model, _ = start(seed=5)
        optimizer = ours(model, k)
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
    else:
        model, _ = start()
        mine = torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)
        plain_loop(3)(model, mine, batches)
        torch._dynamo.reset()
        _, optimizer = hytrain_fx.compile(model, mine, k=k)
        assert optimizer.state_dict()["state"][0]["step"] == 3
    plain_loop(3)(model, optimizer, batches)
    plain_loop(3)(expected_model, expected, batches)
    torch.testing.assert_close(weights(model), weights(expected_model), rtol=1e-6, atol=1e-6)
    hytrain_fx.close(model)


@pytest.mark.parametrize("k", K)
def test_our_run_goes_on_in_plain_torch(k: int) -> None:
    """Our fp32 checkpoint loads into torch's AdamW, which goes on as ours would have."""
    model, batches = start()
    optimizer = ours(model, k)
    plain_loop(3)(model, optimizer, batches)
    saved, states = through_a_file(model.state_dict(), optimizer.state_dict())
    plain_loop(3)(model, optimizer, batches)
    other, _ = start(seed=5)
    other.load_state_dict(saved)
    follower = plain(other)
    follower.load_state_dict(states)
    plain_loop(3)(other, follower, batches)
    torch.testing.assert_close(weights(other), weights(model), rtol=1e-6, atol=1e-6)
    hytrain_fx.close(model)


def test_masters_of_16_bit_parameters_are_saved_and_may_be_missing() -> None:
    """`master` is an extra fp32 key whose rounding is the weight; a checkpoint without it starts from the weights."""
    model, batches = start(torch.bfloat16)
    optimizer = ours(model)
    plain_loop(3)(model, optimizer, batches)
    states = optimizer.state_dict()
    for number, p in enumerate(model.parameters()):
        entry = states["state"][number]
        assert entry["master"].dtype == entry["exp_avg"].dtype == torch.float32
        assert torch.equal(entry["master"].bfloat16(), p)
        assert not torch.equal(entry["master"], p.float())
        del entry["master"]
    optimizer.load_state_dict(states)
    again = optimizer.state_dict()["state"]
    assert all(torch.equal(again[number]["master"], p.detach().float()) for number, p in enumerate(model.parameters()))
    hytrain_fx.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", K)
def test_weights_loaded_after_compile_reach_the_masters(dtype: torch.dtype, k: int) -> None:
    """model.load_state_dict() on a compiled, trained model: the next step starts from those weights, moments as they were."""
    other = weights(start(dtype, seed=9)[0])
    results = []
    for compiled in (False, True):
        model, batches = start(dtype)
        optimizer: Any = ours(model, k) if compiled else HandAdam(model.parameters(), **HYPER)
        if not compiled:
            torch._dynamo.reset()
            model.compile()
        plain_loop(2)(model, optimizer, batches)
        model.load_state_dict(other)
        if not compiled:
            for p in model.parameters():
                optimizer.state[p]["master"].copy_(p.detach())
        plain_loop(2)(model, optimizer, batches)
        results.append(weights(model))
        if compiled:
            hytrain_fx.close(model)
    assert_same(results[1], results[0])


def test_a_state_dict_between_backward_and_step_is_the_last_commits() -> None:
    """Saving in mid-step waits for running updates, shows committed values, and leaves the step as it was."""
    model, batches = start()
    optimizer = ours(model)
    plain_loop(2)(model, optimizer, batches)
    before = copy.deepcopy(optimizer.state_dict())
    model(*batches[0]).backward()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    hytrain_fx.close(model)


def test_a_state_dict_is_a_copy() -> None:
    """What was saved does not change when training goes on."""
    model, batches = start()
    optimizer = ours(model)
    plain_loop(2)(model, optimizer, batches)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    plain_loop(2)(model, optimizer, batches)
    torch.testing.assert_close(saved, kept, rtol=0, atol=0)
    hytrain_fx.close(model)


def test_a_checkpoint_of_another_model_is_refused_whole() -> None:
    """Other groups, shapes or states raise ValueError, and the states are as before."""
    model, batches = start()
    optimizer = ours(model)
    plain_loop(2)(model, optimizer, batches)
    before = copy.deepcopy(optimizer.state_dict())
    short = copy.deepcopy(before)
    short["param_groups"][0]["params"] = [0]
    odd = copy.deepcopy(before)
    odd["state"][3]["exp_avg_sq"] = torch.ones(2, 2)
    odd["param_groups"][0]["lr"] = 99.0
    sgd = copy.deepcopy(before)
    sgd["state"][2] = {"momentum_buffer": torch.zeros(8, 8)}
    for wrong in (short, odd, sgd):
        with pytest.raises((ValueError, HytrainError)):
            optimizer.load_state_dict(wrong)
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    hytrain_fx.close(model)


def test_hooks_of_state_dict_and_load_state_dict_run() -> None:
    """Hooks registered on the optimizer are called as torch calls them."""
    model = Mlp()
    optimizer = ours(model)
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["save", "saved", "load", "loaded"]
    hytrain_fx.close(model)
