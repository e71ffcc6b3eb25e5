"""A step is a transaction: nothing visible changes between backward() and step().

After step() everybody sees the new weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hytrain_fx.runtime.engine import Stage

from .loops import Loop, Twins, assert_same, weights
from .models import Batches, mlp

READS: dict[str, Callable[[Any, Batches], Any]] = {
    "compiled call without gradients": lambda model, batches: _without_grad(model, batches),
    "call of a submodule": lambda model, batches: model.first(batches[0][0]).detach(),
    "sum of a weight": lambda model, batches: model.first.weight.sum().detach(),
    "state_dict": lambda model, batches: weights(model)["first.weight"],
    "deepcopy": lambda model, batches: copy.deepcopy(model).first.weight.detach(),
    "clone": lambda model, batches: model.first.weight.clone().detach(),
    "indexing": lambda model, batches: model.first.weight[0, 0].item(),
    "numpy": lambda model, batches: torch.from_numpy(model.first.weight.detach().numpy().copy()),
    "data": lambda model, batches: model.first.weight.data.clone(),
    "parameters_to_vector": lambda model, batches: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "item of a list": lambda model, batches: torch.stack([p.sum() for p in model.parameters()]).detach(),
}


def _without_grad(model: Any, batches: Batches) -> torch.Tensor:
    with torch.no_grad():
        return model(*batches[0])  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(mlp, k=request.param, workers=2, timeout_s=20.0)
    made.agree(_steps(2))  # the plan is put in force in forward order at the second forward
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 1000)
    yield made
    made.close()


def _steps(count: int, before_step: Callable[..., Any] | None = None, after_step: Callable[..., Any] | None = None) -> Loop:
    """Ordinary steps, with one call between backward() and step() and one right after step().

    What the calls return is compared too.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        found: list[Any] = []
        for step in range(count):
            loss = model(*batches[step % len(batches)])
            loss.backward()
            found.append(float(loss.detach()))
            if before_step is not None:
                found.append(before_step(model, optimizer, step))
            optimizer.step()
            if after_step is not None:
                found.append(after_step(model, optimizer, step))
            optimizer.zero_grad()
        return found

    return loop


def test_hyper_parameters_count_as_they_are_at_step(twins: Twins) -> None:
    """A learning rate, decay or betas set after the backward hold for that very step."""

    def change(model: Any, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0].update(lr=1e-2 / (step + 1), weight_decay=0.1 * step, betas=(0.9 - 0.1 * step, 0.99))

    twins.agree(_steps(4, before_step=change))


def test_a_skipped_step_leaves_no_trace(twins: Twins) -> None:
    """After zero_grad() instead of step() weights stay, as if that backward had not been."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(6):
            loss = model(*batches[step % 3])
            loss.backward()
            losses.append(float(loss.detach()))
            before = weights(model)
            if step % 2:
                optimizer.step()
            else:
                optimizer.zero_grad()
                assert_same(weights(model), before)
            optimizer.zero_grad()
        return losses

    twins.agree(loop)


@pytest.mark.parametrize("read", READS)
def test_reads_before_step_find_the_old_weights_and_after_it_the_new(twins: Twins, read: str) -> None:
    """Whatever reads a weight finds the committed one, also while the update is delayed.

    The training keeps its bits.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = []
        for step in range(3):
            before = READS[read](model, batches)
            loss = model(*batches[step])
            loss.backward()
            between = READS[read](model, batches)
            optimizer.step()
            after = READS[read](model, batches)
            optimizer.zero_grad()
            before, between, after = (torch.as_tensor(value) for value in (before, between, after))
            assert torch.equal(before, between)
            assert not torch.equal(between, after)
            losses += [float(loss.detach()), float(after.double().sum())]
        return losses

    twins.agree(loop)


def test_evaluation_between_backward_and_step_sees_the_old_weights(twins: Twins) -> None:
    """Two reads between backward and step see the old weights and change nothing.

    One is a compiled call without gradients, the other an eager read.
    """

    def look(model: Any, optimizer: Any, step: int) -> tuple[float, float]:
        return float(_without_grad(model, twins.batches)), float(model.last.weight.sum().detach())

    twins.agree(_steps(4, before_step=look))


@pytest.mark.parametrize("every", [1, 2])
def test_moving_averages_by_hand_follow_the_new_weights(twins: Twins, every: int) -> None:
    """An average kept with lerp_ after step(), on every step or every other, is the reference's."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        average = copy.deepcopy(model)

        @torch.no_grad()
        def update(model: Any, optimizer: Any, step: int) -> None:
            if step % every == 0:
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.25)

        losses = _steps(4, after_step=update)(model, optimizer, batches)
        return [*losses, *(float(p.detach().double().sum()) for p in average.parameters())]

    twins.agree(loop)


def test_averaged_model_follows_the_new_weights(twins: Twins) -> None:
    """torch's AveragedModel of the compiled model is the reference's.

    It copies the model and reads its parameters after each step.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[Any]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
        losses = _steps(4, after_step=lambda model, optimizer, step: average.update_parameters(model))(model, optimizer, batches)
        return [*losses, *(float(p.double().sum()) for p in average.module.parameters())]

    twins.agree(loop)


def test_backward_through_weights_that_step_has_overwritten_is_torchs_error(twins: Twins) -> None:
    """loss.backward() after step() of the same weights fails as in torch; training goes on."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        late = model(*batches[1])
        losses = _steps(1)(model, optimizer, batches)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        optimizer.zero_grad()
        return losses + _steps(2)(model, optimizer, batches)

    for model, optimizer in zip((twins.plain, twins.ours), twins.restart(), strict=True):
        if model is twins.ours:
            loop(model, optimizer, twins.batches)


def test_an_exception_in_the_forward_or_the_loop_leaves_training_whole(twins: Twins) -> None:
    """A forward that raises, or a step abandoned after its backward, changes nothing after it."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = _steps(2)(model, optimizer, batches)
        with pytest.raises(Exception, match=r"shape|size|mat1"):
            model(torch.randn(2, 99))
        losses += _steps(1)(model, optimizer, batches)
        model(*batches[0]).backward()
        optimizer.zero_grad()
        return losses + _steps(2)(model, optimizer, batches)

    twins.agree(loop)
