"""A pipeline of two or more processes trains one byte-level GPT; hytrain_fx updates each stage.

    torchrun --nproc-per-node 2 examples/train_pipeline.py     # CPUs (gloo), or a GPU each (NCCL)

Each process has one stage: some blocks, the first one the embeddings, the last one the head. The
schedule is torch's 1F1B. While a stage waits for the others, its updates run. Gradients are clipped
by the norm over all stages.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import hytrain_fx

sys.path.insert(0, str(Path(__file__).parent))
from train_gpt import GPT

CONTEXT = 64


class Stage(nn.Module):
    """Blocks `first` to `last` of a GPT, under their own names there."""

    def __init__(self, model: GPT, first: int, last: int) -> None:
        super().__init__()
        is_first, is_last = first == 0, last == len(model.blocks)
        self.token, self.position = (model.token if is_first else None), (model.position if is_first else None)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, last)})
        self.norm, self.head = (model.norm if is_last else None), (model.head if is_last else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        logits: Tensor = x if self.norm is None or self.head is None else self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    whole = GPT(arguments.layers, arguments.width, heads=4, context=CONTEXT)
    cut = [arguments.layers * i // size for i in range(size + 1)]
    model = Stage(whole, cut[rank], cut[rank + 1]).to(device)
    stage = PipelineStage(model, rank, size, device)
    schedule = Schedule1F1B(stage, arguments.micro_batches, loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3), pipeline=schedule)

    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(0)  # the same batches everywhere; the first stage takes x, the last one y
    for step in range(arguments.steps):
        begins = torch.randint(0, len(text) - CONTEXT - 1, (2 * arguments.micro_batches,), generator=draw)
        batch = torch.stack([text[begin : begin + CONTEXT + 1] for begin in begins]).long().to(device)
        losses: list[Tensor] = []
        x, y = ([batch[:, :-1].contiguous()] if stage.is_first else []), batch[:, 1:].contiguous()
        for_loss: dict[str, Any] = {"target": y, "losses": losses} if stage.is_last else {}
        schedule.step(*x, **for_loss)
        norm = hytrain_fx.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if stage.is_last and step % 5 == 4:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}, norm over {size} stages {norm.item():.3f}", flush=True)
    hytrain_fx.close(model)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
