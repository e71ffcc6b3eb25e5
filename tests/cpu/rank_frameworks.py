"""Frameworks that several processes run, with hytrain_fx and with DistributedDataParallel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import hytrain_fx

from .framework_runs import Tiny, example, rounded_root
from .loops import weights
from .rank_loops import Found

STEPS, STOP = 4, 2


def _as_torchrun_says(rank: int, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size), ACCELERATE_USE_CPU="true")


@rounded_root()
def trainer(folder: Path, rank: int, size: int) -> list[Found]:
    """Hugging Face's Trainer: an evaluation and a checkpoint; resumed.

    One batch a step: of several DDP averages the sum, and hytrain_fx each.
    """
    _as_torchrun_says(rank, size)
    at = example("train_trainer", "transformers", "accelerate")
    found = []
    for kind in ("plain", "ours", "resumed"):
        torch._dynamo.reset()
        model, data = Tiny(), at.Windows(16)
        if kind == "plain":
            model.compile()
        own = folder / kind
        arguments = at.arguments(str(own), STEPS, max_grad_norm=0.0, gradient_accumulation_steps=1, logging_steps=1, use_cpu=True,
                                 eval_strategy="steps", eval_steps=STOP, save_strategy="steps", save_steps=STOP)
        made: Any = (at.Trainer if kind == "plain" else at.HyTrainer)(
            model=model, args=arguments, train_dataset=data, eval_dataset=torch.utils.data.Subset(data, range(8)))
        made.train(resume_from_checkpoint=str(folder / "plain" / f"checkpoint-{STOP}") if kind == "resumed" else None)
        losses = [entry.get("loss", entry.get("eval_loss")) for entry in made.state.log_history]
        found.append({"weights": weights(model), "losses": losses})
        if kind != "plain":
            hytrain_fx.close(model)
        torch.distributed.barrier()
        found[-1]["states"] = torch.load(own / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["state"]
    return found


@rounded_root()
def accelerated(folder: Path, rank: int, size: int) -> list[Found]:
    """Accelerate's loop: a scheduler, a saved state."""
    _as_torchrun_says(rank, size)
    at = example("train_accelerate", "accelerate", "transformers")
    found = []
    for ours in (False, True):
        torch._dynamo.reset()
        accelerator = at.Accelerator(cpu=True, gradient_accumulation_steps=1)
        accelerator.clip_grad_norm_ = lambda *_: None  # the norm of shards has other last bits than that of the whole
        model, data = Tiny(dropout=0.0), at.windows(16)
        own = str(folder / str(ours))
        losses = at.train(accelerator, model, at.prepare if ours else at.prepare_plain, data, STEPS,
                          after_update=lambda done, of=accelerator, own=own: of.save_state(own))
        found.append({"weights": weights(model), "losses": [float(loss) for loss in losses]})
        if ours:
            hytrain_fx.close(model)
        torch.distributed.barrier()
        found[-1]["states"] = torch.load(Path(own) / "optimizer.bin", weights_only=True)["state"]
    return found
