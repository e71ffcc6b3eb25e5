"""Loops of ranks that read, edit, clip, save and move what is sharded: for test_shards.py.

Each runs with hytrain_fx, whose plan is another one at every step and on every rank, and with torch
alone on whole gradients, averaged by hand.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.config import OnNonfinite
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.session import Session

from .loops import HYPER, HandAdam, weights
from .rank_loops import Found, backward_averaged, begin_alike, clipped_in_shards, compiled, device_here, net, tokens_of
from .test_cut_parameters import cut_plan

STEPS = 4


@dataclass
class Run:
    """One training run of one rank.

    clip         clips to 0.5 and gives the norm
    by_hand_of   the number of ranks whose gradients are averaged by hand; 0: hytrain_fx does it
    places       where drawn plans put states
    """

    model: Any
    optimizer: Any
    rank: int
    clip: Callable[[nn.Module], float]
    by_hand_of: int = 0
    draw: random.Random | None = None
    seen: list[float] = field(default_factory=list)
    side: bool = False
    places: Sequence[Placement] = tuple(Placement)

    def backward(self, number: int, factor: float = 1.0) -> None:
        """The backward of batch `number`."""
        loss = self.model(tokens_of(self.rank, number), side=self.side)
        self.seen.append(loss.item())
        if self.by_hand_of:
            backward_averaged(self.model.parameters(), self.by_hand_of, factor * loss)
        else:
            (factor * loss).backward()

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Numbers of steps; before each, ours moves its states to a drawn plan."""
        for step in range(count):
            if self.draw is not None:
                self.optimizer.zero_grad()
                place_anywhere(session_of(self.model), self.draw, self.places)
            yield step

    def end_step(self) -> None:
        """step() and zero_grad()."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def note(self, tensor: torch.Tensor) -> None:
        """Something that both runs must see alike."""
        self.seen.append(float(tensor.detach().double().abs().sum()))


def place_anywhere(session: Session, draw: random.Random, among: Sequence[Placement] = tuple(Placement)) -> None:
    """Put a drawn plan in force: pieces of every parameter in any of these places."""
    steps = [draw.randint(1, 9) for _ in range(3)]
    places = [draw.choice(among) for _ in range(4)]
    session.place(cut_plan(session, steps, places))


def plain(run: Run) -> None:
    """Nothing else."""
    for step in run.steps():
        run.backward(step)
        run.end_step()


def clipped(run: Run) -> None:
    """By norm."""
    for step in run.steps():
        run.backward(step)
        run.seen.append(run.clip(run.model))
        run.end_step()


def accumulated(run: Run) -> None:
    """Three backwards a step, the last after a clip."""
    for step in run.steps():
        for micro in range(3):
            if micro == 2:
                run.seen.append(run.clip(run.model))
            run.backward(10 * step + micro)
        run.end_step()


def read(run: Run) -> None:
    """`.grad` before and after step()."""
    for step in run.steps():
        run.backward(step)
        for p in run.model.parameters():
            if p.grad is not None:
                run.note(p.grad)
        run.optimizer.step()
        run.note(run.model.head.weight.grad)
        run.note(run.model.words.weight.grad[3])
        run.optimizer.zero_grad()


def edited(run: Run) -> None:
    """`.grad` is scaled, clamped, replaced, zeroed, dropped; the second backward adds to that."""
    for step in run.steps():
        run.backward(10 * step)
        head, words, first = run.model.head.weight, run.model.words.weight, run.model.layers[0].weight
        head.grad.mul_(0.5)
        words.grad.clamp_(-1e-3, 1e-3)
        first.grad = first.grad * 2
        run.model.layers[1].weight.grad.zero_()
        run.model.layers[2].weight.grad = None
        run.backward(10 * step + 1)
        run.end_step()


def not_dropped(run: Run) -> None:
    """Steps without zero_grad(), and twice on the same gradients."""
    for step in range(STEPS):
        run.backward(step)
        run.optimizer.step()
        if step == 2:
            run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(9)
    run.end_step()


def weights_used(run: Run) -> None:
    """An average of weights, and writes to them."""
    # weights that rest elsewhere are saved on the host
    average = {name: value.to(device_here()) for name, value in weights(run.model).items()}
    for step in run.steps():
        run.backward(step)
        run.end_step()
        with torch.no_grad():
            for name, p in run.model.named_parameters():
                average[name].lerp_(p, 0.5)
            if step == 1:
                run.model.head.weight.mul_(0.9)
            if step == 2:
                run.model.load_state_dict(average)
    for value in average.values():
        run.note(value)


def broken(run: Run) -> None:
    """Code between graphs reads a weight of a later layer."""
    run.model.breaks = True
    for step in run.steps():
        run.backward(step)
        run.end_step()
    run.seen += run.model.seen


def partly_eager(run: Run) -> None:
    """A layer that is not captured makes gradients."""
    run.side = True
    run.model.side.forward = torch.compiler.disable(run.model.side.forward)
    for step in run.steps():
        run.backward(step)
        run.seen.append(run.clip(run.model))
        run.end_step()


def all_eager(run: Run) -> None:
    """No part is captured."""
    run.model.forward = torch.compiler.disable(run.model.forward)
    for step in run.steps():
        run.backward(step)
        run.seen.append(run.clip(run.model))
        run.end_step()


LOOPS: dict[str, Callable[[Run], None]] = {
    loop.__name__: loop for loop in (plain, clipped, accumulated, read, edited, not_dropped, weights_used, broken, partly_eager, all_eager)
}
IN_BOTH = [(name, dtype) for name in LOOPS for dtype in (torch.bfloat16, torch.float32)]
IN_TURNS = IN_BOTH[::4] + IN_BOTH[3::4]  # each loop once, every second one in fp32


def run_ours(rank: int, loop: Callable[[Run], None], dtype: torch.dtype, seed: int = 0, **options: Any) -> Found:
    """With hytrain_fx. Every second rank is slow."""
    model: Any = net(rank, dtype)
    optimizer = compiled(model, replan_every=0, **options)
    session = session_of(model)
    for stage in (Stage.LANDING, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D) if rank % 2 else ():
        session.engine.set_delay(stage, 300)
    draw = random.Random(100 * seed + rank) if session.engine.can_stream else None
    run = Run(model, optimizer, rank, lambda of: float(clip_grad_norm_(of.parameters(), 0.5)), draw=draw)
    loop(run)
    found = {"seen": run.seen, "weights": weights(model), "shards": len(session.table.shards)}
    hytrain_fx.close(model)
    return found


def run_by_hand(rank: int, size: int, loop: Callable[[Run], None], dtype: torch.dtype) -> Found:
    """With torch alone."""
    model: Any = net(rank, dtype)
    begin_alike(model)
    model.compile()
    run = Run(model, HandAdam(model.parameters(), **HYPER), rank, partial(clipped_in_shards, size), size)
    loop(run)
    return {"seen": run.seen, "weights": weights(model)}


# ---- what ranks do ----


def every_loop(kinds: Sequence[tuple[str, torch.dtype]], rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Each of these loops in its dtype by hand and with ours."""
    return {f"{name} {dtype}": (run_by_hand(rank, size, LOOPS[name], dtype), run_ours(rank, LOOPS[name], dtype))
            for name, dtype in kinds}


