"""What moments in 16 bits do to training: the GPT of train_gpt.py with several kinds, and seeds.

    python examples/compare_moments.py --seeds 2 --steps 200            # CPU: some minutes
    python examples/compare_moments.py --layers 6 --width 384 --heads 6 --context 256 --batch 32
        --seeds 5 --steps 3000 --json moments.json                      # a GPU
    python examples/compare_moments.py --join a.json b.json --png moments.png     # runs made apart

    fp32       hytrain_fx, moments in fp32
    bf16       hytrain_fx, moments="bf16": rounded up or down by chance
    nearest    a plain loop whose moments are bf16, rounded to nearest, masters fp32
    torchao    torchao's AdamW8bit, where it is installed: moments in 8 bits by block, weights in
               bf16 rounded by chance, no masters

Parameters are bf16. A seed sets weights and batches, alike for every kind. The loss that is printed
is that of text that is not trained on, at the end. In the fp32 run exp_avg_sq is kept twice more
from the same gradients, in bf16 by chance and to nearest: `drift` is their sum over that of fp32.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpt import GPT, batches, stdlib_text

import hytrain_fx
from hytrain_fx.runtime.rounding import NO_PLACE, rounded, rounding_key

KINDS = ("fp32", "bf16", "nearest", "torchao")
BETAS = (0.9, 0.999)
EVERY = 20  # steps whose mean loss is one point of a curve
HELD_OUT = 1 << 18  # bytes at the end of the text
Found = dict[str, Any]


class NearestAdamW(torch.optim.Optimizer):
    """AdamW on fp32 masters with moments in bf16, rounded to nearest."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, master=p.detach().float(), m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                grad = p.grad.float()
                m, v = torch.lerp(state["m"].float(), grad, 1 - BETAS[0]), state["v"].float() * BETAS[1] + (1 - BETAS[1]) * grad * grad
                denominator = (v / (1 - BETAS[1] ** state["step"])).sqrt_().add_(1e-8)
                state["master"].mul_(1 - group["lr"] * group["weight_decay"])
                state["master"].addcdiv_(m, denominator, value=-group["lr"] / (1 - BETAS[0] ** state["step"]))
                for name, values in (("m", m), ("v", v)):
                    state[name].copy_(values)
                p.copy_(state["master"])


class Drift:
    """exp_avg_sq of all parameters three times, from the same gradients."""

    def __init__(self) -> None:
        self._wide = self._chance = self._nearest = torch.zeros(())
        self._step = 0

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        grad = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).float()
        if not self._step:
            self._wide, self._chance = torch.zeros_like(grad), torch.zeros_like(grad, dtype=torch.bfloat16)
            self._nearest = self._chance.clone()
        self._step += 1
        squares = grad.square_().mul_(1 - BETAS[1])
        self._wide.mul_(BETAS[1]).add_(squares)
        key = rounding_key({"moments": "bf16"}, self._step)
        self._chance = rounded(self._chance.float().mul_(BETAS[1]).add_(squares), NO_PLACE, key, 1)
        self._nearest = self._nearest.float().mul_(BETAS[1]).add_(squares).bfloat16()

    def ratios(self) -> dict[str, float]:
        """Sums over that in fp32."""
        whole = float(self._wide.double().sum())
        return {"chance": float(self._chance.double().sum()) / whole, "nearest": float(self._nearest.double().sum()) / whole}


def optimizer_of(kind: str, model: Any, lr: float) -> torch.optim.Optimizer:
    """The optimizer; the model is compiled."""
    if kind in ("fp32", "bf16"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS)
        places: dict[str, Any] = {"gpu_states": 1.0} if next(model.parameters()).is_cuda else {}
        return hytrain_fx.compile(model, optimizer, moments="bf16" if kind == "bf16" else "fp32", **places)[1]
    model.compile()
    if kind == "nearest":
        return NearestAdamW(model.parameters(), lr)
    of_torchao = importlib.import_module("torchao.optim").AdamW8bit
    found: torch.optim.Optimizer = of_torchao(model.parameters(), lr=lr, betas=BETAS, bf16_stochastic_round=True)
    return found


