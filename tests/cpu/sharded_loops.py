"""What each rank does in test_sharded_weights.py: loops with sharded and with resident weights."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.config import Weights
from hytrain_fx.errors import HytrainError, UnsupportedError
from hytrain_fx.gradients.averaging import AveragedGradients
from hytrain_fx.ir.plan import Placement
from hytrain_fx.runtime import memory
from hytrain_fx.torch_private.tensors import without_torch_function
from hytrain_fx.weights.fetched_units import NAN_VARIABLE

from . import rank_loops, shard_loops
from .loops import HYPER, assert_same, weights
from .models import gpt
from .rank_loops import Found, compiled, net, tokens_of
from .shard_loops import Run
from .test_placements import plan_of

Loops = Mapping[str, Sequence[Found]]
KINDS = ("resident", "sharded")
ALL_KINDS = (*KINDS, "sharded_host")
ON_THE_HOST = ("clipped", "read", "edited", "weights_used", "partly_eager", "hooked")
"""Loops that are run with shards on the host too."""


def hooked(run: Run) -> None:
    """Hooks copy what autograd saves, weights too, in every other forward."""
    for step in run.steps():
        with saved_tensors_hooks(torch.clone, lambda saved: saved):
            run.backward(10 * step)
        run.backward(10 * step + 1)
        run.end_step()


def loops_of_shards(names: Sequence[str], rank: int, size: int) -> Loops:
    """Loops of shard_loops.py in bf16, every second rank slow, with plans of each rank's own."""
    os.environ[NAN_VARIABLE] = "1"
    loops = {**shard_loops.LOOPS, "hooked": hooked}
    return {name: [shard_loops.run_ours(rank, loops[name], torch.bfloat16, weights=of)
                   for of in (ALL_KINDS if name in ON_THE_HOST else KINDS)] for name in names}


def loops_of_ranks(names: Sequence[str], rank: int, size: int) -> Loops:
    """Loops of rank_loops.py in bf16: every state on the host, and some on the device."""
    os.environ[NAN_VARIABLE] = "1"
    runs = (("resident", {"k": 0}), ("sharded", {"k": 0}), ("sharded", {"k": 3, "speculate": True}), ("sharded_host", {"k": 0}))
    return {name: [rank_loops.ours(rank, torch.bfloat16, name, weights=of, **options) for of, options in runs] for name in names}


def checkpoints(loop: Callable[..., Found], rank: int, size: int, weights: Weights = "sharded") -> Found:
    """A loop of shard_loops.py that compiles by itself, with weights in shards."""
    os.environ[NAN_VARIABLE] = "1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hytrain_fx, "compile", partial(hytrain_fx.compile, weights=weights))
        return loop(rank, size)


def require_resident_bits(ranks: Sequence[Any], noted: str = "seen") -> None:
    """On each rank every run has the numbers and weights of its first one, which is resident."""
    for rank in ranks:
        assert not isinstance(rank, str), rank
        runs: Sequence[Sequence[Found]] = list(rank.values()) if isinstance(rank, dict) else [rank]
        for first, *others in runs:
            for other in others:
                assert other[noted] == first[noted]
                assert_same(other["weights"], first["weights"])


# ---- models ----


class Varied(nn.Module):
    """A tied embedding, a frozen matrix, one without gradient, a layer that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 48)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.unused = nn.Linear(48, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.head = nn.Linear(48, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, side: bool = False) -> torch.Tensor:
        x = self.words(tokens) + self.frozen(self.words(tokens))
        for number, layer in enumerate(self.layers):
            x = x + (checkpoint(self.block, layer, x, use_reentrant=False) if number % 2 else self.block(layer, x))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())

    @staticmethod
    def block(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(x))


def varied(rank: int, size: int) -> Sequence[Found]:
    """Two backwards a step; in between evaluations, and forwards whose backward comes later."""
    os.environ[NAN_VARIABLE] = "1"
    found = []
    for of in ALL_KINDS:
        torch._dynamo.reset()
        torch.manual_seed(rank)
        model: Any = Varied().to(torch.bfloat16)
        run = Run(model, compiled(model, weights=of), rank, lambda of: 0.0)
        for step in range(4):
            first, second = model(tokens_of(rank, 3 * step)), model(tokens_of(rank, 3 * step + 1))
            with torch.no_grad():
                run.seen.append(float(model(tokens_of(rank, 100))))
            second.backward()
            first.backward()
            run.seen += [float(first), float(second)]
            run.end_step()
        found.append({"seen": run.seen, "weights": weights(model)})
        hytrain_fx.close(model)
    return found


def fused(rank: int, size: int) -> Sequence[Found]:
    """A GPT of three layers with Inductor's kernels, and batches of another size now and then."""
    os.environ[NAN_VARIABLE] = "1"
    found = []
    for of in KINDS:
        torch._dynamo.reset()
        torch.manual_seed(rank)
        made, batches = gpt(layers=3, width=48)
        model: Any = made.to(torch.bfloat16)
        run = Run(model, compiled(model, weights=of), rank, lambda of: 0.0)
        for step in range(5):
            batch = [part[:1] if step == 2 else part for part in batches[step % len(batches)]]
            loss = model(*batch)
            loss.backward()
            run.seen.append(float(loss))
            run.end_step()
        found.append({"seen": run.seen, "weights": weights(model)})
        hytrain_fx.close(model)
    return found


