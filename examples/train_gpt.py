"""Train a byte-level GPT with the plain loop and with hytrain_fx, and compare the losses.

It reads the Python standard library's source.

    python examples/train_gpt.py                                          # CPU: about a minute
    python examples/train_gpt.py --layers 24 --width 2048 --context 1024  # a GPU; same file

Both runs call the same `train`, start from the same weights and see the same batches. In 16-bit the
plain loop keeps fp32 master weights, because that is the training hytrain_fx does: plain AdamW on
16-bit parameters would round its states to 16 bits.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import hytrain_fx

BYTES = 256


class Block(nn.Module):
    """Pre-norm attention and MLP; (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class GPT(nn.Module):
    """Bytes in (batch, time), logits of the next byte out (batch, time, 256)."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class MasterAdamW(torch.optim.AdamW):
    """AdamW on fp32 copies of the parameters, or on the parameters where they are fp32."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        self.weights = list(params)
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        super().__init__(self.masters, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None


def batches(text: Tensor, steps: int, batch: int, context: int, device: str) -> Iterator[Tensor]:
    """`steps` random windows (batch, context + 1) of the text, the same ones on every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
        yield windows.long().to(device)


def train(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Tensor], steps: int) -> list[float]:
    """The user's loop. It does not know which optimizer it has. Returns the loss of each step."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses = []
    for windows in (bar := tqdm(data, total=steps, desc=f"{name:10}", unit="step")):
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # not .item(): on a GPU the loop would wait for the device at every step
        if len(losses) % 10 == 0:
            bar.set_postfix(loss=f"{losses[-1].item():.4f}", refresh=False)
    return [loss.item() for loss in losses]


def stdlib_text() -> Tensor:
    """The standard library's top-level modules as bytes (uint8)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def compare(plain: list[float], ours: list[float]) -> str:
    """The two loss curves side by side at about ten steps, and their largest difference."""
    shown = sorted({*range(0, len(plain), max(1, len(plain) // 10)), len(plain) - 1})
    rows = [f"{step:5}  {plain[step]:10.6f}  {ours[step]:10.6f}" for step in shown]
    largest = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    return "\n".join([" step  plain loss  hytrain_fx", *rows, f"largest difference in {len(plain)} steps: {largest:.2e}"])


def parse_args() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if gpu else "float32")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    text = stdlib_text()

    def new_model() -> GPT:
        torch.manual_seed(0)
        return GPT(args.layers, args.width, args.heads, args.context).to(args.device, getattr(torch, args.dtype))

    def new_batches() -> Iterator[Tensor]:
        return batches(text, args.steps, args.batch, args.context, args.device)

    model = new_model()
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} M parameters in {args.dtype} on {args.device}, {len(text) / 1e6:.1f} MB of text; each run compiles first")

    model.compile()
    started = time.perf_counter()
    plain = train("plain", model, MasterAdamW(model.parameters(), lr=args.lr), new_batches(), args.steps)
    plain_s = time.perf_counter() - started
    del model

    model = new_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = hytrain_fx.compile(model, optimizer)
    started = time.perf_counter()
    ours = train("hytrain_fx", model, optimizer, new_batches(), args.steps)
    ours_s = time.perf_counter() - started

    print(f"\n{compare(plain, ours)}")
    print(f"with compilation, whose start the first run pays: plain {plain_s:.1f} s, hytrain_fx {ours_s:.1f} s (not step times)\n")
    print(hytrain_fx.explain(model))
    hytrain_fx.close(model)


if __name__ == "__main__":
    main()
