"""A compiled model whose places now hold other tensors than at compile.

They do so for one call (`functional_call`) or for good. What plain PyTorch trains rightly trains
with the same bits here. What it would train wrongly in silence (a new parameter that the optimizer
does not have) is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.api import session_of
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.call_gate import MOST_LAYOUTS

from .loops import HandAdam, Twins, assert_same, compare, plain_loop, weights
from .models import Batches, Mlp, mlp
from .test_errors import adamw


@pytest.fixture(scope="module", params=[0, 2], ids=["states on the host", "states on both"])
def k(request: pytest.FixtureRequest) -> int:
    """Units on the device."""
    found: int = request.param
    return found


def slow(k: int) -> Twins:
    """Twins with every stage of an update slow."""
    twins = Twins(mlp, k=k, workers=2, timeout_s=20.0)
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        twins.session.engine.set_delay(stage, 2000)
    return twins


def clones(model: Any) -> dict[str, torch.Tensor]:
    """Parameters of their own, as a deep copy of the model has them."""
    return {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}


def gradient_sum(tensor: torch.Tensor) -> float:
    """One number that shows any bit of the gradient that is not tiny."""
    assert tensor.grad is not None
    return float(tensor.grad.double().sum())


def maml(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """First-order MAML: one inner step on clones of the weights, the outer loss through them.

    Autograd links the clones to the weights.
    """
    losses = []
    for step in range(5):
        fast = {name: p.clone() for name, p in model.named_parameters()}
        inner = functional_call(model, fast, batches[step % 3])
        grads = torch.autograd.grad(inner, list(fast.values()))
        fast = {name: p - 0.1 * grad for (name, p), grad in zip(fast.items(), grads, strict=True)}
        outer = functional_call(model, fast, batches[(step + 1) % 3])
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        losses += [float(inner.detach()), float(outer.detach())]
    return losses


def beside(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Ordinary steps; between them gradients of clones, of some clones, aliases, evaluations."""
    losses = []
    for step in range(6):
        loss = model(*batches[step % 3])
        loss.backward()
        given = clones(model)
        other = functional_call(model, given, batches[0])
        other.backward()
        losses += [float(loss.detach()), float(other.detach()), *map(gradient_sum, given.values())]
        some = {"last.weight": given["last.weight"].detach().mul(2).requires_grad_()}
        partly = functional_call(model, some, batches[1])
        partly.backward()  # reaches the other weights' gradients as well
        losses += [float(partly.detach()), gradient_sum(some["last.weight"])]
        optimizer.step()
        optimizer.zero_grad()
        aliases = {name: p.detach() for name, p in model.named_parameters()}
        with torch.no_grad():
            losses.append(float(functional_call(model, aliases, batches[2])))
    return losses


