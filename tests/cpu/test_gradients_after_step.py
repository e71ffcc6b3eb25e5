"""Gradients are read, used by step() again, and added to, after `step()`.

The bits are a plain loop's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx import errors
from hytrain_fx.gradients.standin import GradStandIn
from hytrain_fx.runtime.engine import Stage

from .loops import Twins, assert_same, plain_loop, weights
from .models import Batches, mlp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PLANS: dict[str, dict[str, Any]] = {
    "host": {"k": 0}, "both": {"k": 2}, "device": {"k": 4}, "streamed": {"k": 1, "stream": 1.0},
    "torch": {"k": 0, "engine": "torch"}, "torch, both": {"k": 2, "engine": "torch"},
}


def made_of(dtype: torch.dtype) -> Callable[[], tuple[Any, Batches]]:
    def make() -> tuple[Any, Batches]:
        model, batches = mlp()
        return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]

    return make


@pytest.fixture(scope="module", params=PLANS)
def plan(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def twins(plan: str, dtype: str) -> Iterator[Twins]:
    made = Twins(made_of(DTYPES[dtype]), workers=2, timeout_s=20.0, **PLANS[plan])
    made.agree(plain_loop(2))
    for stage in (Stage.D2H, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 300)
    yield made
    made.close()


def grad_of(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def read(model: Any) -> list[float]:
    """What loggers take of gradients: norms, sums, histograms."""
    found = [float(grad_of(p).norm()) for p in model.parameters()]
    found += [float(grad_of(p).double().sum()) for p in model.parameters()]
    return found + [float(n) for p in model.parameters() for n in grad_of(p).float().histc(4, -1, 1)]


def clip(model: Any) -> None:
    clip_grad_norm_(model.parameters(), 0.01)


def scale(model: Any) -> None:
    for p in model.parameters():
        grad_of(p).mul_(0.3)


def edit(model: Any) -> None:
    for p in model.parameters():
        p.grad = grad_of(p) * 0.5 + 0.01


EDITS: dict[str, Callable[[Any], None]] = {"as made": lambda model: None, "clipped": clip, "scaled": scale, "edited": edit}


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", EDITS)
def test_gradients_are_read_after_step(twins: Twins, how: str) -> None:
    """A read after step() gives the values that the step used.

    It comes in some steps or all, once or twice, at once or after a forward.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(6):
            loss = model(*batches[step % 3])
            loss.backward()
            EDITS[how](model)
            optimizer.step()
            if step != 1:
                found += read(model)
            if step == 3:
                found += read(model)
            if step == 4:
                model(*batches[0])
                found += read(model)
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    twins.agree(loop)


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", EDITS)
def test_step_twice_on_one_gradient(twins: Twins, how: str) -> None:
    """A second and a third step() without a backward use the same gradient.

    A read, an edit or a forward may come between them.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(6):
            loss = model(*batches[step % 3])
            loss.backward()
            EDITS[how](model)
            optimizer.step()
            if step == 1:
                found += read(model)
            if step == 2:
                model(*batches[1])
            if step == 3:
                scale(model)
            if step != 4:
                optimizer.step()
            if step == 5:
                optimizer.step()
                found += read(model)
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    twins.agree(loop)


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", ["as made", "clipped"])
def test_the_next_backward_adds_to_gradients_that_a_step_has_taken(twins: Twins, how: str) -> None:
    """A loop that forgets zero_grad(), always or for some steps, trains as badly as a plain one."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(7):
            loss = model(*batches[step % 3])
            if step == 5:
                loss = loss + model(*batches[0])
            loss.backward()
            EDITS[how](model)
            optimizer.step()
            if step in (3, 6):
                optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    twins.agree(loop)


