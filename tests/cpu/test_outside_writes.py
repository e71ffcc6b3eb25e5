"""Weights written from outside, and gradients taken another way.

They reach the masters or are refused, and are never lost in silence.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.cost_model.planner import prefix_plan
from hytrain_fx.session.call_gate import find_session

from .loops import HYPER, Twins, assert_same, compare, plain_loop, weights
from .models import Batches, mlp


@pytest.fixture(scope="module", params=[0, 4], ids=["states on the host", "states on the device"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    yield made
    made.close()


@torch.no_grad()
def in_place(model: Any) -> None:
    model.first.weight.clamp_(-0.1, 0.1)
    model.last.weight.copy_(torch.full((1, 8), 0.2))


def initialised(model: Any) -> None:
    nn.init.constant_(model.body[0].weight, 0.01)
    nn.init.zeros_(model.first.bias)


def loaded(model: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in weights(model).items()})


def detached(model: Any) -> None:
    model.first.weight.detach().mul_(0.5)


def through_numpy(model: Any) -> None:
    model.last.weight.detach().numpy()[:] *= 0.5


def through_data(model: Any) -> None:
    model.first.weight.data.mul_(0.5)


def new_data(model: Any) -> None:
    model.first.weight.data = torch.full_like(model.first.weight, 0.05)


def from_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


WRITES: dict[str, Callable[[Any], None]] = {f.__name__: f for f in (in_place, initialised, loaded, detached)}


def writing(write: Callable[[Any], None], before_step: bool) -> Any:
    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        if before_step:
            model(*batches[0]).backward()
            write(model)
            optimizer.step()
            optimizer.zero_grad()
        else:
            write(model)
        return losses + plain_loop(2)(model, optimizer, batches)

    return loop


def agree_with_torch(twins: Twins, loop: Any) -> None:
    """Compare with torch's own AdamW, whose only copy of an fp32 weight is the parameter."""
    _, optimizer = twins.restart()
    expected = loop(twins.plain, torch.optim.AdamW(twins.plain.parameters(), foreach=False, **HYPER), twins.batches)
    found = loop(twins.ours, optimizer, twins.batches)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights(twins.ours), weights(twins.plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before_step", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_from_outside_reach_the_masters(twins: Twins, write: str, before_step: bool) -> None:
    """clamp_, copy_, nn.init, load_state_dict, writes through detach(): the next step sees them."""
    agree_with_torch(twins, writing(WRITES[write], before_step))


@pytest.mark.parametrize("write", [through_data, through_numpy])
def test_weights_written_behind_the_version_counter_reach_the_masters(write: Callable[[Any], None]) -> None:
    """p.data.mul_(), as weight clipping and old loading code do, and numpy's view: not lost."""
    twins = Twins(mlp, k=0)
    try:
        agree_with_torch(twins, writing(write, False))
    finally:
        twins.close()


@pytest.mark.sample(6)
@pytest.mark.parametrize("write", [new_data, from_vector, through_data])
@pytest.mark.parametrize("before_step", [False, True], ids=["between steps", "between backward and step"])
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_a_parameter_given_other_memory_is_followed(engine: str, k: int, before_step: bool, write: Callable[[Any], None]) -> None:
    """After p.data = other or vector_to_parameters, training goes on in that memory.

    This holds wherever the states are.
    """
    twins = Twins(mlp, k=k, engine=engine)
    try:
        agree_with_torch(twins, writing(write, before_step))
    finally:
        twins.close()


def test_memory_that_was_left_is_freed() -> None:
    """After `p.data = other` and one step, nothing of ours holds the parameter's old memory."""
    twins = Twins(mlp, k=4)
    try:
        plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
        weight = twins.ours.first.weight
        left = weakref.ref(weight.untyped_storage())
        weight.data = weight.data.clone()
        plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
        gc.collect()
        assert left() is None
    finally:
        twins.close()


@pytest.mark.parametrize("k", [0, 4])
def test_a_moved_16_bit_weight_keeps_its_master(k: int) -> None:
    """p.data = p.data.clone() of a bf16 parameter, between any steps, changes no bit."""
    results = []
    for move in (False, True):
        torch.manual_seed(0)
        model, batches = mlp()
        model.to(torch.bfloat16)
        batches = [tuple(x.bfloat16() for x in batch) for batch in batches]
        torch._dynamo.reset()
        _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), k=k)
        for _ in range(3):
            plain_loop(1)(model, optimizer, batches)
            if move:
                for p in model.parameters():
                    p.data = p.data.clone()
        results.append(weights(model))
        hytrain_fx.close(model)
    assert_same(results[1], results[0])


def test_a_change_of_dtype_after_compile_is_refused() -> None:
    """model.to(bfloat16) of a compiled model is an error that says to compile again."""
    twins = Twins(mlp, k=0)
    try:
        plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
        twins.ours.to(torch.bfloat16)
        with pytest.raises(errors.UnsupportedError, match="compile"):
            plain_loop(1)(twins.ours, twins.optimizer, [tuple(x.bfloat16() for x in batch) for batch in twins.batches])
    finally:
        twins.close()