def rate_at(step: int, steps: int) -> float:
    """Up for 100 steps, and down to nothing from a fifth of the way on."""
    return min(1.0, (step + 1) / 100, 1.25 * (steps - step) / steps)


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def trained(kind: str, seed: int, text: Tensor, args: argparse.Namespace) -> Found:
    """One run: its curve, the loss of text held out, and the drift (fp32 alone)."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model: Any = GPT(args.layers, args.width, args.heads, args.context).to(args.device, torch.bfloat16)
    optimizer = optimizer_of(kind, model, args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, steps=args.steps))
    drift, losses = Drift(), list[Tensor]()
    for windows in _windows(text[:-HELD_OUT], args.steps, seed, args):
        loss = loss_of(model, windows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if kind == "fp32":
            drift.add(model.parameters())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        held_out = [float(loss_of(model, windows)) for windows in _windows(text[-HELD_OUT:], 50, 10_000, args)]
    if kind in ("fp32", "bf16"):
        hytrain_fx.close(model)
    values = torch.stack(losses).tolist()
    curve = [statistics.mean(values[at : at + EVERY]) for at in range(0, len(values), EVERY)]
    drifted = {"drift": drift.ratios()} if kind == "fp32" else {}
    return {"kind": kind, "seed": seed, "curve": curve, "held_out": statistics.mean(held_out), **drifted}


def _windows(text: Tensor, steps: int, seed: int, args: argparse.Namespace) -> Iterator[Tensor]:
    """Other windows for each seed."""
    yield from batches(text.roll(7919 * seed), steps, args.batch, args.context, args.device)


def spread(found: list[Found]) -> str:
    """A line for each kind: the loss of text held out, over the seeds, and its distance to fp32."""
    lines = []
    of_seed = {run["seed"]: run["held_out"] for run in found if run["kind"] == "fp32"}
    for kind in dict.fromkeys(run["kind"] for run in found):
        losses = [run["held_out"] for run in found if run["kind"] == kind]
        lines.append(f"{kind:8} held out {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})")
        apart = [run["held_out"] - of_seed[run["seed"]] for run in found if run["kind"] == kind and run["seed"] in of_seed]
        if apart:
            lines[-1] += f", less fp32 of the same seed {statistics.mean(apart):+.4f} ({min(apart):+.4f} to {max(apart):+.4f})"
    for name in ("chance", "nearest"):
        ratios = [run["drift"][name] for run in found if "drift" in run]
        if ratios:
            lines.append(f"exp_avg_sq in bf16, {name}: {min(ratios):.4f} to {max(ratios):.4f} of fp32's sum")
    return "\n".join(lines)


def draw(found: list[Found], path: Path) -> None:
    """Curves, and their distance to fp32's: the mean over the seeds, the least and the most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    whole, apart = figure.subplots(1, 2)
    of_fp32 = {run["seed"]: run["curve"] for run in found if run["kind"] == "fp32"}
    for number, kind in enumerate(dict.fromkeys(run["kind"] for run in found)):
        runs = [run for run in found if run["kind"] == kind]
        _band(whole, [run["curve"] for run in runs], kind, number)
        pairs = [(run["curve"], of_fp32[run["seed"]]) for run in runs if run["seed"] in of_fp32]
        _band(apart, [[one - other for one, other in zip(*pair, strict=True)] for pair in pairs], kind, number)
    last = [loss for run in found for loss in run["curve"][len(run["curve"]) // 4 :]]
    whole.set(xlabel="step", ylabel=f"loss, nats a byte (means of {EVERY} steps)", ylim=(min(last) * 0.97, max(last) * 1.03))
    apart.set(xlabel="step", ylabel="less that of fp32 with the same seed", ylim=(-0.03, 0.05))
    whole.legend()
    figure.savefig(path, dpi=110)


def _band(axis: Any, curves: list[list[float]], label: str, number: int) -> None:
    points = list(zip(*curves, strict=True))
    steps, colour = [EVERY * (at + 1) for at in range(len(points))], f"C{number}"
    axis.plot(steps, [statistics.mean(of) for of in points], label=label, linewidth=1, color=colour)
    axis.fill_between(steps, [min(of) for of in points], [max(of) for of in points], color=colour, alpha=0.15, linewidth=0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("width", 128), ("heads", 4), ("context", 128), ("batch", 8), ("steps", 1000), ("seeds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:3]))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--join", type=Path, nargs="+", default=None, help="files of --json: show them together, train nothing")
    parser.add_argument("--json", type=Path, default=None, help="write all runs here")
    parser.add_argument("--png", type=Path, default=None, help="draw the curves here (needs matplotlib)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    found: list[Found] = [run for path in args.join or () for run in json.loads(path.read_text())]
    text = stdlib_text()
    for seed in () if args.join else range(args.first_seed, args.first_seed + args.seeds):
        for kind in args.kinds:
            found.append(trained(kind, seed, text, args))
            print(f"{kind} seed {seed}: held out {found[-1]['held_out']:.4f} {found[-1].get('drift', '')}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.png:
        draw(found, args.png)
    print(spread(found))


if __name__ == "__main__":
    main()