@pytest.mark.sample(6)
def test_a_gradient_may_be_kept_over_zero_grad(twins: Twins) -> None:
    """Held by hand it can be read until the next backward; put back, the next step() takes it."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(4):
            model(*batches[step % 3]).backward()
            optimizer.step()
            kept = [grad_of(p) for p in model.parameters()]
            optimizer.zero_grad()
            if step % 2:
                found += [float(g.double().sum()) for g in kept]
            for p, g in zip(model.parameters(), kept, strict=True):
                p.grad = g
            optimizer.step()
            optimizer.zero_grad()
        return found

    twins.agree(loop)


@pytest.mark.sample(6)
def test_a_kept_gradient_never_shows_the_next_one(twins: Twins) -> None:
    """What is held over the next backward says that it is gone, where it was in a slot."""
    twins.restart()
    plain_loop(1)(twins.ours, twins.optimizer, twins.batches)
    twins.ours(*twins.batches[0]).backward()
    twins.optimizer.step()
    kept = [grad_of(p) for p in twins.ours.parameters()]
    before = [g.detach().clone() for g in kept if not isinstance(g, GradStandIn)]
    twins.optimizer.zero_grad()
    twins.ours(*twins.batches[1]).backward()
    in_slots = twins.session.planning.plan.k == 0
    for g in kept:
        if in_slots:
            with pytest.raises(errors.GradientConsumedError, match="zero_grad"):
                g.sum()
    assert all(torch.equal(g, b) for g, b in zip([g for g in kept if not isinstance(g, GradStandIn)], before, strict=True))
    twins.optimizer.zero_grad()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ["native", "torch"])
def test_gradients_are_read_across_a_new_plan(engine: str, dtype: str) -> None:
    """Plans move slots at a forward; the last step's gradients stay readable.

    They may be added to as well.
    """
    made = Twins(made_of(DTYPES[dtype]), warmup_steps=1, replan_every=2, engine=engine, timeout_s=20.0)
    placements = set()

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(12):
            loss = model(*batches[step % 3])
            if step:
                found += read(model)
            if step % 3:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            placements.add(tuple(made.session.states.placement.values()))
        return found

    made.agree(loop)
    assert made.session.planning.plan.source != "first steps"
    made.close()


@pytest.mark.parametrize("k", [0, 4])
def test_a_plan_put_in_force_by_hand_keeps_what_is_shown(k: int) -> None:
    """States may move between step() and a read, a second step() and the next backward.

    They go from host to device and back.
    """
    made = Twins(mlp, k=k, timeout_s=20.0)
    here, other = made.session.planning.plan, Twins(mlp, k=4 - k, timeout_s=20.0)
    there = other.session.planning.plan
    other.close()

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        found: list[float] = []
        for step in range(6):
            model(*batches[step % 3]).backward()
            optimizer.step()
            if model is made.ours:
                made.session.place(here if step % 2 else there)
            if step in (1, 2):
                found += read(model)
            if step in (2, 3):
                optimizer.step()
            if step != 4:
                optimizer.zero_grad()
        return found

    made.agree(loop)
    made.close()


class Writes(torch.optim.SGD):
    """An optimizer that edits the gradients that it is given."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, Writes])
@pytest.mark.parametrize("k", [0, 2, 4])
def test_gradients_after_steps_of_other_optimizers(k: int, kind: type[torch.optim.Optimizer]) -> None:
    """Gradients after steps of other optimizers are read, stepped on twice, and added to.

    A step that writes to a gradient leaves what it wrote.
    """
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
        if ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, k=k, timeout_s=20.0)
        else:
            model.compile()
        found: list[float] = []
        for step in range(6):
            model(*batches[step % 3]).backward()
            optimizer.step()
            if step % 2:
                found += read(model)
            if step in (1, 2) and kind is not Writes:
                optimizer.step()
                found += read(model)
            if step != 4 or kind is Writes:
                optimizer.zero_grad()
        results.append((found, weights(model)))
        if ours:
            hytrain_fx.close(model)
    assert results[1][0] == results[0][0]
    assert_same(results[1][1], results[0][1])


@pytest.mark.parametrize("k", [0, 4])
def test_gradients_after_close(k: int) -> None:
    """After close() gradients on the device may be read; those in slots say that they are gone.

    The model still moves and converts.
    """
    made = Twins(mlp, k=k, timeout_s=20.0)
    _, optimizer = made.restart()
    made.ours(*made.batches[0]).backward()
    optimizer.step()
    expected = grad_of(made.ours.last.weight).clone() if k else None
    made.close()
    if expected is None:
        with pytest.raises(errors.GradientConsumedError, match="closed"):
            grad_of(made.ours.first.weight).sum()
    else:
        assert torch.equal(grad_of(made.ours.last.weight), expected)
    made.ours.double()
    gc.collect()


def test_reading_leaves_the_loop_overlapped() -> None:
    """A read after step() copies the slot; it neither waits for the row's update nor ends it."""
    made = Twins(mlp, k=0, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))
    made.ours(*made.batches[0]).backward()
    expected = [grad_of(p).clone() for p in made.ours.parameters()]
    made.session.engine.set_delay(Stage.CPU_UPDATE, 200_000)
    made.optimizer.zero_grad()
    made.ours(*made.batches[0]).backward()
    made.optimizer.step()
    found = [grad_of(p).clone() for p in made.ours.parameters()]
    assert all(made.session.engine.pending(row) for row in range(len(found)))
    assert all(map(torch.equal, found, expected))
    made.session.engine.set_delay(Stage.CPU_UPDATE, 0)
    made.close()
