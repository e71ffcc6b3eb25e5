"""The loops of the Trainer, Accelerate and Lightning have the bits of the plain loop.

They are the loops of examples/, also resumed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hytrain_fx
from hytrain_fx.runtime.arithmetic import square_root

from .loops import assert_same, weights
from .models import mlp

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def rounded_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's AdamW with its square root correctly rounded, as ours is (MKL's is not)."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", square_root, raising=False)
        yield


def example(name: str, *needs: str) -> Any:
    """examples/`name`.py as a module; skips where a package that it needs is missing."""
    for package in needs:
        pytest.importorskip(package, reason=f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def overlapped(model: nn.Module) -> bool:
    """Whether every gradient went through the inserted nodes."""
    found = hytrain_fx.explain(model)
    return found.node_runs["cpu_step"] > 0 and not found.not_offloaded


def test_a_torch_compile_around_the_model_keeps_our_graphs() -> None:
    """torch.compile(model) of a compiled model keeps the plain bits, and inserted nodes run."""
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
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
        results.append(weights(model))
        if ours:
            assert overlapped(model)
            hytrain_fx.close(model)
    assert_same(results[1], results[0])


# --- transformers.Trainer


@pytest.fixture(scope="module")
def trainer_example() -> Any:
    return example("train_trainer", "transformers", "accelerate")


def run_trainer(at: Any, kind: str, folder: Path, **others: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The Trainer and the weights after 6 updates of two batches each.

    `resume`: from the last checkpoint in the folder.
    """
    torch._dynamo.reset()
    model = at.new_model(1, 16)
    if kind == "Trainer":
        model.compile()
    resume = others.pop("resume", None)
    others = {"warmup_steps": 2, "logging_steps": 1, "use_cpu": True, "eval_strategy": "steps", "eval_steps": 3, **others}
    data, few = at.Windows(16), torch.utils.data.Subset(at.Windows(16), range(8))
    trainer = getattr(at, kind)(model=model, args=at.arguments(str(folder), 6, **others), train_dataset=data, eval_dataset=few)
    trainer.train(resume_from_checkpoint=resume)
    found = weights(model)
    if kind == "HyTrainer":
        assert overlapped(model)
        hytrain_fx.close(model)
    return trainer, found


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@pytest.fixture(scope="module")
def plain_trainer(trainer_example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, torch.Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", square_root, raising=False)
        torch.set_num_threads(1)  # as in the tests, whose own fixture runs later
        return run_trainer(trainer_example, "Trainer", tmp_path_factory.mktemp("plain"))


@pytest.mark.sample(0)
def test_the_trainer_with_its_defaults(trainer_example: Any, plain_trainer: Any, tmp_path: Path) -> None:
    """The Trainer with its defaults has the plain weights, losses and norms.

    It clips to 1.0, accumulates, warms up, has decay groups, evaluates, and uses the fused AdamW.

    `torch_compile=True`, which compiles around the model, changes nothing.
    """
    plain, expected = plain_trainer
    options: dict[str, Any] = {"optim": "adamw_torch_fused", "logging_nan_inf_filter": True, "torch_compile": True}
    trainer, found = run_trainer(trainer_example, "HyTrainer", tmp_path, **options)
    assert_same(found, expected)
    assert len(set(logged(plain, "loss"))) == 6
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert logged(trainer, key) == logged(plain, key) != []
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.sample(0)
def test_the_trainer_under_autocast(trainer_example: Any, tmp_path: Path) -> None:
    """With bf16=True, which puts autocast into the model's forward, bits and losses are plain."""
    plain, expected = run_trainer(trainer_example, "Trainer", tmp_path, bf16=True, eval_strategy="no")
    trainer, found = run_trainer(trainer_example, "HyTrainer", tmp_path, bf16=True, eval_strategy="no")
    assert_same(found, expected)
    assert logged(trainer, "loss") == logged(plain, "loss")


def test_the_trainer_resumes(trainer_example: Any, plain_trainer: Any, tmp_path: Path) -> None:
    """The Trainer resumes from step 3 to the bits of the run that was not stopped.

    load_best_model_at_end gives the weights of the best.
    """
    plain, expected = plain_trainer
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    # The "best" is then the first checkpoint, not the last.
    worst: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    _, found = run_trainer(trainer_example, "HyTrainer", tmp_path, **saving, **worst)
    saved = pytest.importorskip("safetensors.torch").load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert_same({name: value for name, value in found.items() if name in saved}, saved)
    assert not torch.equal(found["lm_head.weight"], expected["lm_head.weight"])
    (tmp_path / "checkpoint-6").rename(tmp_path / "later")
    trainer, found = run_trainer(trainer_example, "HyTrainer", tmp_path, resume=True, **saving)
    assert_same(found, expected)
    assert logged(trainer, "loss") == logged(plain, "loss")


# --- Accelerate


def test_accelerate_trains_and_resumes(tmp_path: Path) -> None:
    """Accelerate has the bits of the plain loop, also with load_state elsewhere after 3 updates.

    The loop uses accumulate, clip_grad_norm_ and a scheduler.
    """
    at = example("train_accelerate", "accelerate", "transformers")
    data = at.windows(16)

    def run(ours: bool, **checkpoint: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        accelerator = at.Accelerator(cpu=True, gradient_accumulation_steps=at.ACCUMULATION)
        model = at.new_model(1, 16)
        losses = at.train(accelerator, model, hytrain_fx.compile if ours else at.plain, data, 6, **checkpoint)
        found = weights(model)
        if ours:
            assert overlapped(model)
            hytrain_fx.close(model)
        return [loss.item() for loss in losses], found

    losses, expected = run(False)
    found_losses, found = run(True, save=(3, str(tmp_path)))
    assert (len(set(losses)), found_losses) == (12, losses)
    assert_same(found, expected)
    found_losses, found = run(True, resume=(3, str(tmp_path)))
    assert found_losses == losses[6:]
    assert_same(found, expected)


# --- Lightning


@pytest.mark.sample(0)
def test_lightning_trains_and_resumes(tmp_path: Path) -> None:
    """Lightning has the bits of the plain module, and each goes on from the other's file.

    Optimization is automatic, by closures, with accumulation and clipping.
    """
    at = example("train_lightning", "lightning", "transformers")
    data = at.windows(16)

    def run(ours: bool, steps: int, **others: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        module = at.ByteGpt2(1, 16, ours=ours)
        at.train(module, data, steps, accelerator="cpu", limit_train_batches=8, **others)
        found = weights(module)
        if ours:
            assert overlapped(module.model)
            hytrain_fx.close(module.model)
        return [loss.item() for loss in module.losses], found

    def saving(name: str) -> dict[str, Any]:
        return {"enable_checkpointing": True, "default_root_dir": tmp_path / name}

    (losses, expected), (found_losses, found) = (run(ours, 4, **saving(str(ours))) for ours in (False, True))
    assert (len(set(losses)), found_losses) == (8, losses)
    assert_same(found, expected)
    of_plain, of_ours = (next((tmp_path / str(ours)).rglob("*.ckpt")) for ours in (False, True))
    (losses, expected), (found_losses, found) = run(False, 7, resume_from=str(of_ours)), run(True, 7, resume_from=str(of_plain))
    assert len(losses) > 3
    assert found_losses == losses
    assert_same(found, expected)