# ---- what is where ----


def together(works: Mapping[str, Callable[[int, int], Any]], rank: int, size: int) -> Found:
    """Several of these functions in one process of each rank, by name."""
    return {name: work(rank, size) for name, work in works.items()}


def what_rests(weights: str, rank: int, size: int) -> Found:
    """After steps: what parameters have memory, what slots and shards take, and what is told.

    Then where shards are when all states have moved to the device, and back.
    """
    model: Any = net(rank)
    optimizer = compiled(model, k=0, weights=weights)
    run = Run(model, optimizer, rank, lambda of: 0.0)
    for step in range(3):
        run.backward(step)
        run.end_step()
    session = session_of(model)
    with without_torch_function():
        bytes_of = {name: p.untyped_storage().nbytes() for name, p in zip(session.table.names, session.table.parameters, strict=True)}
    of, fetched, memory = session.states.streamed, session.nodes.fetched, session.resources.in_use()
    found = {
        "away": [session.table.names[row] for row, one in of.items() if not one.has_memory],
        "shards": {session.table.names[row]: one.shard.nbytes for row, one in of.items() if one.shard is not None},
        "slots": fetched.slot_bytes, "fetched": fetched.bytes_fetched, "bytes": bytes_of, "runs": dict(session.nodes.runs),
        "in use": memory.weights_bytes, "in slots": memory.weight_slots_bytes, "text": hytrain_fx.explain(model).details()}
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.neg() for name, value in saved.items()})
    negated = model.state_dict()
    found["negated"] = all(torch.equal(negated[name], value.neg()) for name, value in saved.items())
    with torch.no_grad():
        negated["head.weight"].neg_()  # writes into what state_dict() has given are followed
    found["head"] = torch.equal(model.state_dict()["head.weight"], saved["head.weight"])
    found["away after saving"] = [session.table.names[row] for row, one in of.items() if not one.has_memory]
    model.load_state_dict(saved)
    assert memory.estimate is not None
    found["estimate"] = memory.estimate.weights_bytes, memory.estimate.weight_slots_bytes
    window = session.planning.units.window
    assert window is not None
    for place in (Placement.GPU, Placement.STREAM, Placement.CPU):
        session.place(plan_of(session, [place]))
        run.backward(9)
        run.end_step()
        session.drain()
        on_device = {session.table.names[row] for row, one in of.items() if one.shard is not None}
        found[place] = on_device, window.back_bytes(), session.resources.in_use().weights_bytes
    hytrain_fx.settle(model)
    found["settled"] = [session.table.names[row] for row, one in of.items() if one.shows]
    session.eager.streamed.keep([0])
    session.place(plan_of(session, [Placement.GPU]))
    run.backward(9)
    run.end_step()
    found["sharded again"] = 0 in of
    hytrain_fx.close(model)
    return found


# ---- one rank alone ----


def _trained(rank: int, **options: Any) -> Run:
    model: Any = net(rank)
    run = Run(model, compiled(model, weights="sharded", **options), rank, lambda of: 0.0)
    run.backward(0)
    run.end_step()
    return run


def alone(what: str, settles: bool, rank: int, size: int) -> Any:
    """The first rank reads a weight or evaluates, then all train on: the weights at the end."""
    run = _trained(rank)
    if settles:
        hytrain_fx.settle(run.model)
    if rank == 0:
        with torch.no_grad():
            run.note(run.model.head.weight if what == "read" else run.model(tokens_of(rank, 5)))
    run.backward(1)
    run.end_step()
    return weights(run.model)


