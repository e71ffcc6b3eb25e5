"""Train a small Llama with Hugging Face's Trainer, plain and with hytrain_fx.

It reads the Python standard library's source.

    python examples/train_trainer.py          # CPU: about a minute

`HyTrainer` is used instead of `Trainer`, and nothing else changes. Clipping, accumulation, warm-up,
decay groups, saving and resuming are the Trainer's own.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import hytrain_fx
from hytrain_fx.integrations.transformers import HyTrainer


class Windows(Dataset[dict[str, torch.Tensor]]):
    """The standard library's top-level modules as bytes, in windows.

    A window is input_ids and labels, each int64 (context).
    """

    def __init__(self, context: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self._windows = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._windows[index].long()
        return {"input_ids": window, "labels": window}


def new_model(layers: int, width: int) -> LlamaForCausalLM:
    """The same byte-level Llama with the same random weights on every call."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(folder: str, steps: int, **others: Any) -> TrainingArguments:
    """The training arguments of both runs."""
    defaults: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 10,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "optim": "adamw_torch",  # the update whose bits hytrain_fx has; the default is torch's fused kernel, with other last bits
        "logging_nan_inf_filter": False,  # would wait for the GPU between backward and step, and so take most of the overlap away
        "logging_steps": max(1, steps // 10),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**(defaults | others))


def losses(trainer: Trainer) -> dict[int, float]:
    """The logged training loss by step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    found: list[dict[int, float]] = []
    for kind in (Trainer, HyTrainer):
        model = new_model(args.layers, args.width)
        if kind is Trainer:
            model.compile()  # or the plain run would not be compiled at all
        with tempfile.TemporaryDirectory() as folder:
            trainer = kind(model=model, args=arguments(folder, args.steps), train_dataset=Windows(args.context))
            trainer.train()
        found.append(losses(trainer))

    print("\n step  Trainer     HyTrainer   (mean loss since the last row)")
    for step, plain in found[0].items():
        print(f"{step:5}  {plain:10.6f}  {found[1][step]:10.6f}")
    print(f"\n{hytrain_fx.explain(model)}")
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
