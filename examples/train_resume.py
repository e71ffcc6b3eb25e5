"""Train a small GPT-2 with checkpoints that survive a kill at any moment.

Start it, kill it, start it again with the same command, until it is done: it goes on where it was
killed.

    python examples/train_resume.py --checkpoint run.pt          # CPU: half a minute

`save_whole` is all there is to it. A checkpoint is written beside the previous one and takes its
name when every byte of it is on the disk. `state_dict()` sees to it that weights and states
belong to the same step: it waits for updates that are under way. With OMP_NUM_THREADS=1 the weights
at the end have the bits of a run that was never killed; sums over several threads may differ in the
last ones.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hytrain_fx

BATCH = 4


def save_whole(path: Path, values: Any) -> None:
    """`torch.save`, but `path` always has a whole checkpoint: the previous one or the new one.

    That also holds after a power failure.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(values, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too, is to be on the disk
    os.close(folder)


def windows(context: int, device: str) -> torch.Tensor:
    """The standard library's top-level modules as bytes, in windows: int64 (windows, context)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[: len(text) // context * context].view(-1, context).long().to(device)


def fingerprint(model: torch.nn.Module) -> str:
    """The same for the same bits in every weight."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_embd=args.width, n_layer=args.layers, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0, use_cache=False
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config).to(args.device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = hytrain_fx.compile(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])  # dropout's; on a GPU torch.cuda.get_rng_state() as well
        step = saved["step"]
        print(f"goes on after step {step}", flush=True)

    data = windows(args.context, args.device)
    while step < args.steps:
        tokens = data[step * BATCH % (len(data) - BATCH) :][:BATCH]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % args.every == 0:
            states = {name: part.state_dict() for name, part in parts.items()}
            save_whole(args.checkpoint, {**states, "rng": torch.get_rng_state(), "step": step})
            print(f"step {step}: loss {loss.item():.6f}, saved", flush=True)

    print(f"weights after {step} steps: {fingerprint(model)}")
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
