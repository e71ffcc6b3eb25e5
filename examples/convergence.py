"""Train the GPT of train_gpt.py for a thousand steps, plain and with hytrain_fx.

It trains in bf16 and in fp16, and draws the losses.

    python examples/convergence.py --png convergence.png                    # CPU: some minutes
    python examples/convergence.py --layers 24 --width 2048 --context 1024  # GPU: 1.2 G parameters
    python examples/convergence.py --llama --layers 24 --width 2048 --heads 16 --context 1024
        --gpu-states 0                                                  # all states on the host

    bf16    16-bit parameters; the plain loop keeps fp32 masters by hand (MasterAdamW)
    fp16    fp32 parameters under fp16 autocast, with torch.amp.GradScaler

On a GPU both curves have the same bits with --deterministic; without it kernels add in another
order each time, and training is chaotic. On a CPU they part slowly: MKL's square root, which
torch's AdamW uses there, is not correctly rounded. The printed differences say how far.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train_gpt import BYTES, GPT, MasterAdamW, batches, stdlib_text

import hytrain_fx

SMOOTHED_STEPS = 20
Update = Callable[[Tensor], None]


def bf16(model: nn.Module, optimizer: torch.optim.Optimizer, _device: str) -> Update:
    """Backward and step, unchanged."""

    def update(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def fp16(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> Update:
    """Backward and step through a GradScaler; steps whose gradients overflow are skipped."""
    scaler = torch.amp.GradScaler(device)

    def update(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return update


class Llama(nn.Module):
    """A Llama of transformers over bytes: (batch, time) in, logits of the next byte out.

    The logits are (batch, time, 256).
    """

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": width, "intermediate_size": 8 * width // 3, "num_hidden_layers": layers, "num_attention_heads": heads}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=BYTES, max_position_embeddings=context, use_cache=False, **sizes))

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=text).logits
        return logits


def train(
    name: str, model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterator[Tensor], precision: str, args: argparse.Namespace
) -> list[float]:
    """One loop for all four runs. Returns the loss of each step."""
    update = {"bf16": bf16, "fp16": fp16}[precision](model, optimizer, args.device)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    losses = []
    for windows in tqdm(data, total=args.steps, desc=f"{precision} {name:10}", unit="step"):
        with torch.autocast(args.device, torch.float16, enabled=precision == "fp16"):
            logits = model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        update(loss)
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def both(precision: str, text: Tensor, args: argparse.Namespace) -> dict[str, list[float]]:
    """The losses of the plain loop and of hytrain_fx, from the same weights on the same batches."""
    losses = {}
    for name in ("plain", "hytrain_fx"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        kind_of_model = Llama if args.llama else GPT
        model = kind_of_model(args.layers, args.width, args.heads, args.context).to(args.device, dtype)
        if name == "plain":
            model.compile()
            kind = MasterAdamW if precision == "bf16" else torch.optim.AdamW
            optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=args.lr)
        else:
            places = {} if args.gpu_states is None else {"gpu_states": args.gpu_states}
            _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=args.lr), **places)
        data = batches(text, args.steps, args.batch, args.context, args.device)
        losses[name] = train(name, model, optimizer, data, precision, args)
        if name != "plain":
            hytrain_fx.close(model)
    return losses


def difference(losses: dict[str, list[float]]) -> str:
    """How far the two curves are from each other, and how far each falls."""
    plain, ours = losses["plain"], losses["hytrain_fx"]
    equal = next((step for step, (a, b) in enumerate(zip(plain, ours, strict=True)) if a != b), len(plain))
    last = [statistics.mean(curve[-100:]) for curve in (plain, ours)]
    largest = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    return (f"first {equal} losses equal to the bit, largest difference {largest:.2e}; from {plain[0]:.3f} to {last[0]:.4f} (plain) and "
            f"{last[1]:.4f} (hytrain_fx), means of the last 100 steps")


def draw(results: dict[str, dict[str, list[float]]], path: Path, model: str) -> None:
    """One panel a precision: both curves, smoothed over 20 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axis, (precision, losses) in zip(axes, results.items(), strict=True):
        for (name, curve), width in zip(losses.items(), (4, 1), strict=True):
            smooth = [statistics.mean(curve[max(0, i - SMOOTHED_STEPS + 1) : i + 1]) for i in range(len(curve))]
            axis.plot(smooth, label=name, linewidth=width, alpha=1 / width**0.75)
        axis.set(title=f"{precision}: {model}, bytes of Python's standard library", xlabel="step", ylabel="loss, nats a byte")
        axis.legend()
    figure.savefig(path)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("width", 128), ("heads", 4), ("context", 128), ("batch", 8), ("steps", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["bf16", "fp16"], nargs="+", default=["bf16", "fp16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--llama", action="store_true", help="a Llama of transformers instead of the GPT")
    parser.add_argument("--gpu-states", type=float, default=None, help="share of the states on the GPU (default: solved)")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    parser.add_argument("--png", type=Path, default=None, help="draw the curves here (needs matplotlib)")
    parser.add_argument("--json", type=Path, default=None, help="write all losses here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.use_deterministic_algorithms(args.deterministic)
    text = stdlib_text()
    results = {}
    for precision in args.precision:
        results[precision] = both(precision, text, args)
        print(f"{precision}: {difference(results[precision])}", flush=True)
        if args.json:  # each precision when it is there: on a large model an hour may lie between them
            args.json.write_text(json.dumps(results))
        if args.png:
            draw(results, args.png, "Llama" if args.llama else "GPT")


if __name__ == "__main__":
    main()
