"""Gradients that hold NaN or infinities, on either engine, wherever states rest.

    on_nonfinite="allow"   steps with them compute as plain torch does
    on_nonfinite="skip"    they are left out
    on_nonfinite="raise"   they are left out, with an error
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.config import OnNonfinite
from hytrain_fx.errors import NonFiniteGradientError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage

from .loops import Loop, Twins, weights
from .models import Batches, mlp
from .test_loss_scale import scaled_loop
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
        """With one weight that is large enough to be updated on a guess."""
        model, batches = mlp()
        model.body = nn.Sequential(nn.Linear(8, 272), nn.Linear(272, 272), nn.Linear(272, 8))
        return model.to(dtype), [(x.to(dtype),) for (x,) in batches]

    made = Twins(make, workers=2, engine=engine, timeout_s=30.0, replan_every=0)
    yield made
    made.close()


def arrange(twins: Twins, places: Sequence[Placement], speculate: bool = False, mode: OnNonfinite = "allow") -> None:
    """Place the rows, and set mode and whether updates begin before step().

    Skips what the engine does not do.
    """
    engine = twins.session.engine
    if (Placement.STREAM in places and not engine.can_stream) or (speculate and not engine.can_begin_early):
        pytest.skip(f"not done by the {engine.name} engine")
    twins.optimizer.zero_grad()
    twins.session.place(plan_of(twins.session, places))
    twins.session.speculate(speculate, runs_behind=False)
    twins.session.finite_steps.use(mode)


def loop_of(bad: Sequence[Bad | None], clip: float | None = None, step: Step = lambda model, optimizer: optimizer.step()) -> Loop:
    """Steps of which some have gradients that are not finite; gives losses and norms as text."""

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
    """The two loops, each on its model: the same numbers, and the same bits of weights and states.

    NaN is NaN.
    """
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


@pytest.mark.sample(16)
@each_place
@each_clip
@each_speculate
@pytest.mark.parametrize("bad", [overflow, not_a_number, one_element])
def test_a_step_computes_with_them_as_plain_torch_does(
    twins: Twins, places: list[Placement], clip: float | None, speculate: bool, bad: Bad
) -> None:
    """No error, and the plain loop's bits from then on, with weights and states NaN or infinite."""
    arrange(twins, places, speculate)
    loop = loop_of([None, None, None, bad, None, None], clip)
    both(twins, loop, loop)


def finite_steps_alone(model: Any, optimizer: Any) -> None:
    """The plain loop's way to leave out a step."""
    if all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        optimizer.step()


def catching(told: list[str], pause_s: float = 0.0) -> Step:
    """Calls step(), and goes on after the error of a step that was left out.

    `pause_s` before it gives updates that may begin ahead of it the time to.
    """

    def step(model: Any, optimizer: Any) -> None:
        time.sleep(pause_s)
        try:
            optimizer.step()
        except NonFiniteGradientError as error:
            told.append(str(error))

    return step


BAD = (None, None, overflow, None, not_a_number, one_element, None, None)


@pytest.mark.sample(24)
@each_place
@each_clip
@each_speculate
@pytest.mark.parametrize("mode", ["skip", "raise"])
def test_a_step_with_them_is_left_out(
    twins: Twins, places: list[Placement], clip: float | None, speculate: bool, mode: OnNonfinite
) -> None:
    """Weights, states and step counts are those of a plain loop that does not call step() then.

    With "raise" each such step() names a parameter and the step, and the loop may go on.
    """
    arrange(twins, places, speculate, mode)
    steps, before = twins.session.finite_steps, twins.session.finite_steps.count
    early = twins.session.engine.early_counts().params
    told: list[str] = []
    first = twins.session.steps_done
    both(twins, loop_of(BAD, clip, finite_steps_alone), loop_of(BAD, clip, catching(told, 0.02 if speculate else 0.0)))
    assert steps.count == before + 3
    if speculate and clip is None and places == PLACES["host"]:
        assert twins.session.engine.early_counts().params > early
    assert len(told) == (3 if mode == "raise" else 0)
    for number, message in zip((3, 5, 6), told, strict=False):
        assert f"those before step {first + number}" in message
        assert ".weight" in message or ".bias" in message
    if told and clip is None:
        assert "body.2.weight" in told[2]
    sentence = twins.session.finite_steps.in_words(twins.session.steps_done)
    assert sentence is not None
    assert f"the last was step {first + 6}" in sentence


