"""What each of several processes does in test_ranks.py, and how they are started.

Each rank runs one loop on a model of hytrain_fx, and on a compiled one whose gradients are averaged
by hand: one after the other, without a bucket.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_

import hytrain_fx
from hytrain_fx.api import session_of
from hytrain_fx.ir.shard import shard_of
from hytrain_fx.runtime.engine import Stage

from .interpreted import graphs_interpreted
from .loops import HYPER, HandAdam, assert_same, weights

_GROUP_S, _STACKS_AFTER_S = 60.0, 50.0
_TIMES_LONGER_FUSED = 4  # two ranks compile on the cores that there are, beside another test
WIDTH, WORDS = 48, 40
LOOPS = (("plain", "bfloat16"), ("accumulated", "bfloat16"), ("clipped", "bfloat16"), ("clipped", "float32"),
         ("evaluated", "bfloat16"), ("scaler", "float32"), ("moments", "bfloat16"))
STEPS = 5
Found = dict[str, Any]
Said = tuple[str, float]
Work = Callable[[int, int], Any]


ONE_GPU: Final = "cpu:gloo,cuda:gloo"
"""Backend of ranks that share a GPU: NCCL takes one rank for each."""


def said_by(call: Callable[[], object]) -> Said:
    """What it has raised, and after how many seconds."""
    begin_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return "no error", time.monotonic() - begin_s


def started(work: Work, size: int, folder: Path, timeout_s: float = _GROUP_S, backend: str = "gloo", *, fused: bool = False) -> list[Any]:
    """What `work(rank, size)` gives on each of `size` ranks, or its error's text, by rank.

    timeout_s   of the group
    backend     "nccl": each rank has a GPU; ONE_GPU: all ranks have the same
    fused       graphs are Inductor's, as users have them: all times are longer
    """
    longer = _TIMES_LONGER_FUSED if fused else 1
    ranks = begun(work, size, folder, timeout_s * longer, backend, fused=fused)
    end_s = time.monotonic() + 240.0 * longer
    for process in ranks:
        process.join(max(end_s - time.monotonic(), 0.0))
    ends = ["still running" if process.exitcode is None else f"exit code {process.exitcode}" for process in ranks]
    for process in ranks:
        process.kill()
    files = [folder / f"{rank}.pt" for rank in range(size)]
    found = [torch.load(file, map_location="cpu", weights_only=False) if file.exists() else "nothing" for file in files]
    assert all(file.exists() for file in files), (ends, [of if isinstance(of, str) else "a result" for of in found])
    return found


def begun(work: Work, size: int, folder: Path, timeout_s: float, backend: str = "gloo", *, fused: bool = False) -> list[Any]:
    """The processes of ranks that do `work`, as `started`, and write what it gives."""
    port = free_port()
    context: Any = torch.multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")  # CUDA cannot be forked
    if not torch.cuda.is_available():
        context.set_forkserver_preload([f"{__package__}.rank_preload"])  # importing torch takes longer than most of these loops
    same = (work, size, port, timeout_s, backend, fused)
    ranks = [context.Process(target=_run, args=(rank, str(folder / f"{rank}.pt"), *same), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    return ranks


def free_port() -> int:
    """One of this machine that nobody has, for ranks to meet at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _run(rank: int, result: str, work: Work, size: int, port: int, timeout_s: float, backend: str, fused: bool) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    faulthandler.enable()
    threading.Thread(target=_tell_stacks, args=(_STACKS_AFTER_S,), daemon=True).start()
    on_gpu: Any = nullcontext()  # on the CPU no mode is on: under one, torch does not capture Tensor.unflatten
    if backend in ("nccl", ONE_GPU):
        on_gpu = torch.device("cuda", rank if backend == "nccl" else 0)
        torch.cuda.set_device(on_gpu)
    try:
        distributed.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        with nullcontext() if fused else graphs_interpreted(), on_gpu:
            found = work(rank, size)
    except Exception as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    torch.save(found, result)
    os._exit(0)  # a group whose other ranks are gone may not end by itself


def _tell_stacks(each_s: float) -> None:
    """Print where every thread of this rank is, again and again. It is shown where the test fails.

    Not `faulthandler.dump_traceback_later`, which looks at frames that run: one dump of some
    hundreds ends the process.
    """
    pause = threading.Event()
    while not pause.wait(each_s):
        _print_stacks()


