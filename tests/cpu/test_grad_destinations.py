"""torch.autograd.grad and backward(inputs=...) through a compiled model.

Gradients go where torch takes them, and `.grad` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .loops import Twins, assert_same, plain_loop, weights
from .models import Batches, broken_gpt, mlp

MODELS: dict[str, Callable[[], tuple[Any, Batches]]] = {"mlp": mlp, "two graphs that share a row": broken_gpt}
PLACES = {"states on the host": 0, "states on both": 2}


@pytest.fixture(scope="module", params=MODELS)
def make(request: pytest.FixtureRequest) -> Callable[[], tuple[Any, Batches]]:
    return MODELS[request.param]


@pytest.fixture(scope="module", params=PLACES)
def k(request: pytest.FixtureRequest) -> int:
    return PLACES[request.param]


@pytest.fixture(scope="module")
def twins(make: Callable[[], tuple[Any, Batches]], k: int) -> Iterator[Twins]:
    made = Twins(make, k=k, workers=2, timeout_s=20.0)
    yield made
    made.close()


def grads(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def asked(model: Any, batches: Batches, which: slice) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model(*batches[0]), list(model.parameters())[which], allow_unused=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("which", [slice(None), slice(1, 3)], ids=["all", "some"])
def test_autograd_grad_returns_the_gradients(twins: Twins, which: slice) -> None:
    """torch.autograd.grad returns torch's bits and sets no `.grad`."""
    twins.restart()
    for model in (twins.ours, twins.plain):
        model.zero_grad()
    found, expected = asked(twins.ours, twins.batches, which), asked(twins.plain, twins.batches, which)
    assert any(g is not None for g in expected)
    assert all((f is None) == (e is None) and (f is None or torch.equal(f, e)) for f, e in zip(found, expected, strict=True))
    assert all(type(g) is torch.Tensor for g in found if g is not None)
    assert grads(twins.ours) == {}


@pytest.mark.sample(2)
def test_autograd_grad_leaves_gradients_and_training_alone(twins: Twins) -> None:
    """torch.autograd.grad leaves `.grad` alone, and training goes on with the same bits.

    It is called between backward() and step(), and between steps.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):
            loss = model(*batches[step])
            loss.backward()
            norms = [g.square().sum() for g in asked(model, batches, slice(None)) if g is not None]
            losses += [float(loss.detach()), float(torch.stack(norms).sum())]
            optimizer.step()
            optimizer.zero_grad()
            asked(model, batches, slice(0, 1))
        return losses

    twins.agree(loop)


@pytest.mark.sample(2)
def test_backward_with_inputs_gives_the_others_no_gradient(twins: Twins) -> None:
    """loss.backward(inputs=[...]) sets `.grad` of those alone, with torch's bits.

    step() leaves the others alone.
    """
    reference, optimizer = twins.restart()
    for model, updates in ((twins.plain, reference), (twins.ours, optimizer)):
        model(*twins.batches[0]).backward(inputs=list(model.parameters())[1:3])
        assert len(grads(model)) == 2
        updates.step()
    assert_same(weights(twins.ours), weights(twins.plain))
    for model, updates in ((twins.plain, reference), (twins.ours, optimizer)):
        updates.zero_grad()
        plain_loop(2)(model, updates, twins.batches)
    assert_same(weights(twins.ours), weights(twins.plain))


@pytest.mark.parametrize("options", [{"k": 0}, {"gpu_states": 1.0}, {"k": 0, "engine": "torch"}], ids=str)
def test_a_first_backward_may_be_of_one_parameter_of_a_layer(options: dict[str, Any]) -> None:
    """A bias is trained by a backward(inputs=[...]) of it alone, before any other backward."""
    made = Twins(mlp, timeout_s=20.0, **options)

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        model(*batches[0]).backward(inputs=[model.body[0].bias])
        optimizer.step()
        optimizer.zero_grad()
        return plain_loop(2)(model, optimizer, batches)

    made.agree(loop)
    made.close()


@pytest.mark.sample(2)
def test_a_gradient_of_the_input_alone_sets_no_grad(twins: Twins) -> None:
    """Asking for the input's gradient alone, as a gradient penalty does, sets no `.grad`."""
    if twins.batches[0][0].dtype != torch.float32:
        pytest.skip("tokens have no gradient")
    twins.restart()
    found = []
    for model in (twins.ours, twins.plain):
        model.zero_grad()
        x = twins.batches[0][0].clone().requires_grad_()
        found.append(torch.autograd.grad(model(x), x)[0])
        assert grads(model) == {}
    assert torch.equal(*found)