def branches(rank: int, size: int) -> None:
    """A layer is used by one rank alone: another graph there."""
    run = _trained(rank)
    run.side = rank == 0
    run.backward(1)


def in_another_order(rank: int, size: int) -> None:
    """The nodes of one rank's backward make gradients in another order than those of the other."""
    run = _trained(rank)
    averaged = session_of(run.model).nodes.averaged
    begin = AveragedGradients.begin
    assert averaged is not None
    averaged.begin = lambda nodes: begin(averaged, tuple(reversed(nodes)) if rank else nodes)  # type: ignore[method-assign]
    run.backward(1)


def held_by_one(rank: int, size: int) -> Sequence[Found]:
    """One rank alone holds a view of a weight, which shows each update."""
    found = []
    for of in ALL_KINDS:
        model: Any = net(rank)
        run = Run(model, compiled(model, weights=of), rank, lambda of: 0.0)
        view = model.head.weight.detach() if rank == 0 else None
        for step in range(3):
            run.backward(step)
            run.end_step()
            if view is not None:
                run.note(view)
        found.append({"seen": run.seen, "weights": weights(model)})
        del view
        hytrain_fx.close(model)
    return found


def read_elsewhere(rank: int, size: int) -> list[str]:
    """Another thread reads a weight, then a forked child; training goes on."""
    run, errors = _trained(rank), []

    def read() -> None:
        try:
            run.note(run.model.head.weight)
        except HytrainError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    reads, writes = os.pipe()
    if os.fork() == 0:
        read()
        os.write(writes, errors[-1].encode())
        os._exit(0)
    errors.append(os.read(reads, 1000).decode())
    run.backward(1)
    run.end_step()
    return errors


def dropped(rank: int, size: int) -> tuple[bool, bool]:
    """The model goes without close(): of a parameter that is kept, this rank's shard stays."""
    run = _trained(rank)
    kept: Any = run.model.head.weight
    run.backward(1)  # memory of the first compiled forward is given back here at the latest
    run.end_step()
    session = session_of(run.model)
    row = session.table.row_of[id(kept)]
    session.drain()
    assert not session.states.streamed[row].has_memory
    shard, expected = session.table.shards[row], session.states.home(row).clone()
    del session
    del run
    gc.collect()
    with without_torch_function():
        flat = kept.detach().flatten()
        own = torch.equal(flat[shard.begin : shard.end], expected)
        return own, bool(torch.cat([flat[: shard.begin], flat[shard.end :]]).isnan().all())


def one_without_room(without: int, rank: int, size: int) -> tuple[str, bool]:
    """One rank's device has no room for whole weights: what close() says, and whether it closed."""
    run = _trained(rank)
    session, said = session_of(run.model), ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == without:
            patch.setattr(memory, "room_bytes", lambda device, own_bytes: 0)
        try:
            hytrain_fx.close(run.model)
        except UnsupportedError as error:
            said = str(error)
    closed = session.closed
    hytrain_fx.close(run.model)  # with room again
    return said, closed


def one_ends(rank: int, size: int) -> None:
    """The last rank ends after its first step: the others wait for its weights."""
    run = _trained(rank)
    distributed.barrier()
    if rank != size - 1:
        run.backward(1)


def refused(rank: int, size: int) -> list[str]:
    """What several ranks cannot do with weights elsewhere."""
    errors = []
    for dtype, options in ((torch.bfloat16, {"weights": "streamed"}), (torch.float32, {"weights": "sharded"}),
                           (torch.bfloat16, {"weights": "sharded", "process_group": False}),
                           (torch.bfloat16, {"weights": "sharded", "engine": "torch"}),
                           (torch.bfloat16, {"weights": "sharded_host", "speculate": True})):
        model = net(rank, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
        try:
            hytrain_fx.compile(model, optimizer, **options)
        except HytrainError as error:
            errors.append(str(error))
    model = net(rank)
    try:
        hytrain_fx.compile(model, torch.optim.SGD(model.parameters(), lr=1e-2), weights="sharded")
    except HytrainError as error:
        errors.append(str(error))
    model = net(rank)
    try:
        hytrain_fx.compile(model, hytrain_fx.Lion(model.parameters(), lr=1e-2), weights="sharded_host")
    except HytrainError as error:
        errors.append(str(error))
    return errors