def per_sample(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """Per-sample gradients by `vmap`, clipped and averaged into `.grad`."""

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional_call(model, parameters, (x[None],))
        return found

    norms = []
    for step in range(4):
        held = {name: p.detach() for name, p in model.named_parameters()}
        grads = vmap(grad(loss), in_dims=(None, 0))(held, *batches[step % 3])
        for name, p in model.named_parameters():
            p.grad = grads[name].clamp(-0.1, 0.1).mean(0)
            norms.append(float(p.grad.norm()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def own_parameters(model: Any, optimizer: Any, batches: Batches) -> list[float]:
    """`functional_call` with the model's own parameters trains them."""
    losses = []
    for step in range(4):
        loss = functional_call(model, dict(model.named_parameters()), batches[step % 3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.sample(3)
@pytest.mark.parametrize("loop", [maml, beside, per_sample, own_parameters], ids=lambda loop: loop.__name__)
def test_functional_call_is_the_plain_one(loop: Callable[[Any, Any, Batches], list[float]], k: int) -> None:
    """Losses, gradients of the given tensors and the weights after have the plain loop's bits.

    This holds however slow updates are.
    """
    twins = slow(k)
    twins.agree(loop)
    twins.close()


def exchanged(model: Any) -> None:
    """Two layers of one shape change places."""
    model.body[0], model.body[2] = model.body[2], model.body[0]


def tied(model: Any) -> None:
    """One layer takes the weight of another."""
    model.body[2].weight = model.body[0].weight


def taken_out(model: Any) -> None:
    """A layer is skipped from now on."""
    model.body[2] = nn.Identity()


@pytest.mark.sample(2)
@pytest.mark.parametrize("change", [exchanged, tied, taken_out], ids=lambda change: change.__name__)
def test_what_the_optimizer_still_has_trains_on(change: Callable[[Any], None], k: int) -> None:
    """Each parameter is trained by what the model makes of it now, as in the plain loop.

    Where it is put back, it is trained as before.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(3)(model, optimizer, batches)
        change(model)
        losses += plain_loop(4)(model, optimizer, batches)
        if change is exchanged:
            change(model)
            losses += plain_loop(3)(model, optimizer, batches)
        return losses

    # The plain compiled model goes on with the graph of two weights, whose gradients autograd adds;
    # a graph of the tie adds them itself.
    compare(mlp, loop, k=k, workers=2, rtol=1e-5 if change is tied else 0.0)


def test_two_models_that_exchange_a_layer(k: int) -> None:
    """Each optimizer goes on with its own parameters, which are the other model's now."""

    def train(ours: bool) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        models, (x, *_) = (Mlp(), Mlp()), mlp()[1]
        if ours:
            optimizers: Any = [hytrain_fx.compile(m, torch.optim.AdamW(m.parameters(), lr=1e-2), k=k)[1] for m in models]
            for model in models:
                session_of(model).engine.set_delay(Stage.CPU_UPDATE, 2000)
        else:
            optimizers = [HandAdam(m.parameters(), lr=1e-2) for m in models]
            for model in models:
                model.compile()
        losses = []
        for step in range(6):
            if step == 3:
                models[0].body, models[1].body = models[1].body, models[0].body
            for model in models:
                loss = model(*x)
                loss.backward()
                losses.append(float(loss.detach()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found = [weights(model) for model in models]
        if ours:
            for model in models:
                hytrain_fx.close(model)
        return losses, found

    (expected, plain), (found, mine) = train(False), train(True)
    assert found == expected
    for ours, theirs in zip(mine, plain, strict=True):
        assert_same(ours, theirs)


def assigned(model: Any) -> None:
    """`assign=True` makes the loaded tensors the model's parameters."""
    model.load_state_dict({name: value * 2 for name, value in weights(model).items()}, assign=True)


def new_layer(model: Any) -> None:
    """A layer of the same shape."""
    model.body[2] = nn.Linear(8, 8)


def other_layer(model: Any) -> None:
    """A layer of another shape and under another name."""
    model.last = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 1))


NOT_TRAINED: dict[str, tuple[Callable[[Any], None], str]] = {
    "assigned": (assigned, r"first\.weight is a new parameter.*assign=True"),
    "new layer": (new_layer, r"body\.2\.weight is a new parameter"),
    "other layer": (other_layer, r"last\.0\.weight is a new parameter.*still has the old last\.weight"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NOT_TRAINED)
def test_a_parameter_that_the_optimizer_does_not_have_is_an_error_at_step(name: str, k: int) -> None:
    """Evaluation works with it; `step()`, which would not train it, says so and changes nothing.

    The way out that the error names works.
    """
    change, message = NOT_TRAINED[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batches = mlp()
    optimizer: Any
    _, optimizer = hytrain_fx.compile(model, adamw(model, lr=1e-2), k=k)
    plain_loop(2)(model, optimizer, batches)
    change(model)
    expected = type(model).forward(model, *batches[0])
    with torch.no_grad():
        torch.testing.assert_close(model(*batches[0]), expected.detach())
    before = weights(model)
    model(*batches[0]).backward()
    with pytest.raises(errors.UnsupportedError, match=message):
        optimizer.step()
    assert_same(weights(model), before)
    hytrain_fx.close(model)
    model.zero_grad()
    _, optimizer = hytrain_fx.compile(model, adamw(model, lr=1e-2), k=k)
    losses = plain_loop(3)(model, optimizer, batches)
    assert losses[0] == pytest.approx(float(expected.detach()))
    assert not any(torch.equal(value, before[name]) for name, value in weights(model).items())
    hytrain_fx.close(model)


def test_weights_put_back_before_the_step_train_on(k: int) -> None:
    """Other parameters for an evaluation, then the model's own again: the next step is as ever."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        own = model.body[2]
        torch.manual_seed(3)
        new_layer(model)
        with torch.no_grad():
            losses.append(float(model(*batches[0])))
        model.body[2] = own
        return losses + plain_loop(3)(model, optimizer, batches)

    compare(mlp, loop, k=k, workers=2)


@pytest.mark.sample(0)
def test_more_ways_than_are_compiled_run_in_plain_python() -> None:
    """Each layout of parameters has graphs of its own.

    Beyond a limit there is one warning, at the loop's line, and the training is right.
    """

    class Slots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(MOST_LAYOUTS + 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    def train(ours: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = Slots()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2) if ours else HandAdam(model.parameters(), lr=1e-2)
        if ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=0)
        x, losses = torch.randn(3, 4), []
        for at in range(MOST_LAYOUTS + 1):
            losses += plain_loop(1)(model, optimizer, [(x,)])
            model.layers[at], model.layers[at + 1] = model.layers[at + 1], model.layers[at]
        found = weights(model)
        if ours:
            hytrain_fx.close(model)
        return losses, found

    expected, plain = train(False)
    with pytest.warns(errors.HytrainWarning, match="plain Python") as caught:
        found, mine = train(True)
    [told] = [warning for warning in caught if "plain Python" in str(warning.message)]
    assert told.filename == plain_loop.__code__.co_filename  # the loop's line
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)
