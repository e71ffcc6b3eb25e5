"""Checkpoints: resuming is the same as never having stopped.

For fp32 a plain AdamW's checkpoint and ours are the same. For 16 bits ours has the masters too.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.errors import HytrainError, UnsupportedError
from hytrain_fx.runtime.arithmetic import square_root
from hytrain_fx.runtime.engine import Stage

from .loops import HYPER, HandAdam, assert_same, plain_loop, weights
from .models import Mlp, mlp
from .saved import ours, plain, start, through_a_file

K = [0, 2, 4]


def described(state: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    return {
        number: {key: (tuple(v.shape), v.dtype) for key, v in entry.items()} for number, entry in sorted(state["state"].items())
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_an_fp32_checkpoint_is_that_of_torch(k: int, amsgrad: bool) -> None:
    """An fp32 checkpoint has torch's keys, shapes, dtypes and param_groups, values within 1e-6.

    Before the first step it has no states.
    """
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "then"), [(0, 0), (0, 4), (2, 0)])
def test_resuming_is_never_having_stopped(dtype: torch.dtype, k: int, then: int) -> None:
    """Three steps, saved and loaded with another plan, and three more have the bits of six."""
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


@pytest.mark.parametrize("order", ["weights before compile", "model first", "optimizer first"])
@pytest.mark.parametrize("stream", [1.0, 0.5])
def test_streamed_states_resume(order: str, stream: float) -> None:
    """The halves of bf16 masters that are no weight outlast a load, read or trained after it.

    Where states are streamed from the first step on, the weights' half is on the device alone.
    """

    def compiled(model: torch.nn.Module) -> Any:
        torch._dynamo.reset()
        return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=0, stream=stream, warmup_steps=10**6)[1]

    model, batches = start(torch.bfloat16)
    optimizer = compiled(model)
    plain_loop(3)(model, optimizer, batches)
    saved, states = through_a_file(model.state_dict(), optimizer.state_dict())
    plain_loop(3)(model, optimizer, batches)
    expected, masters = weights(model), {number: entry["master"] for number, entry in states["state"].items()}
    hytrain_fx.close(model)
    for looks in (False, True):
        model, _ = start(torch.bfloat16, seed=5)
        if order == "weights before compile":
            model.load_state_dict(saved)
        optimizer = compiled(model)
        calls: list[Callable[[], object]] = [partial(model.load_state_dict, saved), partial(optimizer.load_state_dict, states)]
        for call in calls if order == "model first" else calls[:0:-1] if order == "weights before compile" else calls[::-1]:
            call()
        if looks:
            assert [float(p.detach().sum()) for p in model.parameters()]
            assert_same({number: entry["master"] for number, entry in optimizer.state_dict()["state"].items()}, masters)
        plain_loop(3)(model, optimizer, batches)
        assert_same(weights(model), expected)
        hytrain_fx.close(model)


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_the_order_of_loading_does_not_matter(order: str) -> None:
    """Masters of bf16 weights come from the checkpoint, whether weights load before or after."""
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


@pytest.fixture
def rounded_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give torch's AdamW a correctly rounded square root, as ours is (MKL's is not).

    Both then have the same bits.
    """
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch's kernels for CPUs without AVX2 have no fused multiply-add")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", square_root, raising=False)
        yield


@pytest.mark.sample(2)
@pytest.mark.usefixtures("rounded_root")
@pytest.mark.parametrize("k", K)
@pytest.mark.parametrize("how", ["state_dict", "compile in mid-run"])
def test_a_plain_run_goes_on_here(k: int, how: str) -> None:
    """Three steps of torch's AdamW, then three of ours, have the bits of six of torch's.

    Ours goes on from torch's checkpoint, or from the optimizer itself.
    """
    expected_model, batches = start()
    if how == "state_dict":
        expected = plain(expected_model)
        plain_loop(3)(expected_model, expected, batches)
        model, _ = start(seed=5)
        optimizer = ours(model, k)
        saved, states = through_a_file(expected_model.state_dict(), expected.state_dict())
        model.load_state_dict(saved)
        optimizer.load_state_dict(states)
    else:
        runs = []
        for _ in range(2):  # not compiled yet, either of them
            model, batches = start()
            runs.append((model, torch.optim.AdamW(model.parameters(), foreach=False, **HYPER)))
            plain_loop(3)(*runs[-1], batches)
        (expected_model, expected), (model, mine) = runs
        torch._dynamo.reset()
        expected_model.compile()
        _, optimizer = hytrain_fx.compile(model, mine, k=k)
        assert optimizer.state_dict()["state"][0]["step"] == 3
    plain_loop(3)(model, optimizer, batches)
    plain_loop(3)(expected_model, expected, batches)
    assert_same(weights(model), weights(expected_model))
    hytrain_fx.close(model)


@pytest.mark.sample(2)
@pytest.mark.usefixtures("rounded_root")
@pytest.mark.parametrize("k", K)
def test_our_run_goes_on_in_plain_torch(k: int) -> None:
    """Our fp32 checkpoint loads into torch's AdamW, which goes on with the bits of ours."""
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
    assert_same(weights(other), weights(model))
    hytrain_fx.close(model)


