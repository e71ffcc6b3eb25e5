"""Loops of ranks whose optimizer has no kernel: each large parameter has an owner that updates it.

For test_owners.py. Plans move at every step, to other places on every rank.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.config import OnNonfinite
from hytrain_fx.errors import NonFiniteGradientError, UnsupportedError
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime.any_optimizer.row_step import own_of
from hytrain_fx.runtime.engine import Stage

from .loops import TorchAdam, weights
from .optimizers import EVERY, WithRate, make
from .rank_loops import Found, backward_averaged, begin_alike, clipped_in_shards, net, tokens_of
from .shard_loops import LOOPS, Run, place_anywhere

PLACES = (Placement.CPU, Placement.GPU)
KINDS: dict[str, tuple[tuple[torch.dtype, Sequence[str]], ...]] = {
    "Adafactor": ((torch.float32, (*LOOPS, "scaled")),),
    "SGD nesterov": ((torch.bfloat16, ("plain", "clipped", "accumulated", "read", "not_dropped", "broken", "partly_eager")),),
    "Adagrad": ((torch.float32, ("accumulated", "edited", "all_eager")),),
    "Muon": ((torch.float32, ("plain", "clipped", "accumulated")),),
}
"""By optimizer: dtypes, and loops. Those that write weights need masters that follow: fp32."""


def trained(model: nn.Module, name: str) -> list[nn.Parameter]:
    """What the optimizer is for: Muon takes matrices alone."""
    for p in model.parameters():
        p.requires_grad_(name != "Muon" or p.dim() == 2)
    return [p for p in model.parameters() if p.requires_grad]


def compiled(model: nn.Module, name: str, **options: Any) -> Any:
    """The optimizer of a model that hytrain_fx has compiled."""
    return hytrain_fx.compile(model, make(name, trained(model, name)), workers=1, **options)[1]


def run_ours(rank: int, loop: Callable[[Run], None], name: str, dtype: torch.dtype) -> Found:
    """With hytrain_fx. Every second rank is slow."""
    model: Any = net(rank, dtype)
    optimizer = compiled(model, name, replan_every=0)
    session = session_of(model)
    # On a GPU only updates there have the bits of a loop there, from the first step on.
    draw, places = random.Random(rank), PLACES if session.table.device.type == "cpu" else PLACES[1:]
    place_anywhere(session, draw, places)
    for stage in (Stage.LANDING, Stage.CPU_UPDATE, Stage.GPU_UPDATE, Stage.H2D) if rank % 2 else ():
        session.engine.set_delay(stage, 300)
    clip = lambda of: float(clip_grad_norm_(of.parameters(), 0.5))  # noqa: E731
    run = Run(model, optimizer, rank, clip, draw=draw, places=places)
    loop(run)
    states = session.states
    of_all = {states.placement[row] for row in range(len(session.table)) if row not in session.table.shards}
    kept = [row for row in session.table.shards if states[row].master.numel() or own_of(states[row]).entry]
    graphs = hytrain_fx.inspect(model)
    found = {"seen": run.seen, "weights": weights(model), "owned": len(session.table.shards), "kept": kept, "of_all": of_all,
             "text": hytrain_fx.explain(model).details(), "nodes": [node.note for graph in graphs for node in graphs.nodes(graph)]}
    hytrain_fx.close(model)
    return found


def run_by_hand(rank: int, size: int, loop: Callable[[Run], None], name: str, dtype: torch.dtype) -> Found:
    """With torch alone: the same optimizer, on fp32 masters, and gradients averaged by hand."""
    model: Any = net(rank, dtype)
    begin_alike(model)
    parameters = trained(model, name)
    kind: Any
    kind, options = EVERY[name]
    optimizer = make(name, parameters) if dtype == torch.float32 else TorchAdam(parameters, kind, **options)
    model.compile()
    run = Run(model, optimizer, rank, partial(clipped_in_shards, size, owned=True), size)
    loop(run)
    return {"seen": run.seen, "weights": weights(model)}


def scaled(run: Run) -> None:
    """With GradScaler, which unscales before a clip.

    In the third step the last rank has infinite gradients, so all leave it out.
    """
    scaler = torch.amp.GradScaler(next(run.model.parameters()).device.type, init_scale=1024.0, growth_interval=2)
    for step in run.steps():
        factor = torch.inf if step == 2 and run.rank else 1.0
        run.backward(step, factor=float(scaler.scale(torch.ones(()))) * factor)
        scaler.unscale_(run.optimizer)
        norm = run.clip(run.model)
        run.seen.append(norm if math.isfinite(norm) else -1.0)
        scaler.step(run.optimizer)
        scaler.update()
        run.seen.append(scaler.get_scale())
        run.optimizer.zero_grad()


ALL_LOOPS = {**LOOPS, "scaled": scaled}


# ---- what ranks do ----


def every_loop(name: str, rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """Each loop of one optimizer, by hand and with ours."""
    kinds = [(dtype, loop) for dtype, loops in KINDS[name] for loop in loops]
    return {f"{loop} {dtype}": (run_by_hand(rank, size, ALL_LOOPS[loop], name, dtype), run_ours(rank, ALL_LOOPS[loop], name, dtype))
            for dtype, loop in kinds}


def branches(rank: int, size: int) -> dict[str, tuple[Found, ...]]:
    """A layer is used by one rank, by the other, by both, by none."""
    takers = [(0,), (0, 1), (1,), (), (1,), (0,), (0, 1)]
    found = []
    for ours in (False, True):
        model: Any = net(rank, torch.float32)
        if ours:
            optimizer: Any = compiled(model, "SGD nesterov")
        else:
            begin_alike(model)
            optimizer = make("SGD nesterov", model.parameters())
            model.compile()
        seen = []
        for step, of in enumerate(takers):
            loss = model(tokens_of(rank, step), side=rank in of)
            if ours:
                loss.backward()
            else:
                for p in model.side.parameters():  # a rank without a gradient adds zeros where another has one
                    p.grad = None if not of or rank in of else torch.zeros_like(p)
                backward_averaged(model.parameters(), size, loss)
                for p in model.side.parameters() if of and rank not in of else ():
                    distributed.all_reduce(p.grad)
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found.append({"seen": seen, "weights": weights(model)})
    return {"branches": tuple(found)}


def saved(name: str, folder: str, rank: int, size: int) -> Found:
    """Three steps, then what a checkpoint has: on every rank, and each rank's part."""
    model: Any = net(rank)
    optimizer = compiled(model, name, replan_every=0)
    run = Run(model, optimizer, rank, lambda of: 0.0, draw=random.Random(rank), places=PLACES)
    for step in run.steps(3):
        run.backward(step)
        run.end_step()
    sharded = optimizer.sharded_state_dict()
    save({"optimizer": sharded, "model": weights(model)}, checkpoint_id=folder)
    read = {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}
    return {"optimizer": optimizer.state_dict(), "model": weights(model), "parts": list(sharded["state"]), "read": read}