def test_a_gradient_is_read_after_zero_grad_until_the_next_one() -> None:
    """A stand-in kept over zero_grad() has its values.

    After the next backward it says that the gradient is gone.
    """
    twins = Twins(mlp, k=0)
    try:
        twins.ours(*twins.batches[0]).backward()
        gradient, twin = twins.ours.last.weight.grad, twins.ours.last.weight.grad.detach()
        expected = gradient.clone()
        late = twins.ours.first.weight.grad
        twins.optimizer.zero_grad()
        assert torch.equal(gradient, expected)
        assert torch.equal(twin, expected)
        twins.ours(*twins.batches[0]).backward()
        gradient = late
        with pytest.raises(errors.GradientConsumedError):
            gradient.sum()
    finally:
        twins.close()


def test_states_move_after_a_gradient_was_dropped_by_hand() -> None:
    """A new plan after model.zero_grad() instead of step() moves the states."""
    twins = Twins(mlp, k=0)
    try:
        twins.ours(*twins.batches[0]).backward()
        twins.ours.zero_grad()
        units = twins.session.planning.units()
        twins.session.place(prefix_plan(units, 2, source="test", reason=lambda unit: "test"))
    finally:
        twins.close()


def test_a_deep_copy_trains_apart() -> None:
    """A copy of the compiled model, taken while updates run, is a plain model.

    Training either leaves the other alone.
    """
    twins = Twins(mlp, k=1)
    plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    other = copy.deepcopy(twins.ours)
    before = weights(twins.ours)
    plain_loop(2)(other, torch.optim.AdamW(other.parameters()), twins.batches)
    assert all(torch.equal(value, before[name]) for name, value in weights(twins.ours).items())
    copied = weights(other)
    plain_loop(2)(twins.ours, twins.optimizer, twins.batches)
    assert all(torch.equal(value, copied[name]) for name, value in weights(other).items())
    twins.close()


@pytest.mark.parametrize("before_step", [False, True], ids=["after step", "between backward and step"])
def test_a_model_may_be_moved_with_its_gradients(twins: Twins, before_step: bool) -> None:
    """model.double() and back, with `.grad` still there, loses nothing.

    Gradients count before step(), and disturb nobody after step() has used them.
    """

    def move(model: Any) -> None:
        model.cpu()
        model.double()
        model.float()
        model.to("cpu", torch.float32)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(4):
            loss = model(*batches[step % 3])
            optimizer.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            if before_step:
                move(model)
            optimizer.step()
            if not before_step:
                move(model)
        optimizer.zero_grad()
        return losses

    twins.agree(loop)


def test_a_gradient_that_step_has_used_moves_with_its_model() -> None:
    """After step() and model.double(), `.grad` has the model's dtype, and its values."""
    twins = Twins(mlp, k=0)
    twins.restart()
    twins.ours(*twins.batches[0]).backward()
    twins.optimizer.step()
    expected = twins.ours.first.weight.grad.detach().clone().double()
    twins.ours.double()
    gradient = twins.ours.first.weight.grad
    assert gradient.dtype == torch.float64
    assert torch.equal(gradient, expected)
    twins.ours.float()
    twins.close()


def with_noise(model: Any, optimizer: Any, batches: Batches, read: Callable[[Any, Any], object]) -> list[float]:
    """Each forward has noise in its weights, which are put back before step().

    `read` comes meanwhile.
    """
    losses = []
    for step in range(14):
        torch.manual_seed(step)
        with torch.no_grad():
            before = [p.detach().clone() for p in model.parameters()]
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
        loss = model(*batches[step % len(batches)])
        read(model, optimizer)
        loss.backward()
        with torch.no_grad():
            for p, was in zip(model.parameters(), before, strict=True):
                p.copy_(was)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


READS: dict[str, Callable[[Any, Any], object]] = {
    "nothing": lambda model, optimizer: None,
    "one state": lambda model, optimizer: dict(optimizer.state.get(model.first.weight, {})),
    "all states": lambda model, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("dtype", "options"), [
    (torch.bfloat16, {}), (torch.bfloat16, {"k": 4}), (torch.bfloat16, {"weights": "streamed", "k": 0}), (torch.float16, {"k": 0}),
    (torch.float32, {})], ids=str)
def test_weights_that_come_back_before_step_keep_their_masters(dtype: torch.dtype, options: dict[str, Any], read: str) -> None:
    """Plans come into force while noise is in the weights, and nothing of a master is lost.

    Nor where states are read meanwhile. What is saved has the weights as they are.
    """

    def make() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        return model.to(dtype), [tuple(of.to(dtype) for of in batch) for batch in batches]

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = with_noise(model, optimizer, batches, READS[read])
        if (session := find_session(model)) is not None:
            assert len(session.planning.history) > 1
        with torch.no_grad():
            model.first.weight.mul_(0.5)
        saved = optimizer.state_dict()["state"][0]["master"].flatten().tolist() if dtype != torch.float32 else []
        return losses + saved

    compare(make, loop, workers=1, **options)
