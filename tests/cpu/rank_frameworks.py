"""Frameworks that several processes run, with hytrain_fx and with DistributedDataParallel."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hytrain_fx

from .framework_runs import Tiny, example, rounded_root
from .loops import HandAdam, weights
from .rank_loops import AveragedByHand, Found, clipped_in_shards

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


MAX_NORM = 0.05


def lightning_module(at: Any, case: str, ours: bool, size: int) -> Any:
    """The example's module, which notes losses of training and validation.

    case   "bf16-true": without hytrain_fx its optimizer has fp32 masters, too
           "clipped": without hytrain_fx each batch's gradients are averaged by hand
    """

    class Module(at.ByteGpt2):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(1, 16)
            self.model = Tiny(dropout=0.0)
            self.gradients = AveragedByHand(self.model, size)
            if not ours:
                self.model.compile()

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(batch)
            self.log("loss", loss, sync_dist=True)  # a collective of the loop's own
            return loss

        def validation_step(self, batch: list[torch.Tensor]) -> None:
            self.losses.append(self.model(input_ids=batch[0], labels=batch[0]).loss.detach())

        def configure_optimizers(self) -> Any:
            if case != "bf16-true":
                return super().configure_optimizers()
            return (torch.optim.AdamW if ours else HandAdam)(self.model.parameters(), lr=1e-3, weight_decay=0.1)

    class ByHand(Module):
        def on_after_backward(self) -> None:
            self.gradients.average()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.gradients.put_back()

        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            assert clipped_in_shards(size, self.model, MAX_NORM) > MAX_NORM

    return ByHand() if case == "clipped" and not ours else Module()


@rounded_root()
def lit(case: str, folder: Path, rank: int, size: int) -> list[Found]:
    """Lightning, plain and ours: epochs of two steps, a validation and a checkpoint after each.

    Then each goes on from its own first checkpoint.

    case   a precision, or "clipped": two batches a step, and clipped
    """
    at = example("train_lightning", "lightning", "transformers")
    pl = at.lightning.pytorch
    data = torch.utils.data.Subset(at.windows(16), range(48))
    loader = partial(torch.utils.data.DataLoader, batch_size=4)
    clipped = case == "clipped"
    batches, found = 2 if clipped else 1, []

    class Unwrapped(pl.strategies.DDPStrategy):  # type: ignore[misc, name-defined]
        def configure_ddp(self) -> None:
            pass

    for resumed, ours in itertools.product((False, True), (False, True)):
        torch._dynamo.reset()
        _as_torchrun_says(rank, size)  # Lightning takes some of it away after each fit
        own = folder / f"ours={ours}"
        module = lightning_module(at, case, ours, size)
        saving = pl.callbacks.ModelCheckpoint(own, f"{resumed}-{{step}}", save_top_k=-1, save_on_train_epoch_end=True)
        trainer = at.lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=size, strategy=Unwrapped() if clipped and not ours else "ddp",
            precision="32-true" if clipped else case, accumulate_grad_batches=batches, gradient_clip_val=MAX_NORM if clipped else None,
            limit_train_batches=STOP * batches, limit_val_batches=1, num_sanity_val_steps=0,
            callbacks=[saving, *([at.Offload()] if ours else [])], logger=False, enable_model_summary=False, enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(module, loader(data), loader(torch.utils.data.Subset(data, range(16))),
                    ckpt_path=own / f"False-step={STOP}.ckpt" if resumed else None)
        torch.distributed.barrier()
        saved = torch.load(own / f"{resumed}-step={STEPS}.ckpt", weights_only=False)
        found.append({"weights": weights(module), "losses": [float(loss) for loss in module.losses],
                      "saved": saved["state_dict"], "states": saved["optimizer_states"][0]["state"]})
    return found


def lit_cases(folder: Path, rank: int, size: int) -> dict[str, list[Found]]:
    """Each case, in one pair of processes: Lightning's imports take longer than a fit."""
    return {case: lit(case, folder / case, rank, size) for case in ("32-true", "bf16-true", "bf16-mixed", "clipped")}


def lit_fails(rank: int, size: int) -> None:
    """A fit with hytrain_fx, in which the last rank fails after its second step."""
    at = example("train_lightning", "lightning", "transformers")
    _as_torchrun_says(rank, size)

    class Fails(at.lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            if number == 1 and rank == size - 1:
                raise ZeroDivisionError("of this rank")

    at.train(lightning_module(at, "32-true", True, size), at.windows(16), STEPS, accelerator="cpu", devices=size, accumulate_grad_batches=1,
             callbacks=[Fails(), at.Offload()])
