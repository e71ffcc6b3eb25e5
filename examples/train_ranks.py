"""Two or more processes train one byte-level GPT with hytrain_fx, each on its own batches.

    torchrun --nproc-per-node 2 examples/train_ranks.py     # CPUs (gloo), or a GPU each (NCCL)

At the end every rank has the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed.nn.functional  # before there is a group: imported later, as by any torch.compile, it keeps the group for good
import torch.nn.functional as F
from torch import distributed

import hytrain_fx

sys.path.insert(0, str(Path(__file__).parent))
from train_gpt import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.manual_seed(rank)  # other weights on each rank: compile gives them all those of rank 0
    model = GPT(arguments.layers, arguments.width, heads=4, context=64).to(device)
    model, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8)
    draw = torch.Generator().manual_seed(rank)
    for step in range(arguments.steps):
        begins = torch.randint(0, len(text) - 65, (8,), generator=draw)
        batch = torch.stack([text[begin : begin + 65] for begin in begins]).long().to(device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f} on rank 0", flush=True)
    bits = torch.stack([p.detach().view(torch.int32).long().sum() for p in model.parameters()]).sum()
    sums = [torch.empty_like(bits) for _ in range(size)]
    distributed.all_gather(sums, bits)
    if rank == 0:
        alike = "all ranks have the same weights" if len({int(of) for of in sums}) == 1 else "ranks have different weights"
        print(f"{size} ranks: {alike}")
    hytrain_fx.close(model)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