def test_masters_of_16_bit_parameters_are_saved_and_may_be_missing() -> None:
    """`master` is an extra fp32 key whose rounding is the weight.

    A checkpoint without it starts from the weights.
    """
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", K)
def test_weights_loaded_after_compile_reach_the_masters(dtype: torch.dtype, k: int) -> None:
    """After model.load_state_dict() the next step starts from the loaded weights.

    The model is compiled and trained; its moments do not change.
    """
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
    """Saving in mid-step waits for running updates and shows committed values.

    The step goes on as if nothing was saved.
    """
    model, batches = start()
    optimizer = ours(model)
    plain_loop(2)(model, optimizer, batches)
    before = copy.deepcopy(optimizer.state_dict())
    model(*batches[0]).backward()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 3
    hytrain_fx.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_state_dict_right_after_step_waits_for_slow_updates(dtype: torch.dtype) -> None:
    """A checkpoint right after step() has the values at rest, though updates and copies are late.

    They are the values of the step just committed.
    """
    model, batches = start(dtype)
    optimizer = ours(model, k=2)
    plain_loop(2)(model, optimizer, batches)
    session = session_of(model)
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        session.engine.set_delay(stage, 20_000)
    for number in range(3):
        before = weights(model)
        model(*batches[number]).backward()
        optimizer.step()
        if number == 1:
            saved, states = weights(model), optimizer.state_dict()
        else:
            states, saved = optimizer.state_dict(), weights(model)
        session.drain()
        assert_same(saved, weights(model))
        assert not any(torch.equal(saved[name], before[name]) for name in saved)
        torch.testing.assert_close(states, optimizer.state_dict(), rtol=0, atol=0)
        assert {float(entry["step"]) for entry in states["state"].values()} == {number + 3}
        optimizer.zero_grad()
    hytrain_fx.close(model)


def require_documented_copies(state: Any, parameter: torch.Tensor) -> None:
    """What docs/limits.md says of an entry's tensors: writes that are lost, and a loss."""
    expected = state[parameter]["exp_avg"].clone()
    with torch.inference_mode():
        state[parameter]["exp_avg"].zero_()
    state[parameter]["exp_avg"].numpy()[:] = 0
    state[parameter]["exp_avg"].detach().zero_()
    state[parameter]["exp_avg"].data.zero_()
    assert torch.equal(state[parameter]["exp_avg"], expected)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (parameter * state[parameter]["exp_avg"]).sum()
    penalty = (parameter.float() * state[parameter]["exp_avg"].clone()).sum()
    assert torch.equal(torch.autograd.grad(penalty, parameter)[0], expected.to(parameter.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_by_parameter(dtype: torch.dtype) -> None:
    """`optimizer.state` has state_dict's entries.

    Assigning writes, and deleting starts again from nothing. A write that would be lost is an
    error.
    """
    model, batches = start(dtype)
    original = torch.optim.AdamW(model.parameters(), **HYPER)
    torch._dynamo.reset()
    _, optimizer = hytrain_fx.compile(model, original, k=2)
    state: Any = optimizer.state
    assert original.state is state
    first, *_ = parameters = list(model.parameters())
    assert not state
    assert (len(state), state[first], first in state) == (0, {}, False)
    plain_loop(2)(model, optimizer, batches)
    packed = optimizer.state_dict()["state"]
    assert list(state) == parameters
    for number, p in enumerate(parameters):
        torch.testing.assert_close(state[p], packed[number], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"[Ii]nplace update to inference tensor"):
        state[first]["exp_avg"].zero_()
    before = weights(model)
    require_documented_copies(state, first)
    state[first] = state[first] | {"exp_avg": torch.ones_like(first, dtype=torch.float32)}
    assert bool((optimizer.state_dict()["state"][0]["exp_avg"] == 1).all())
    del state[first]
    assert list(optimizer.state_dict()["state"]) == list(range(1, len(parameters)))
    with pytest.raises(KeyError):
        del state[first]
    with pytest.raises(ValueError, match="exp_avg_sq"):
        state[first] = {"step": torch.tensor(1.0), "exp_avg": first}
    state.clear()
    assert optimizer.state_dict()["state"] == {}
    assert_same(weights(model), before)
    optimizer.state = {}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"optimizer\.state was replaced"):
        optimizer.step()
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


def test_states_of_a_frozen_parameter_come_back_out_of_a_checkpoint() -> None:
    """A frozen layer keeps its states from one checkpoint to the next, as in torch's optimizer."""
    torch._dynamo.reset()
    model: Any
    model, batches = mlp()
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), k=0)
    plain_loop(2)(model, optimizer, batches)
    first = optimizer.state_dict()
    hytrain_fx.close(model)
    model.first.requires_grad_(False)
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), k=0)
    optimizer.load_state_dict(first)
    plain_loop(2)(model, optimizer, batches)
    second = optimizer.state_dict()["state"]
    assert second.keys() == first["state"].keys()
    for number, count in ((0, 2.0), (1, 2.0), (2, 4.0)):  # the first layer's two are frozen, the third was trained on
        assert float(second[number]["step"]) == count
    for name, value in first["state"][0].items():
        assert torch.equal(torch.as_tensor(second[0][name]), torch.as_tensor(value)), name
    hytrain_fx.close(model)
