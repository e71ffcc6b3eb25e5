"""A gradient of several parts is added up in autograd's order, whoever makes the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hytrain_fx.gradients.parts import BackwardParts
from hytrain_fx.session.eager_reads import EagerReads

from .loops import Twins, compare, plain_loop
from .models import Batches, mlp

Backwards = Callable[[Any, Batches], Iterator[Any]]
pytestmark = pytest.mark.inductor


@pytest.fixture(params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    """New for each test: rows that have had several parts once are expected to have them again."""
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    yield made
    made.close()


def penalty(model: Any) -> Any:
    return 1e-2 * sum(p.sin().sum() for p in model.parameters())


def after_two_calls(model: Any, batches: Batches) -> Iterator[Any]:
    yield model(*batches[0]) + model(*batches[1]) + penalty(model)


def between_two_calls(model: Any, batches: Batches) -> Iterator[Any]:
    first = model(*batches[0])
    between = penalty(model)
    yield first + model(*batches[1]) + between


def before_two_calls(model: Any, batches: Batches) -> Iterator[Any]:
    before = penalty(model)
    yield model(*batches[0]) + model(*batches[1]) + before


def one_call_outlives_a_backward(model: Any, batches: Batches) -> Iterator[Any]:
    first, second = model(*batches[0]), model(*batches[1])
    yield first
    yield second + model(*batches[2])


def two_calls_outlive_a_backward(model: Any, batches: Batches) -> Iterator[Any]:
    first, *others = [model(*batch) for batch in batches[:3]]
    yield first
    yield sum(others)


def a_call_is_dropped(model: Any, batches: Batches) -> Iterator[Any]:
    model(*batches[2])
    yield model(*batches[0])
    yield model(*batches[1])


MADE: dict[str, Backwards] = {made.__name__: made for made in (
    after_two_calls, between_two_calls, before_two_calls, one_call_outlives_a_backward, two_calls_outlive_a_backward, a_call_is_dropped)}


@pytest.mark.parametrize("times", [1, 2], ids=["one micro-batch", "two"])
@pytest.mark.parametrize("made", MADE)
def test_parts_are_added_in_autograds_order(twins: Twins, made: str, times: int) -> None:
    """Calls that wait for their backward, and eager code beside them, leave no other bits."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(1)(model, optimizer, batches)
        for _ in range(2):
            for _ in range(times):
                for loss in MADE[made](model, batches):
                    loss.backward()
                    losses.append(float(loss.detach()))
            losses += [float(p.grad.double().sum()) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return losses

    twins.agree(loop)


def test_a_call_whose_loss_is_gone_holds_no_sum_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later micro-batches are added as they come."""
    made = Twins(mlp, k=0)
    plain_loop(1)(made.ours, made.optimizer, made.batches)
    aside: list[int] = []
    monkeypatch.setattr(BackwardParts, "lay_aside", lambda parts, row, *_: aside.append(row))
    for batch in made.batches:
        made.ours(*batch)
    for batch in made.batches:
        made.ours(*batch).backward()
    made.close()
    assert not aside


class Between(nn.Module):
    """Two graphs read a weight, and eager code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def eager(self) -> torch.Tensor:
        return self.layer.weight.sin().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        between = self.eager()
        return self.layer(x).square().mean() + between  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiler", [True, False], ids=["reads are seen", "no compiler"])
def test_parts_of_eager_code_in_the_forward_come_in_order(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where eager code's reads are not seen, as there is no C++ compiler."""
    if not compiler:
        monkeypatch.setattr(EagerReads, "begin", lambda reads: False)
    compare(lambda: (Between(), [(torch.randn(8, 16),) for _ in range(2)]), plain_loop(3), k=0)


def test_a_parts_bits_depend_on_the_order() -> None:
    """The numbers of these tests tell one order from another."""
    one, other, third = torch.randn(3, 1000)
    assert not torch.equal((one + other) + third, (one + third) + other)
