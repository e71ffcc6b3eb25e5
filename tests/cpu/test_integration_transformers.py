"""HyTrainer has the bits of the Trainer, also resumed and under autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hytrain_fx
from hytrain_fx.errors import ConfigError, HytrainWarning, UnsupportedError
from hytrain_fx.session.optimizer import OffloadedOptimizer

from .framework_runs import example, nodes_ran, once
from .loops import assert_same, weights
from .models import mlp

STEPS, STOP = 4, 2
MAX_NORM = 0.5
PRECISIONS = ["fp32", pytest.param("bf16", marks=pytest.mark.sample(0))]
at = example("train_trainer", "transformers", "accelerate")


@dataclass(frozen=True)
class Run:
    """What is left of a training: weights, what was logged, and its folder."""

    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    folder: Path
    nodes_ran: bool

    def logged(self, key: str) -> list[float]:
        return [entry[key] for entry in self.log if key in entry]

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"checkpoint-{step}" / "model.safetensors")


def train(kind: str, precision: str, folder: Path, resume: Path | None = None) -> Run:
    """Four updates of two batches each: warm-up, decay groups, clipping, two evaluations.

    The checkpoint whose loss is the *highest* is loaded at the end, so not the last.
    """
    model = at.new_model(1, 16)
    if kind == "Trainer":
        model.compile()
    data = at.Windows(16)
    arguments = at.arguments(
        str(folder), STEPS, bf16=precision == "bf16", warmup_steps=2, max_grad_norm=MAX_NORM, logging_steps=1, use_cpu=True,
        eval_strategy="steps", eval_steps=STOP, save_strategy="steps", save_steps=STOP, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
        **({"optim": "adamw_torch_fused", "logging_nan_inf_filter": True, "torch_compile": True} if kind == "HyTrainer" else {}),
    )  # fmt: skip
    trainer = getattr(at, kind)(model=model, args=arguments, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(8)))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    ran = kind == "HyTrainer" and nodes_ran(model)
    found = Run(weights(model), trainer.state.log_history, folder, ran)
    if kind == "HyTrainer":
        hytrain_fx.close(model)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`run(kind, precision)`; "resumed" goes on from HyTrainer's checkpoint half-way."""

    @once
    def run(kind: str, precision: str) -> Run:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "resumed":
            return train("HyTrainer", precision, folder, run("HyTrainer", precision).folder / f"checkpoint-{STOP}")
        return train(kind, precision, folder)

    return run


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("key", ["loss", "grad_norm", "learning_rate", "eval_loss"])
def test_the_log_is_the_trainers(run: Callable[..., Run], key: str, precision: str) -> None:
    """Losses, norms before clipping, rates and evaluations are logged with the same bits.

    HyTrainer has the Trainer's defaults besides: fused AdamW, the filter of losses. And
    `torch_compile=True`, which compiles around the model, changes nothing.
    """
    plain, ours = run("Trainer", precision), run("HyTrainer", precision)
    assert ours.logged(key) == plain.logged(key)
    assert len(set(plain.logged(key))) > 1
    assert max(plain.logged("grad_norm")) > MAX_NORM


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("step", [STOP, STEPS])
def test_checkpoints_hold_the_trainers_weights(run: Callable[..., Run], step: int, precision: str) -> None:
    """Saved weights have the Trainer's bits, and every gradient went through inserted nodes."""
    plain, ours = run("Trainer", precision), run("HyTrainer", precision)
    assert ours.nodes_ran
    assert_same(ours.saved(step), plain.saved(step))


def test_the_best_checkpoint_is_loaded_at_the_end(run: Callable[..., Run]) -> None:
    """load_best_model_at_end gives the weights of the best checkpoint, not the last."""
    ours = run("HyTrainer", "fp32")
    best, last = ours.saved(STOP), ours.saved(STEPS)
    assert_same({name: ours.weights[name] for name in best}, best)
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert_same(ours.weights, run("Trainer", "fp32").weights)


def test_resuming_has_the_bits_of_never_having_stopped(run: Callable[..., Run]) -> None:
    """From the checkpoint half-way the Trainer's last weights and losses are met."""
    plain, resumed = run("Trainer", "fp32"), run("resumed", "fp32")
    assert resumed.nodes_ran
    assert_same(resumed.saved(STEPS), plain.saved(STEPS))
    assert resumed.logged("loss") == plain.logged("loss")


# --- what is not trained


def trainer_of(folder: Path, **others: Any) -> Any:
    return at.HyTrainer(model=at.new_model(1, 16), args=at.arguments(str(folder), 1, use_cpu=True), **others)


def test_an_optimizer_that_was_given_is_offloaded(tmp_path: Path) -> None:
    """`optimizers=(optimizer, None)` is offloaded, once; a second train() finds the same."""
    model = at.new_model(1, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    trainer = at.HyTrainer(model=model, args=at.arguments(str(tmp_path), 1, use_cpu=True), optimizers=(optimizer, None))
    found = trainer.create_optimizer()
    assert isinstance(found, OffloadedOptimizer)
    assert found.param_groups is optimizer.param_groups
    assert trainer.create_optimizer() is trainer.optimizer is found
    trainer.optimizer = trainer.accelerator.prepare(found)
    assert trainer.create_optimizer() is trainer.optimizer
    hytrain_fx.close(model)


def test_options_reach_compile(tmp_path: Path) -> None:
    """`compile_options` are those of `hytrain_fx.compile`."""
    with pytest.raises(ConfigError, match="unknown option"):
        trainer_of(tmp_path, compile_options={"no_such": 1}).create_optimizer()


def test_several_gpus_are_refused(tmp_path: Path) -> None:
    """Where the Trainer would use DataParallel, the error says how to show one GPU."""
    trainer = trainer_of(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES=0"):
        trainer.create_optimizer()


def test_a_filter_that_waits_for_the_gpu_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, `logging_nan_inf_filter=True` costs most of the overlap."""
    trainer = trainer_of(tmp_path)
    trainer.args.logging_nan_inf_filter = True
    monkeypatch.setattr(type(trainer.args), "device", property(lambda self: torch.device("cuda")))
    with pytest.warns(HytrainWarning, match="logging_nan_inf_filter=False"):
        trainer.create_optimizer()
    hytrain_fx.close(trainer.model)


def test_a_torch_compile_around_the_model_keeps_our_graphs() -> None:
    """torch.compile(model) of a compiled model keeps the plain bits, and inserted nodes run."""

    @once
    def trained(ours: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model, batches = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), foreach=False)
        if ours:
            model, optimizer = hytrain_fx.compile(model, optimizer, k=1)
        else:
            model.compile()
        around = torch.compile(model) if ours else model
        for (x,) in batches * 2:
            around(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = weights(model)
        if ours:
            assert nodes_ran(model)
            hytrain_fx.close(model)
        return found

    assert_same(trained(True), trained(False))
