"""Train a small GPT-2 with Lightning, plain and with hytrain_fx.

It reads the Python standard library's source.

    python examples/train_lightning.py          # CPU: about a minute

One callback makes the difference. The LightningModule is a plain one; automatic optimization,
accumulation, clipping, saving and resuming are Lightning's own.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import hytrain_fx
from hytrain_fx.integrations.lightning import Offload


class ByteGpt2(lightning.LightningModule):  # type: ignore[misc]
    """A byte-level GPT-2 with random weights, the same on every call."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        lightning.seed_everything(0, verbose=False)
        config = GPT2Config(
            vocab_size=256, n_embd=width, n_layer=layers, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0, use_cache=False
        )  # fmt: skip
        self.model: Any = GPT2LMHeadModel(config)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())  # not .item(): on a GPU the loop would wait for the device at every batch
        return loss

    def configure_optimizers(self) -> Any:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Explain(lightning.Callback):  # type: ignore[misc]
    """Prints what became of the updates. It stands before `Offload`, which closes the model."""

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        print(f"\n{hytrain_fx.explain(pl_module.model)}")


def windows(context: int) -> TensorDataset:
    """The standard library's top-level modules as bytes, cut into windows: int64 (context)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return TensorDataset(text[: len(text) // context * context].view(-1, context).long())


def train(module: ByteGpt2, data: TensorDataset, steps: int, resume_from: str | None = None, **others: Any) -> lightning.Trainer:
    """`steps` updates of two batches each, clipped to 1.0. `others` go to `lightning.Trainer`."""
    defaults: dict[str, Any] = {
        "max_steps": steps,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer = lightning.Trainer(**(defaults | others))
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=False), ckpt_path=resume_from)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    found = []
    for callbacks in ([], [Explain(), Offload()]):
        module = ByteGpt2(args.layers, args.width)
        if not callbacks:
            module.model.compile()  # or the plain run would not be compiled at all
        train(module, windows(args.context), args.steps, callbacks=callbacks)
        found.append(torch.stack(module.losses).unflatten(0, (-1, 2)).mean(1).tolist())

    print("\n step  plain loss  hytrain_fx")
    for step in sorted({*range(0, args.steps, max(1, args.steps // 10)), args.steps - 1}):
        print(f"{step:5}  {found[0][step]:10.6f}  {found[1][step]:10.6f}")


if __name__ == "__main__":
    main()
