"""Accelerate's loop after our `prepare` has the bits of the same loop after its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError, UnsupportedError
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .framework_runs import example, nodes_ran, once
from .loops import assert_same, weights

UPDATES, STOP = 4, 2
PRECISIONS = ["no", pytest.param("bf16", marks=pytest.mark.sample(0))]
at = example("train_accelerate", "accelerate", "transformers")


@dataclass(frozen=True)
class Run:
    """What is left of a training: its losses by batch, the weights, and a loss in evaluation."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    evaluation: float
    folder: Path
    nodes_ran: bool


def train(ours: bool, precision: str, folder: Path, **checkpoint: Any) -> Run:
    """The example's loop: accumulation, clipping, a scheduler made before `prepare`."""
    accelerator = at.Accelerator(cpu=True, gradient_accumulation_steps=at.ACCUMULATION, mixed_precision=precision)
    model, data = at.new_model(1, 16), at.windows(16)
    losses = at.train(accelerator, model, at.prepare if ours else at.prepare_plain, data, UPDATES, **checkpoint)
    model.eval()
    tokens = data[:4][0]
    with torch.no_grad():
        evaluation = float(model(input_ids=tokens, labels=tokens).loss)
    found = Run([loss.item() for loss in losses], weights(model), evaluation, folder, ours and nodes_ran(model))
    if ours:
        hytrain_fx.close(model)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`run(kind, precision)`; "ours" saves half-way, "resumed" goes on from there."""

    @once
    def run(kind: str, precision: str) -> Run:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "resumed":
            return train(True, precision, folder, resume=(STOP, str(run("ours", precision).folder)))
        return train(kind == "ours", precision, folder, save=(STOP, str(folder)))

    return run


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fact", ["losses", "evaluation"])
def test_losses_are_those_of_the_plain_loop(run: Callable[..., Run], fact: str, precision: str) -> None:
    """Every batch has the plain loop's loss, and so has an evaluation afterwards."""
    plain, ours = run("plain", precision), run("ours", precision)
    assert getattr(ours, fact) == getattr(plain, fact)
    assert len(set(plain.losses)) == UPDATES * at.ACCUMULATION


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_those_of_the_plain_loop(run: Callable[..., Run], precision: str) -> None:
    """Weights have the plain loop's bits, and every gradient went through inserted nodes."""
    ours = run("ours", precision)
    assert ours.nodes_ran
    assert_same(ours.weights, run("plain", precision).weights)


def test_load_state_has_the_bits_of_never_having_stopped(run: Callable[..., Run]) -> None:
    """From what `save_state` wrote half-way, the plain loop's end is met."""
    plain, resumed = run("plain", "no"), run("resumed", "no")
    assert resumed.nodes_ran
    assert resumed.losses == plain.losses[STOP * at.ACCUMULATION :]
    assert_same(resumed.weights, plain.weights)


# --- what `prepare` hands on and refuses


def prepared(*others: Any, **options: Any) -> tuple[Any, ...]:
    model = torch.nn.Linear(4, 4)
    return at.prepare(at.Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters()), *others, **options)  # type: ignore[no-any-return]


def test_all_objects_come_back_prepared_in_their_order() -> None:
    """All are prepared by Accelerate, and the optimizer is ours inside."""
    model, optimizer, loader = prepared(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4))))
    assert isinstance(model, torch.nn.Linear)
    assert isinstance(optimizer.optimizer, OffloadedOptimizer)
    assert type(loader).__module__.startswith("accelerate")
    hytrain_fx.close(model)


def test_options_reach_compile() -> None:
    """Options of `prepare` are those of `hytrain_fx.compile`."""
    with pytest.raises(ConfigError, match="unknown option"):
        prepared(no_such=1)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator that would wrap the model is refused before anything is compiled."""
    from accelerate.utils import DistributedType

    monkeypatch.setattr(at.Accelerator, "distributed_type", DistributedType.MULTI_GPU)
    with pytest.raises(UnsupportedError, match="set up for MULTI_GPU"):
        prepared()