@each_place
def test_an_error_that_is_not_known_at_step_comes_before_anything_else_changes(twins: Twins, places: list[Placement]) -> None:
    """As on a GPU: the next forward or step() raises it, with the weights of before.

    The loop goes on from there.
    """
    arrange(twins, places, mode="raise")
    if not twins.session.engine.can_skip:
        pytest.skip("it knows at step()")
    _, optimizer = twins.restart()
    model, steps = twins.ours, twins.session.finite_steps
    loop_of([None, None])(model, optimizer, twins.batches)
    kept = weights(model)
    steps.reads_at_once = False
    twins.session.engine.set_delay(Stage.LANDING, 30_000)
    try:
        for _ in range(3):
            overflow(model, model(*twins.batches[0]))
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(NonFiniteGradientError, match="those before step"):
                loop_of([None])(model, optimizer, twins.batches)
            assert all(torch.equal(value, kept[name]) for name, value in weights(model).items())
            optimizer.zero_grad()
    finally:
        twins.session.engine.set_delay(Stage.LANDING, 0)
        steps.reads_at_once = True
    loop_of([None])(model, optimizer, twins.batches)
    counted = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
    assert counted == {3.0}


@pytest.mark.sample(12)
@pytest.mark.parametrize("mode", ["allow", "skip", "raise"])
@pytest.mark.parametrize("unscale", [False, True])
@each_place
def test_steps_that_grad_scaler_leaves_out_are_its_own(twins: Twins, places: list[Placement], unscale: bool, mode: OnNonfinite) -> None:
    """In every mode they are left out as in the plain loop, are no error, and are not counted."""
    arrange(twins, places, mode=mode)
    before = twins.session.finite_steps.count
    loop = scaled_loop([False, True, False, True, True, False], unscale=unscale, clip=0.05 if unscale else None)
    both(twins, loop, loop)
    assert twins.session.finite_steps.count == before


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", ["skip", "raise"])
@each_place
def test_a_factor_that_is_not_finite_counts(twins: Twins, places: list[Placement], mode: OnNonfinite) -> None:
    """Finite gradients multiplied by NaN, or beyond the range of their dtype, are not finite."""
    arrange(twins, places, mode=mode)

    def scaled(factor: float, power: int) -> Bad:
        def backward(model: Any, loss: torch.Tensor) -> None:
            loss.backward()
            for _ in range(power):
                torch._foreach_mul_([p.grad for p in model.parameters()], factor)

        return backward

    bad = (None, scaled(NAN, 1), scaled(3e38, 2), scaled(0.5, 3), scaled(INF, 1), None)
    both(twins, loop_of(bad, step=finite_steps_alone), loop_of(bad, step=catching([])))


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", ["skip", "raise"])
@each_place
def test_sums_of_micro_batches_are_looked_at(twins: Twins, places: list[Placement], mode: OnNonfinite) -> None:
    """A NaN of the first backward is in the sum."""
    arrange(twins, places, mode=mode)

    def twice(model: Any, loss: torch.Tensor) -> None:
        not_a_number(model, loss)
        model(*twins.batches[0]).backward()

    both(twins, loop_of((None, twice, None), step=finite_steps_alone), loop_of((None, twice, None), step=catching([])))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam, hytrain_fx.Lion])
@pytest.mark.parametrize("mode", ["allow", "skip", "raise"])
def test_other_optimizers_do_the_same(kind: Any, mode: OnNonfinite) -> None:
    """Traced ones and Lion: the plain class's bits, with the values or without the step."""
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, batches = mlp()
        plain = {} if kind is hytrain_fx.Lion else {"foreach": False}
        optimizer: Any = kind(model.parameters(), lr=1e-2, weight_decay=0.1, **({} if ours else plain))
        step: Step = catching([])
        if ours:
            _, optimizer = hytrain_fx.compile(model, optimizer, workers=2, on_nonfinite=mode)
        elif mode != "allow":
            model.compile()
            step = finite_steps_alone
        else:
            model.compile()
        losses = loop_of((None, one_element, None, overflow, None), step=step)(model, optimizer, batches)
        found.append((losses, weights(model)))
        if ours:
            assert find_words(model) == (mode != "allow")
            hytrain_fx.close(model)
    assert found[0][0] == found[1][0]
    for name, value in found[1][1].items():
        torch.testing.assert_close(value, found[0][1][name], rtol=0, atol=0, equal_nan=True, msg=name)


def find_words(model: Any) -> bool:
    """Whether `explain` says that steps were left out."""
    return "2 of 5 steps were left out because gradients held NaN" in str(hytrain_fx.explain(model))