def _print_stacks() -> None:
    """In a call of its own: a frame that is kept keeps all that is in it."""
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            print(f"thread {thread}\n", *traceback.format_stack(frame), file=sys.stderr, flush=True)


def device_here() -> torch.device:
    """Where this rank trains, or a process without ranks."""
    return torch.get_default_device()


def require_bits_by_hand(ranks: Sequence[Mapping[str, Sequence[Found]]], noted: str) -> None:
    """Each loop of each rank has the numbers and weights of the first run, which is by hand.

    `noted`: under which name a run has its numbers
    """
    for rank in ranks:
        for loop, (by_hand, *runs) in rank.items():
            for run in runs:
                assert run[noted] == by_hand[noted], loop
                assert_same(run["weights"], by_hand["weights"])


class Net(nn.Module):
    """Large and small parameters, a buffer, and a layer that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.breaks = False
        self.seen: list[float] = []  # at graph breaks

    def forward(self, tokens: torch.Tensor, side: bool = False) -> torch.Tensor:
        x = self.words(tokens) + self.shift
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
            self.seen.append(float(self.head.weight.detach().abs().sum()))
        if side:
            x = x + self.side(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def net(rank: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Each rank begins with other weights."""
    torch._dynamo.reset()
    torch.manual_seed(100 + rank)
    return Net().to(dtype)


def tokens_of(rank: int, number: int) -> torch.Tensor:
    """A batch of one rank."""
    draw = torch.Generator("cpu").manual_seed(1000 * rank + number)
    return torch.randint(0, WORDS, (2, 8), generator=draw, device="cpu").to(device_here())


def compiled(model: nn.Module, **options: Any) -> Any:
    """The optimizer of a model that hytrain_fx has compiled."""
    return hytrain_fx.compile(model, torch.optim.AdamW(model.parameters(), **HYPER), workers=1, **options)[1]


def ours(rank: int, dtype: torch.dtype, loop: str, **options: Any) -> Found:
    """The loop with hytrain_fx: losses, weights, node runs, and what `explain` says.

    Every second rank is slow.
    """
    model: Any = net(rank, dtype)
    optimizer = compiled(model, moments=moments_in(loop), **options)
    session = session_of(model)
    for stage in (Stage.LANDING, Stage.CPU_UPDATE, Stage.H2D) if rank % 2 else ():
        session.engine.set_delay(stage, 500)
    losses = _trained(model, optimizer, rank, loop, lambda: None, clip=lambda of: float(clip_grad_norm_(of.parameters(), 0.5)))
    found = {"losses": losses, "weights": weights(model), "runs": dict(session.nodes.runs), "text": hytrain_fx.explain(model).details()}
    graphs = hytrain_fx.inspect(model)
    found["nodes"] = [node.note for graph in graphs for node in graphs.nodes(graph)]
    found["states"] = [state["exp_avg_sq"].clone() for state in optimizer.state_dict()["state"].values()]
    hytrain_fx.close(model)
    return found


def moments_in(loop: str) -> str:
    """Ranks round shards by chance as one process does whole states."""
    return "bf16" if loop == "moments" else "fp32"


