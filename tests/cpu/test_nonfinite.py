"""Gradients that hold NaN or infinities: steps with them compute as plain torch does, on either engine, wherever states rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from hytrain_fx.ir.plan import Placement

from .loops import Loop, Twins, weights
from .models import Batches, mlp
from .test_placements import plan_of

INF, NAN = float("inf"), float("nan")
PLACES = {"host": [Placement.CPU], "split": [Placement.GPU, Placement.CPU], "streamed": [Placement.STREAM, Placement.CPU],
          "resident": [Placement.GPU]}
each_place = pytest.mark.parametrize("places", PLACES.values(), ids=list(PLACES))
each_clip = pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
each_speculate = pytest.mark.parametrize("speculate", [False, True], ids=["", "early"])


def overflow(model: Any, loss: torch.Tensor) -> None:
    """Infinities everywhere, NaN where a gradient is 0."""
    (loss * INF).backward()


def not_a_number(model: Any, loss: torch.Tensor) -> None:
    (loss * NAN).backward()


def one_element(model: Any, loss: torch.Tensor) -> None:
    """An infinity in one gradient, written by hand."""
    loss.backward()
    model.body[2].weight.grad[3, 4] = -INF


Bad = Callable[[Any, torch.Tensor], None]
Step = Callable[[Any, Any], None]


@pytest.fixture(scope="module", params=[("native", torch.float32), ("native", torch.bfloat16), ("torch", torch.float32),
                                        ("torch", torch.bfloat16)], ids=lambda of: f"{of[0]}-{of[1]}")
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    engine, dtype = request.param

    def make() -> tuple[Any, Batches]:
        model, batches = mlp()
        return model.to(dtype), [(x.to(dtype),) for (x,) in batches]

    made = Twins(make, workers=2, engine=engine, timeout_s=30.0, replan_every=0)
    yield made
    made.close()


def arrange(twins: Twins, places: Sequence[Placement], speculate: bool = False) -> None:
    """Place the rows, and set whether updates begin before step(). Skips what the engine does not do."""
    engine = twins.session.engine
    if (Placement.STREAM in places and not engine.can_stream) or (speculate and not engine.can_begin_early):
        pytest.skip(f"not done by the {engine.name} engine")
    twins.optimizer.zero_grad()
    twins.session.place(plan_of(twins.session, places))
    twins.session.speculate(speculate, runs_behind=False)


def loop_of(bad: Sequence[Bad | None], clip: float | None = None, step: Step = lambda model, optimizer: optimizer.step()) -> Loop:
    """Steps of which some have gradients that are not finite; gives losses and norms, NaN as text."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found = []
        for number, spoil in enumerate(bad):
            loss = model(*batches[number % 3])
            (spoil or (lambda model, loss: loss.backward()))(model, loss)
            if clip is not None:
                found.append(repr(float(clip_grad_norm_(model.parameters(), clip))))
            step(model, optimizer)
            optimizer.zero_grad()
            found.append(repr(float(loss.detach())))
        return found

    return loop


def both(twins: Twins, plain: Loop, ours: Loop) -> None:
    """The two loops, each on its model: the same numbers, and weights and states with the same bits, NaN being NaN."""
    reference, optimizer = twins.restart()
    expected = plain(twins.plain, reference, twins.batches)
    assert ours(twins.ours, optimizer, twins.batches) == expected
    found, wanted = weights(twins.ours), weights(twins.plain)
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, equal_nan=True, msg=name)
    saved, of_plain = optimizer.state_dict()["state"], reference.state_dict()["state"]
    for number, state in of_plain.items():
        for key, name in (("step", "step"), ("m", "exp_avg"), ("v", "exp_avg_sq")):
            theirs = torch.as_tensor(state[key], dtype=torch.float32)
            torch.testing.assert_close(saved[number][name].float(), theirs, rtol=0, atol=0, equal_nan=True, msg=f"{name} of {number}")


@each_place
@each_clip
@each_speculate
@pytest.mark.parametrize("bad", [overflow, not_a_number, one_element])
def test_a_step_computes_with_them_as_plain_torch_does(
    twins: Twins, places: list[Placement], clip: float | None, speculate: bool, bad: Bad
) -> None:
    """No error, and the bits of the plain loop in the steps after it, where weights and states are NaN or infinite."""
    arrange(twins, places, speculate)
    loop = loop_of([None, None, None, bad, None, None], clip)
    both(twins, loop, loop)