def saved_alone(name: str, rank: int, size: int) -> dict[str, Any]:
    """Two steps on the same batches, which have the same mean on any number of ranks."""
    model: Any = net(0)
    optimizer = compiled(model, name)
    run = Run(model, optimizer, 0, lambda of: 0.0)
    for step in range(2):
        run.backward(step)
        run.end_step()
    return dict(optimizer.state_dict())


def resumed(name: str, checkpoint: Found | str, rank: int, size: int) -> Found:
    """Two steps from a checkpoint: a state_dict, or a folder that each rank loads its part of.

    Every rank has the same batches, so the mean is what one rank makes.
    """
    model: Any = net(rank)
    optimizer = compiled(model, name, k=rank % 3)
    run = Run(model, optimizer, 0, lambda of: 0.0)
    run.backward(77)  # what was there is another run's
    run.end_step()
    if isinstance(checkpoint, str):
        found = {"optimizer": optimizer.sharded_state_dict(), "model": weights(model)}
        load(found, checkpoint_id=checkpoint)
        model.load_state_dict(found["model"])
        optimizer.load_sharded_state_dict(found["optimizer"])
    else:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loaded = optimizer.state_dict()
    for step in range(2):
        run.backward(step)
        run.end_step()
    return {"loaded": loaded, "optimizer": optimizer.state_dict(), "model": weights(model)}


