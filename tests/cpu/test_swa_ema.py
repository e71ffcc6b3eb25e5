"""Averages of weights: torch.optim.swa_utils beside a compiled model, and batch norms.

Averages go into the model and out again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from hytrain_fx.runtime.engine import Stage

from .loops import Twins, compare, plain_loop, weights
from .models import Batches, mlp


class Normed(nn.Module):
    """Two layers and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x)))).square().mean()  # type: ignore[no-any-return]


def normed() -> tuple[nn.Module, Batches]:
    return Normed(), [(torch.randn(5, 6),) for _ in range(3)]


def sums(model: Any) -> list[float]:
    return [float(value.double().sum()) for value in weights(model).values()]


@pytest.fixture(scope="module", params=[0, 2], ids=["states on the host", "states on both"])
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    made = Twins(normed, k=request.param, workers=2, timeout_s=20.0)
    made.agree(plain_loop(2))
    for stage in (Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D):
        made.session.engine.set_delay(stage, 500)
    yield made
    made.close()


@pytest.mark.parametrize("buffers", [False, True], ids=["parameters", "buffers too"])
def test_stochastic_weight_averaging(twins: Twins, buffers: bool) -> None:
    """The loop of torch's documentation: AveragedModel from some step on, and SWALR.

    update_bn of the average follows, and then its evaluation.
    """

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        average = AveragedModel(model, use_buffers=buffers)
        average.module._compiled_call_impl = None  # a copy of the plain model would run the compiled call of the original
        annealing = SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)
        losses = []
        for step in range(6):
            losses += plain_loop(1)(model, optimizer, [batches[step % 3]])
            if step > 1:
                average.update_parameters(model)
                annealing.step()
        if not buffers:
            update_bn([x for (x,) in batches], average)
        average.eval()
        return [*losses, float(average(*batches[0])), *sums(average.module), *map(float, annealing.get_last_lr())]

    twins.agree(loop)


def test_update_bn_of_the_trained_model_itself(twins: Twins) -> None:
    """Forwards without gradients right after a step recompute statistics; training goes on."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        losses = plain_loop(2)(model, optimizer, batches)
        update_bn([x for (x,) in batches], model)
        losses += sums(model)
        model.eval()
        losses.append(float(model(*batches[0]).detach()))
        model.train()
        return losses + plain_loop(2)(model, optimizer, batches)

    twins.agree(loop)


def test_an_average_of_every_step_right_behind_it(twins: Twins) -> None:
    """An exponential average, updated between step() and zero_grad() while updates run."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        losses = []
        for step in range(5):
            loss = model(*batches[step % 3])
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses + sums(average.module)

    twins.agree(loop)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("how", ["load_state_dict", "swap of data"])
def test_the_average_in_the_model_for_an_evaluation(how: str, k: int, dtype: torch.dtype) -> None:
    """Averaged weights put in, evaluated and taken out again leave no trace.

    16-bit parameters go on from their masters.
    """

    def make() -> tuple[nn.Module, Batches]:
        model, batches = mlp()
        return model.to(dtype), [tuple(x.to(dtype) for x in batch) for batch in batches]

    def put(model: Any, values: dict[str, torch.Tensor]) -> None:
        if how == "load_state_dict":
            model.load_state_dict(values)
            return
        for name, p in model.named_parameters():
            p.data, values[name] = values[name], p.data

    def evaluating(on: bool) -> Any:
        def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
            found = []
            for step in range(4):
                found += plain_loop(1)(model, optimizer, [batches[step % 3]])
                average.update_parameters(model)
                if on:
                    own, averaged = weights(model), copy.deepcopy(average.module.state_dict())
                    put(model, averaged)
                    with torch.no_grad():
                        model(*batches[0])
                    put(model, own if how == "load_state_dict" else averaged)
            return found

        return loop

    assert compare(make, evaluating(True), k=k) == compare(make, evaluating(False), k=k)


def test_training_goes_on_from_the_average(twins: Twins) -> None:
    """The average loaded into the model becomes what later steps start from."""

    def loop(model: Any, optimizer: Any, batches: Batches) -> list[float]:
        average = AveragedModel(model)
        losses = []
        for step in range(3):
            losses += plain_loop(1)(model, optimizer, [batches[step]])
            average.update_parameters(model)
        model.load_state_dict(average.module.state_dict())
        for state in optimizer.state.values():  # the reference's masters are its own
            state["master"] = None
        for p in model.parameters() if optimizer.state else ():
            optimizer.state[p]["master"] = p.detach().clone()
        return losses + plain_loop(3)(model, optimizer, batches)

    twins.agree(loop)