def saved(rank: int, size: int) -> Found:
    """Three steps, then what a checkpoint has."""
    model: Any = net(rank)
    optimizer = compiled(model)
    run = Run(model, optimizer, rank, lambda of: 0.0, draw=random.Random(rank))
    for step in run.steps(3):
        run.backward(step)
        run.end_step()
    return {"optimizer": optimizer.state_dict(), "model": weights(model), "exp_avg": optimizer.state[model.head.weight]["exp_avg"].clone()}


def resumed(checkpoint: Found, rank: int, size: int) -> Found:
    """Two steps from a checkpoint.

    Every rank has the same batches, so the mean is what one rank makes.
    """
    model: Any = net(rank)
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1.0), workers=1)
    run = Run(model, optimizer, 0, lambda of: 0.0)
    run.backward(77)  # what was there is another run's
    run.end_step()
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    loaded = optimizer.state_dict()
    for step in range(2):
        run.backward(step)
        run.end_step()
    return {"loaded": loaded, "optimizer": optimizer.state_dict(), "model": weights(model)}


def infinite_on_one(mode: OnNonfinite, rank: int, size: int) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The second step is infinite on the last rank: errors, weights before and after it."""
    model: Any = net(rank)
    optimizer = compiled(model, on_nonfinite=mode)
    run = Run(model, optimizer, rank, lambda of: 0.0)
    errors = []
    for step in range(3):
        before = weights(model)
        run.backward(step, factor=torch.inf if step == 1 and rank == size - 1 else 1.0)
        try:
            run.end_step()
        except hytrain_fx.errors.NonFiniteGradientError as error:
            errors.append(str(error))
            optimizer.zero_grad()
        if step == 1:
            kept = before, weights(model)
    return errors, *kept


def other_optimizers(rank: int, size: int) -> dict[str, Found]:
    """An optimizer with another kernel."""
    found: dict[str, Found] = {}
    for kind in (hytrain_fx.Lion,):
        model: Any = net(rank)
        _, optimizer = hytrain_fx.compile(model, kind(model.parameters(), lr=1e-2), workers=1, k=0)
        run = Run(model, optimizer, rank, lambda of: 0.0)
        for step in range(3):
            run.backward(step)
            run.end_step()
        found[kind.__name__] = {"weights": weights(model), "shards": len(session_of(model).table.shards)}
    return found


def read_alone(rank: int, size: int) -> str:
    """The first rank reads weights that all have settled, and then ones that they have not."""
    model: Any = net(rank)
    optimizer = compiled(model)
    run = Run(model, optimizer, rank, lambda of: 0.0)
    for settles in (True, False):
        run.backward(0)
        run.end_step()
        if settles:
            hytrain_fx.settle(model)
        if rank == 0:
            try:
                weights(model)
            except hytrain_fx.errors.RankError as error:
                return str(error)
        distributed.barrier()
    return "no error"


def forked(rank: int, size: int) -> tuple[float, float]:
    """The sum of all weights in a child that was forked behind step(), and here."""
    model: Any = net(rank)
    optimizer = compiled(model)
    Run(model, optimizer, rank, lambda of: 0.0).backward(0)
    optimizer.step()
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.write(writes, repr(_sum(model)).encode())
        os._exit(0)
    return float(os.read(reads, 100)), _sum(model)


def _sum(model: nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def saved_in_shards(folder: str, rank: int, size: int) -> Found:
    """Three steps, then a checkpoint that each rank writes its part of."""
    model: Any = net(rank)
    optimizer = compiled(model)
    run = Run(model, optimizer, rank, lambda of: 0.0)
    for step in range(3):
        run.backward(step)
        run.end_step()
    sharded = optimizer.sharded_state_dict()
    saving: Any = async_save({"optimizer": sharded, "model": weights(model)}, checkpoint_id=folder)
    whole = optimizer.state_dict()
    run.backward(3)  # goes on meanwhile
    run.end_step()
    saving.result()
    dtensors = [name for name, entry in sharded["state"].items() if isinstance(entry["exp_avg"], DTensor)]
    return {"whole": whole, "dtensors": dtensors}


def resumed_from_shards(folder: str, rank: int, size: int) -> Found:
    """What another number of ranks finds in it."""
    model: Any = net(rank)
    _, optimizer = hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), lr=1.0), workers=1)
    run = Run(model, optimizer, 0, lambda of: 0.0)
    run.backward(77)  # states are there to be filled from the first step on
    run.end_step()
    found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
    load(found, checkpoint_id=folder)
    model.load_state_dict(found["model"])
    optimizer.load_sharded_state_dict(found["optimizer"])
    loaded = optimizer.state_dict()
    for step in range(2):
        run.backward(step)
        run.end_step()
    return {"loaded": loaded, "optimizer": optimizer.state_dict(), "model": weights(model), "lr": optimizer.param_groups[0]["lr"]}


def saved_under_other_plans(rank: int, size: int) -> list[dict[str, Any]]:
    """The state_dict after each step. One rank has all states on the host, others have not."""
    model: Any = net(rank)
    optimizer = compiled(model, k=3 if rank else 0)
    run, found = Run(model, optimizer, rank, lambda of: 0.0), []
    for step in range(3):
        run.backward(step)
        run.end_step()
        found.append(optimizer.state_dict())
    return found


def in_another_order(rank: int, size: int) -> tuple[Found, ...]:
    """The compiler runs the nodes of one rank in another order than those of the other."""
    found: list[Found] = [run_by_hand(rank, size, accumulated, torch.bfloat16)]
    model: Any = net(rank)
    optimizer = compiled(model, k=2)
    session = session_of(model)
    nodes, begin = session.nodes, AveragedGradients.begin

    def begins(averaged: AveragedGradients, calls: tuple[tuple[int, ...], ...]) -> bool:
        # The first rank says the order: its nodes run in another, and those of the others do not.
        shuffled = list(calls)
        random.Random(7).shuffle(shuffled)
        return begin(averaged, tuple(shuffled) if rank == 0 else calls)

    assert nodes.averaged is not None
    nodes.averaged.begin = partial(begins, nodes.averaged)  # type: ignore[method-assign]
    run = Run(model, optimizer, rank, lambda of: float(clip_grad_norm_(of.parameters(), 0.5)))
    accumulated(run)
    found.append({"seen": run.seen, "weights": weights(model)})
    return tuple(found)