def resumed_from_each(name: str, checkpoints: Sequence[Found | str], rank: int, size: int) -> list[Found]:
    """From each of them, one after the other."""
    return [resumed(name, checkpoint, rank, size) for checkpoint in checkpoints]


def states_edited(rank: int, size: int) -> list[Any]:
    """An entry is written, deleted, and all are: what is there afterwards, on every rank."""
    model: Any = net(rank)
    optimizer = compiled(model, "SGD nesterov")
    run, head = Run(model, optimizer, rank, lambda of: 0.0), model.head.weight
    found: list[Any] = [head in optimizer.state, dict(optimizer.state[head])]
    run.backward(0)
    run.end_step()
    entry = optimizer.state[head]
    entry["momentum_buffer"] = torch.full_like(entry["momentum_buffer"], 2.0)
    found.append(dict(optimizer.state[head]))
    del optimizer.state[head]
    found += [head in optimizer.state, len(optimizer.state), dict(optimizer.state[head])]
    run.backward(1)
    run.end_step()
    optimizer.state.clear()
    found += [len(optimizer.state), optimizer.state_dict()["state"], weights(model)]
    return found


def infinite_on_one(mode: OnNonfinite, rank: int, size: int) -> tuple[list[str], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The second step is infinite on the last rank: errors, weights before and after it."""
    model: Any = net(rank)
    optimizer = compiled(model, "Adagrad", on_nonfinite=mode)
    run, errors = Run(model, optimizer, rank, lambda of: 0.0), []
    for step in range(3):
        before = weights(model)
        run.backward(step, factor=torch.inf if step == 1 and rank == size - 1 else 1.0)
        try:
            run.end_step()
        except NonFiniteGradientError as error:
            errors.append(str(error))
            optimizer.zero_grad()
        if step == 1:
            kept = before, weights(model)
    return errors, *kept


def four(rank: int, size: int) -> Found:
    """Four ranks, some with states on the device; one unit has nothing on three of them."""
    model: Any = net(rank)
    optimizer = compiled(model, "Adafactor", k=rank)
    run = Run(model, optimizer, rank, lambda of: float(clip_grad_norm_(of.parameters(), 0.5)))
    for step in range(3):
        run.backward(step)
        run.seen.append(run.clip(model))
        run.end_step()
    return {"seen": run.seen[1::2], "weights": weights(model), "optimizer": optimizer.state_dict()}


def one_matrix(rank: int, size: int) -> Found:
    """One rank owns all that there is; plans are solved from measured steps."""
    torch._dynamo.reset()
    torch.manual_seed(rank)
    model: Any = nn.Linear(48, 48, bias=False)
    optimizer = compiled(model, "SGD nesterov", warmup_steps=1, replan_every=2)
    for step in range(8):
        model(torch.ones(2, 48) * (1 + rank + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shown = str(hytrain_fx.explain(model)), str(hytrain_fx.inspect(model))
    return {"weights": weights(model), "shown": shown, "params": session_of(model).states.pieces.piece(0).numel}


class LateCounter(WithRate):
    """Counts in its groups, from the fifth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    steps = self.state[p].setdefault("steps", torch.tensor(0.0)).add_(1)
                    p.sub_(p.grad, alpha=group["lr"])
            if float(steps) > 4:
                group["late"] = float(steps)


def shared_numbers(rank: int, size: int) -> list[Any]:
    """An optimizer that counts in its groups: how many have owners, weights, groups, an error."""
    model: Any = net(rank, torch.float32)
    optimizer = compiled(model, "GroupCounter")
    run = Run(model, optimizer, rank, lambda of: 0.0)
    for step in range(3):
        run.backward(step)
        run.end_step()
    found = [len(session_of(model).table.shards), weights(model), optimizer.param_groups[0]["count"], ""]
    hytrain_fx.close(model)
    late: Any = net(rank, torch.float32)
    _, optimizer = hytrain_fx.compile(late, LateCounter(late.parameters()), workers=1)
    run = Run(late, optimizer, rank, lambda of: 0.0)
    try:
        for step in range(6):
            run.backward(step)
            run.end_step()
    except UnsupportedError as error:
        found[-1] = f"step {step}: {error}"
    return found