class AveragedByHand:
    """The gradients of a model, averaged over the ranks one after the other, as torch has them."""

    def __init__(self, model: nn.Module, size: int) -> None:
        self._model, self._size = model, size
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    def average(self) -> None:
        """Of this backward's gradients alone, as nodes see them."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self._size)
                distributed.all_reduce(parameter.grad)
                before = self._sums.get(parameter)
                self._sums[parameter] = parameter.grad if before is None else parameter.grad + before
                parameter.grad = None

    def put_back(self) -> None:
        """Before the step: `.grad` is the sum over its backwards."""
        for parameter in self._model.parameters():
            parameter.grad = self._sums.pop(parameter, None)


def by_hand(rank: int, size: int, dtype: torch.dtype, loop: str) -> Found:
    """The same with torch alone."""
    model: Any = net(rank, dtype)
    begin_alike(model)
    gradients = AveragedByHand(model, size)
    model.compile()
    optimizer = HandAdam(model.parameters(), moments=moments_in(loop), **HYPER)
    losses = _trained(model, optimizer, rank, loop, gradients.average, gradients.put_back,
                      partial(clipped_in_shards, size))
    return {"losses": losses, "weights": weights(model)}


def _trained(
    model: Any, optimizer: Any, rank: int, loop: str, after_backward: Callable[[], None], before_step: Callable[[], None] = lambda: None,
    clip: Callable[[Any], float] = lambda model: 0.0
) -> list[float]:
    losses: list[float] = []
    scaler = torch.amp.GradScaler(device_here().type, init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        if loop == "scaler":
            losses.append(_scaled_step(model, optimizer, scaler, rank, step, after_backward, before_step))
            continue
        for micro in range(2 if loop == "accumulated" else 1):
            loss = model(tokens_of(rank, 10 * step + micro))
            loss.backward()
            after_backward()
            losses.append(loss.item())
        before_step()
        if loop == "clipped":
            losses.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
        if loop == "evaluated":
            with torch.no_grad():
                losses.append(model(tokens_of(rank, 999)).item())
    return losses


def backward_averaged(parameters: Iterable[nn.Parameter], size: int, loss: torch.Tensor) -> None:
    """The loss's backward, whose gradients alone are averaged, one after the other.

    What was there before is added then. Where the backward ends in an error it does so on all
    ranks, after the same gradients.
    """
    before = {p: p.grad for p in parameters}
    for p in before:
        p.grad = None
    try:
        loss.backward()
    finally:
        for p, grad in before.items():
            if p.grad is not None:
                p.grad.div_(size)
                distributed.all_reduce(p.grad)
            if grad is not None:
                p.grad = grad if p.grad is None else grad + p.grad


def clipped_in_shards(size: int, model: nn.Module, most: float = 0.5, *, owned: bool = False) -> float:
    """`clip_grad_norm_`, where the norm of a matrix is that of its shards' norms.

    owned   matrices have owners: one shard has all elements
    """
    total = norm_in_shards(size, model.parameters(), owned=owned)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, total)
    return float(total)


def norm_in_shards(size: int, parameters: Iterable[nn.Parameter], *, owned: bool = False) -> torch.Tensor:
    """Of all gradients, 0-dim, where the norm of a matrix is that of its shards' norms."""
    norms: list[torch.Tensor] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        shard = shard_of(grad.shape, 0, size)
        if shard is None:
            norms += torch._foreach_norm([grad])  # as clip_grad_norm_ has it; on CUDA in other bits than vector_norm
        else:
            parts = [grad.flatten()] if owned else grad.flatten().split(shard.sizes)
            of_shards = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts]
            norms.append(torch.linalg.vector_norm(torch.stack(of_shards), dtype=torch.float64).float().to(grad.dtype))
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _scaled_step(
    model: Any, optimizer: Any, scaler: torch.amp.GradScaler, rank: int, step: int, after_backward: Callable[[], None],
    before_step: Callable[[], None]
) -> float:
    """A step with torch's GradScaler.

    In the third one the last rank has infinite gradients, so all leave it out.
    """
    loss = model(tokens_of(rank, step))
    factor = torch.inf if step == 2 and rank else 1.0
    scaler.scale(factor * loss).backward()
    after_backward()
    before_step()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(loss.detach()) + scaler.get_scale()


# ---- what ranks do ----


