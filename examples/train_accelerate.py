"""Train a small Llama with Accelerate, plain and with hytrain_fx.

It reads the Python standard library's source.

    python examples/train_accelerate.py                              # CPU: about a minute
    python examples/train_accelerate.py --mixed-precision bf16

`prepare` of the integration is called instead of `accelerator.prepare`. Accumulation, clipping,
mixed precision, saving and resuming are Accelerate's own.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import hytrain_fx
from hytrain_fx.integrations.accelerate import prepare

ACCUMULATION = 2
BATCH = 4


def windows(context: int) -> TensorDataset:
    """The standard library's top-level modules as bytes, cut into windows: int64 (context)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return TensorDataset(text[: len(text) // context * context].view(-1, context).long())


def new_model(layers: int, width: int) -> Any:
    """The same byte-level Llama with the same random weights on every call."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=512, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def prepare_plain(accelerator: Accelerator, model: Any, *others: Any) -> tuple[Any, ...]:
    """What the other run calls: the model compiled by torch, and Accelerate's own `prepare`."""
    model.compile()
    prepared: tuple[Any, ...] = accelerator.prepare(model, *others)
    return prepared


def train(
    accelerator: Accelerator,
    model: Any,
    prepare_all: Callable[..., tuple[Any, ...]],
    data: TensorDataset,
    updates: int,
    *,
    after_update: Callable[[int], None] | None = None,
    resume: tuple[int, str] | None = None,
) -> list[torch.Tensor]:
    """The user's loop; gives the loss of each batch.

    after_update    called with the number of updates: to evaluate, or to save
    resume          after how many updates, and the checkpoint's folder
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    loader = DataLoader(data, batch_size=BATCH, shuffle=False)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, updates)
    model, optimizer, loader, scheduler = prepare_all(accelerator, model, optimizer, loader, scheduler)
    done, losses = 0, []
    if resume is not None:
        done = resume[0]
        accelerator.load_state(resume[1])
        loader = accelerator.skip_first_batches(loader, done * ACCUMULATION)
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                done += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())  # not .item(): on a GPU the loop would wait for the device at every batch
        if after_update is not None and accelerator.sync_gradients:
            after_update(done)
        if done == updates:
            break
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], default="no")
    args = parser.parse_args()

    found = []
    for prepare_all in (prepare_plain, prepare):
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, mixed_precision=args.mixed_precision)
        model = new_model(args.layers, args.width)
        losses = train(accelerator, model, prepare_all, windows(args.context), args.updates)
        found.append(torch.stack(losses).unflatten(0, (-1, ACCUMULATION)).mean(1).tolist())

    print("\nupdate  plain loss  hytrain_fx")
    for update in sorted({*range(0, args.updates, max(1, args.updates // 10)), args.updates - 1}):
        print(f"{update:6}  {found[0][update]:10.6f}  {found[1][update]:10.6f}")
    print(f"\n{hytrain_fx.explain(model)}")
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
