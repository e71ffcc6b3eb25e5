"""Train on the CPU, on the GPU, and on both with a share, and compare the losses by epoch.

    python examples/train_share.py mlp                    # scikit-learn's digit images
    python examples/train_share.py gpt --png share.png    # the standard library's bytes
    python examples/train_share.py gpt --share auto --layers 12 --width 768 --context 1024

    cpu     the plain loop, compiled by torch for the CPU
    device  hytrain_fx on the GPU, or on the CPU where there is none
    both    the same with a share of each batch on the CPU

The same weights and batches in all three, so the curves lie on one another: they differ by the
rounding of two devices, and of sums over parts of a batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train_gpt import GPT, MasterAdamW, stdlib_text
from train_mlp import digits, new_model

import hytrain_fx

Loss = Callable[[Any, tuple[Tensor, Tensor]], Tensor]
Epochs = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""The batches of one epoch, on the CPU: the same ones on every call."""


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A mean over all that the batch has."""
    x, y = batch
    logits: Tensor = model(x)
    return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: Epochs) -> float:
    """One epoch of the plain loop; its mean loss."""
    losses = []
    for batch in epoch():
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def shared(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: Epochs) -> float:
    """One epoch in parts: with `cpu_share=0` there is one part, on the device."""
    losses = []
    for batch in epoch():
        parts = []
        for part in hytrain_fx.share(batch, model):
            loss = part.weight * loss_of(part.model, part.batch)
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(parts)
    return sum(float(part) for parts in losses for part in parts) / len(losses)


def mlp_task(args: argparse.Namespace) -> tuple[Callable[[], nn.Module], Epochs]:
    """An MLP on images of digits."""
    images, labels = digits("cpu")
    whole = len(images) // args.batch * args.batch  # one shape, one compilation

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(images[:whole].split(args.batch), labels[:whole].split(args.batch), strict=True)

    return lambda: new_model(args.width, args.layers, "cpu"), epoch


def gpt_task(args: argparse.Namespace) -> tuple[Callable[[], nn.Module], Epochs]:
    """A small GPT on bytes of text."""
    text = stdlib_text()
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - args.context - 1, (args.steps, args.batch), generator=generator)

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for of in starts.tolist():
            windows = torch.stack([text[start : start + args.context + 1] for start in of]).long()
            yield windows[:, :-1], windows[:, 1:]

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = GPT(args.layers, args.width, args.heads, args.context).to(torch.bfloat16)
        return model

    return make, epoch


def run(way: str, make: Callable[[], nn.Module], epoch: Epochs, args: argparse.Namespace) -> tuple[list[float], float]:
    """Losses by epoch, and the seconds of the epochs after the first."""
    torch._dynamo.reset()
    model = make().to("cpu" if way == "cpu" else args.device)
    train = plain if way == "cpu" else shared
    if way == "cpu":
        model.compile()
        optimizer: torch.optim.Optimizer = MasterAdamW(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer = hytrain_fx.compile(model, optimizer, cpu_share=args.share if way == "both" else 0)
    losses = [train(model, optimizer, epoch)]
    begin_s = time.perf_counter()
    losses += [train(model, optimizer, epoch) for _ in tqdm(range(args.epochs - 1), desc=f"{way:6}", unit="epoch")]
    took_s = time.perf_counter() - begin_s
    if way == "both":
        print("\n".join(line for line in hytrain_fx.explain(model).details().splitlines() if "the CPU trains" in line))
    if way != "cpu":
        hytrain_fx.close(model)
    return losses, took_s


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """The three curves over one another."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss")
    for (way, values), style in zip(losses.items(), ("-", "--", ":"), strict=True):
        axes.plot(range(1, len(values) + 1), values, style, label=way)
    axes.legend()
    figure.savefig(path)


def share_of(text: str) -> float | str:
    """The option `cpu_share` from the command line."""
    return text if text == "auto" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("mlp", "gpt"))
    parser.add_argument("--share", type=share_of, default=0.25, help='a fraction of each batch, or "auto"')
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch of the GPT")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--png", type=Path, help="draw the curves into this file")
    parser.add_argument("--json", type=Path, help="write the losses into this file")
    args = parser.parse_args()
    make, epoch = {"mlp": mlp_task, "gpt": gpt_task}[args.task](args)

    losses: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    for way in ("cpu", "device", "both"):
        losses[way], seconds[way] = run(way, make, epoch, args)
    print("\nepoch" + "".join(f"{way:>12}" for way in losses))
    for number, of in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{number:5}" + "".join(f"{loss:12.6f}" for loss in of))
    print("s/epoch" + "".join(f"{seconds[way] / max(args.epochs - 1, 1):{10 if way == 'cpu' else 12}.3f}" for way in losses))
    if args.json:
        args.json.write_text(json.dumps(losses, indent=1), encoding="utf-8")
    if args.png:
        draw(losses, args.png)


if __name__ == "__main__":
    main()
