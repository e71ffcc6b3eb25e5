"""Many random steps of a random loop, in lockstep with the plain loop.

Every loss and every bit agree, memory and threads stay steady.

    python -m tests.cpu.soak --steps 2000 --seed 1        (./scripts/soak)

Each step draws what a loop may do: parts of a batch added up, clipping, a loss scale that
overflows, gradients read and edited, steps left out, evaluation, other learning rates, each form of
zero_grad, weights and checkpoints read, states that move among host and device, by hand and by the
planner, and a delay in any stage of the engine. Both loops do the same; the figures that they see
must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.foresight import Speculate
from hytrain_fx.torch_private.compiling import autograd_cache_off

from .loops import Twins, assert_same, weights
from .models import Batches
from .test_placements import plan_of

_TOKENS, _WIDTH = 2800, 24  # the head is large enough for updates on guessed factors
_COMPARE_EVERY = 50  # steps; comparing waits for all updates
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "autocast": torch.float32}  # of training: the parameters' dtype


class Soaked(nn.Module):
    """Small layers and a large head; dropout-free, so that both loops see the same."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, 8)
        self.first = nn.Linear(8, _WIDTH)
        self.body = nn.ModuleList(nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(_WIDTH, _TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embedding(tokens))
        for block in self.body:
            x = x + block(x)
        return F.cross_entropy(self.head(x).float(), (tokens * 7 + 3) % _TOKENS)


@dataclass
class Side:
    """One of the two loops."""

    model: Any
    optimizer: Any
    scaler: torch.amp.GradScaler
    held: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """Resident memory and threads of this process."""

    resident_bytes: int
    threads: int

    @classmethod
    def now(cls) -> Usage:
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")))


class Soak:
    """Two models in lockstep.

    `run` raises AssertionError where they differ, and gives what was used on the way.
    """

    def __init__(self, dtype: torch.dtype, seed: int, speculate: Speculate = True, *, autocast: bool = False) -> None:
        def make() -> tuple[nn.Module, Batches]:
            return Soaked().to(dtype), [(torch.randint(0, _TOKENS, (6,)),) for _ in range(7)]

        self._random = random.Random(seed)
        self._scales = dtype == torch.float32
        self._autocast = autocast
        self.twins = Twins(make, workers=2, timeout_s=60.0, replan_every=40, speculate=speculate)
        reference, ours = self.twins.restart()
        self._sides = [Side(model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
                       for model, optimizer in ((self.twins.plain, reference), (self.twins.ours, ours))]
        self.steps = 0

    def run(self, steps: int) -> list[Usage]:
        """`steps` random steps; memory and threads after every `_COMPARE_EVERY`."""
        used = []
        with autograd_cache_off():
            for _ in range(steps):
                self._step()
                self.steps += 1
                if self.steps % _COMPARE_EVERY == 0:
                    self._compare()
                    used.append(Usage.now())
        self._compare()
        return used

    def close(self) -> None:
        self.twins.close()

    def _chance(self, percent: float) -> bool:
        return self._random.random() * 100 < percent

    def _casting(self, on: bool) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext()

    def _agree(self, action: Callable[[Side], Any], what: str) -> None:
        """Do it on both sides, which must see the same."""
        expected, found = map(action, self._sides)
        assert found == expected, f"step {self.steps}: {what}: {found} instead of {expected}"

    def _compare(self) -> None:
        assert_same(weights(self.twins.ours), weights(self.twins.plain))

    # ---- one step ----

    def _step(self) -> None:
        if self._chance(25):
            self.twins.session.engine.set_delay(self._random.choice(list(Stage)), self._random.choice([0, 0, 200, 2000]))
        if self._chance(4):
            places = [self._random.choice(list(Placement)) for _ in range(5)]
            self.twins.session.place(plan_of(self.twins.session, places))
        scaled = self._scales and self._chance(35)
        for _ in range(self._random.choice([1, 1, 1, 2, 3])):
            self._backward(scaled)
            self._maybe_evaluate()
        if self._chance(50):
            time.sleep(0.002)  # as a loop that waits for the device before step(): updates on a guess at it have begun
        if self._chance(12):  # a step left out
            self._zero_grad()
            return
        unscaled = scaled and self._chance(60)
        if unscaled:
            self._agree(lambda side: side.scaler.unscale_(side.optimizer), "unscale_")
        if not scaled or unscaled:
            self._maybe_touch_gradients()
            self._maybe_clip()
        self._maybe_change_group()
        self._commit(scaled)
        self._maybe_evaluate()
        self._maybe_read()
        self._zero_grad()

    def _backward(self, scaled: bool) -> None:
        batch = self._random.choice(self.twins.batches)
        factor = float("inf") if scaled and self._chance(15) else 1.0
        plainly = self._chance(5)  # this part is not autocast

        def go(side: Side) -> float:
            with self._casting(self._autocast and not plainly):
                loss = side.model(*batch)
            (side.scaler.scale(loss * factor) if scaled else loss).backward()
            return float(loss.detach())

        self._agree(go, "the loss")

    def _commit(self, scaled: bool) -> None:
        def go(side: Side) -> float:
            if not scaled:
                side.optimizer.step()
                return 0.0
            side.scaler.step(side.optimizer)
            side.scaler.update()
            return side.scaler.get_scale()

        self._agree(go, "the loss scale")

    def _zero_grad(self) -> None:
        def by_hand(side: Side) -> None:
            for parameter in side.model.parameters():
                parameter.grad = None

        self._agree(self._random.choice([
            lambda side: side.optimizer.zero_grad(),
            lambda side: side.optimizer.zero_grad(),
            lambda side: side.optimizer.zero_grad(set_to_none=False),
            lambda side: side.model.zero_grad(),
            by_hand,
        ]), "zero_grad")

    # ---- what a loop may do besides ----

    def _maybe_evaluate(self) -> None:
        if not self._chance(10):
            return
        casts = self._autocast and self._chance(60)
        batch = self._random.choice(self.twins.batches)

        def go(side: Side) -> float:
            side.model.eval()
            with torch.no_grad(), self._casting(casts):
                loss = side.model(*batch)
            side.model.train()
            return float(loss)

        self._agree(go, "the loss of an evaluation")

    def _maybe_clip(self) -> None:
        kind, limit = self._random.choice(["none", "none", "norm", "norm", "value"]), self._random.choice([0.02, 0.02, 1e3])
        if kind == "norm":
            self._agree(lambda side: repr(float(clip_grad_norm_(side.model.parameters(), limit))), "the norm of the gradients")
        elif kind == "value":
            self._agree(lambda side: clip_grad_value_(side.model.parameters(), limit), "clip_grad_value_")

    def _maybe_touch_gradients(self) -> None:
        at = self._random.randrange(len(list(self.twins.plain.parameters())))

        def gradient(side: Side) -> Any:
            return list(side.model.parameters())[at].grad

        if self._chance(10):
            self._agree(lambda side: repr(float(gradient(side).float().abs().sum())), "a gradient read")
        if self._chance(10):
            self._agree(lambda side: _none(gradient(side).mul_(0.5)), "mul_")
        if self._chance(6):
            self._agree(lambda side: _none(gradient(side).add_(1e-3)), "add_")

    def _maybe_change_group(self) -> None:
        if self._chance(15):
            lr, decay = self._random.choice([1e-3, 3e-3, 1e-2]), self._random.choice([0.0, 0.1])
            self._agree(lambda side: side.optimizer.param_groups[0].update(lr=lr, weight_decay=decay), "a change of the group")

    def _maybe_read(self) -> None:
        at = self._random.randrange(len(list(self.twins.plain.parameters())))
        if self._chance(8):
            self._agree(lambda side: float(list(side.model.parameters())[at].detach().float().sum()), "a weight read")
        if self._chance(4):
            self._agree(lambda side: _none(list(side.model.parameters())[at].data.mul_(0.99)), "a weight written")
        if self._chance(3):
            self._agree(lambda side: side.held.update({at: list(side.model.parameters())[at].detach()}), "a view taken")
        if self._chance(3):
            self._agree(lambda side: side.held.clear(), "views dropped")
        if self._chance(2):
            self._agree(lambda side: float(side.model.state_dict()["head.weight"].float().sum()), "a checkpoint read")
            self.twins.optimizer.state_dict()


def _none(value: object) -> None:
    """What two loops make of their own tensors is not compared."""


def grown(used: list[Usage]) -> tuple[int, int]:
    """Bytes and threads by which the last quarter exceeds the first half.

    A run needs some steps to see every case once.
    """
    half, quarter = used[: (len(used) + 1) // 2], used[-max(1, len(used) // 4) :]
    more_bytes = max(u.resident_bytes for u in quarter) - max(u.resident_bytes for u in half)
    return more_bytes, max(u.threads for u in quarter) - max(u.threads for u in half)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random steps of a random loop beside the plain loop, bit for bit.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=list(KINDS), nargs="*", default=list(KINDS), help="autocast: fp32 under autocast to bf16")
    of = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for name in of.dtype:
        soak = Soak(KINDS[name], of.seed, autocast=name == "autocast")
        used = soak.run(of.steps)
        counts = soak.twins.session.engine.early_counts()
        soak.close()
        more_bytes, more_threads = grown(used)
        failed |= more_bytes > 16 << 20 or more_threads > 0
        print(f"{name}: {of.steps} steps, all bits the plain loop's; resident {used[-1].resident_bytes >> 20} MiB at the end, "
              f"{more_bytes / 2**20:+.1f} MiB and {more_threads:+d} threads from the first half to the last quarter; "
              f"in {counts.commits} steps updates began before step(), in {counts.missed} some were undone")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