def every_loop(loops: Sequence[tuple[str, str]], rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """Each of these loops by hand, and ours with all states on the host, and some on the device."""
    done: dict[str, Sequence[Found]] = {}
    for loop, dtype in loops:
        of = getattr(torch, dtype)
        done[f"{loop} {dtype}"] = [by_hand(rank, size, of, loop), ours(rank, of, loop, k=0), ours(rank, of, loop, k=3, speculate=True)]
    return done


def two_plans(rank: int, size: int) -> Sequence[Found]:
    """Ours, with every state on the host and with none, and with another plan on each rank."""
    return [ours(rank, torch.bfloat16, "plain", k=k, engine="native") for k in (0, 2, rank)]


def begin_alike(model: nn.Module) -> None:
    """Every rank has the first one's values."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            distributed.broadcast(tensor, 0)


def average_used(model: nn.Module, size: int) -> None:
    """Average each gradient that any rank has; one that has none counts as zeros."""
    for parameter in model.parameters():
        used = torch.tensor([parameter.grad is not None], dtype=torch.int64)
        distributed.all_reduce(used)
        if used:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.div_(size)
            distributed.all_reduce(parameter.grad)


def other_branches(rank: int, size: int) -> Mapping[str, Sequence[Found]]:
    """A layer is used by one rank, by the other, by both, by none: captured or eager; k=0 and 3."""
    done: dict[str, Sequence[Found]] = {}
    for eager in (False, True):
        runs = [_branches_by_hand(rank, size, eager), *(_branches_of_ours(rank, eager, k) for k in (0, 3))]
        done[f"eager {eager}"] = runs
    return done


def _branches_by_hand(rank: int, size: int, eager: bool) -> Found:
    model: Any = _branching(rank, eager)
    begin_alike(model)
    model.compile()
    return _branch_steps(model, HandAdam(model.parameters(), **HYPER), rank, lambda: average_used(model, size))


def _branches_of_ours(rank: int, eager: bool, k: int) -> Found:
    model = _branching(rank, eager)
    found = _branch_steps(model, compiled(model, k=k), rank, lambda: None)
    hytrain_fx.close(model)
    return found


def _branching(rank: int, eager: bool) -> Any:
    model: Any = net(rank)
    if eager:
        model.side.forward = torch.compiler.disable(model.side.forward)
    return model


def _branch_steps(model: Any, optimizer: Any, rank: int, after_backward: Callable[[], None]) -> Found:
    losses = []
    for step, takers in enumerate([(0,), (0, 1), (1,), (), (1,), (0,), (0, 1)]):
        loss = model(tokens_of(rank, step), side=rank in takers)
        loss.backward()
        after_backward()
        losses.append(loss.item())
        losses.append(sum(float(p.grad.double().abs().sum()) for p in model.side.parameters() if p.grad is not None))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": weights(model)}


def one_more_backward(rank: int, size: int) -> None:
    """The last rank makes two backwards before its step, the others one."""
    model: Any = net(0)
    optimizer = compiled(model)
    for number in range(2 if rank == size - 1 else 1):
        model(tokens_of(rank, number)).backward()
    optimizer.step()


def other_model(rank: int, size: int) -> None:
    """The last rank has another dtype."""
    compiled(net(0, torch.float32 if rank == size - 1 else torch.bfloat16))


def one_stops(rank: int, size: int) -> None:
    """The last rank makes one backward less."""
    model: Any = net(0)
    optimizer = compiled(model)
    for step in range(2):
        if step and rank == size - 1:
            time.sleep(10.0)
            return
        model(tokens_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def eager_gradient(rank: int, size: int) -> str:
    """A part of the model that is not captured makes gradients, in two backwards of a step."""
    model: Any = net(0)
    model.side.forward = torch.compiler.disable(model.side.forward)
    optimizer = compiled(model)
    for number in range(2):
        model(tokens_of(rank, number), side=True).backward()
    try:
        optimizer.step()
    except hytrain_fx.errors.UnsupportedError as error:
        return str(error)
    return "no error"


def left_alone(rank: int, size: int) -> Found:
    """Ranks that train on their own, in a group that is there for something else."""
    return ours(rank, torch.bfloat16, "plain", k=0, process_group=False)


def in_pairs(rank: int, size: int) -> Found:
    """Groups of two ranks, each with a model of its own."""
    groups = [distributed.new_group([begin, begin + 1]) for begin in range(0, size, 2)]
    return ours(rank, torch.bfloat16, "plain", k=0, process_group=groups[rank // 2])


def broken_off(rank: int, size: int) -> list[str]:
    """On the last rank a node of the second backward fails once; it tries again."""
    model: Any = net(rank)
    optimizer = compiled(model)
    nodes, errors = session_of(model).nodes, []
    offload_and_step, calls = nodes.offload_and_step, 0

    def fails_once(rows: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        nonlocal calls
        calls += 1
        if rank == size - 1 and calls == 9:
            raise KeyboardInterrupt("by hand")
        offload_and_step(rows, grads)

    nodes.offload_and_step = fails_once  # type: ignore[method-assign]
    for step in range(3):
        try:
            model(tokens_of(rank, step)).backward()
            optimizer.step()
        except (hytrain_fx.errors.RankError, KeyboardInterrupt) as error:
            errors.append(f"{type(error).__name__}: {error}")
        optimizer.zero_grad()
    return errors


def two_nodes(rank: int, size: int) -> Found:
    """Two machines of two ranks each, as torchrun tells."""
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2", GROUP_RANK=str(rank // 2))
    return ours(rank, torch.bfloat16, "clipped", k=rank % 3)
