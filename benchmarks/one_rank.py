"""One of the processes that torchrun starts for a row of `python -m benchmarks ranks`.

It trains on its own batches. Rank 0 prints the row.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import hytrain_fx
from benchmarks import families, llama, peers
from benchmarks.case import CannotRun, Case
from benchmarks.models import Batch, batches, build, trained
from benchmarks.own_modes import option_of
from benchmarks.steps import checksum
from benchmarks.timeline import drawn
from benchmarks.trainer import Step, backward_of
from hytrain_fx.api import session_of
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.bench.memory import memory
from hytrain_fx.forecast.bench.windows import CALM_STEPS, timed
from hytrain_fx.runtime.energy import meter_of
from hytrain_fx.runtime.engine import Stage
from hytrain_fx.session.startup_text import startup_line

OURS: Mapping[str, Mapping[str, Any]] = {
    "host": {"gpu_states": 0.0}, "quarter": {"gpu_states": 0.25}, "solved": {}, "clipped": {"gpu_states": 0.0},
    "host_bf16": {"gpu_states": 0.0, "moments": "bf16"}, "sharded": {"weights": "sharded"},
}
ZERO_STAGES = {"zero2_offload": 2, "zero3_offload": 3}
ROWS = ("floor", "ddp", "by_hand", "fsdp2", "fsdp2_offload", *ZERO_STAGES, *OURS)
SCALED_EVERY = "scaled_every"  # in a row's title
_SLOWED = (Stage.LANDING, Stage.CPU_UPDATE, Stage.H2D)  # on a GPU the first two: its copies take no delay
_SLOWED_BY_US = 500.0
_POLL_S = 0.05


@dataclass(frozen=True)
class RankRow:
    """What a row measures, the same on each rank.

    name      one of ROWS
    options   `NAME=VALUE` options of `hytrain_fx.compile`, beside those that the name stands for
    bits      so many steps are trained for losses and a sum of all weights' bits, and not timed;
              0: it is timed
    scaled_every   with gradients clipped: as `Case` has it
    """

    name: str
    size: str
    batch: int
    sequence: int
    checkpointing: bool
    options: tuple[str, ...]
    window: int
    warmup: int
    bits: int
    scaled_every: int = 1

    @property
    def workload(self) -> str:
        """Model and batch of a rank: rows that agree in it did the same training."""
        bits = f", {self.bits} steps for their bits" if self.bits else ""
        return f"{self.size}, {self.batch} x {self.sequence}{', recomputed' if self.checkpointing else ''}{bits}"

    @property
    def title(self) -> str:
        """Its name and options."""
        return " ".join([self.name, *([f"{SCALED_EVERY}={self.scaled_every}"] if self.scaled_every != 1 else []), *self.options])


def compiled_file(turn: Path) -> Path:
    """Is there when every rank of the row has compiled, and may be timed once `turn` is there."""
    return turn.with_name(turn.name + ".compiled")


def run(row: RankRow, turn: Path | None, trace: Path | None) -> None:
    """Train as the row says; ends the process.

    turn    other rows compile beside it
    trace   where rank 0 of ours writes three more steps, which all ranks show with `explain`
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // size, 1)
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each] or cores)
    torch.set_num_threads(each)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(bool(row.bits))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, more = _model_of(row, device)
    trainer = _trainer(row, more, model, device)
    of_rank = itertools.islice(batches(row.size, row.batch, row.sequence, device, torch.bfloat16), rank, None, size)
    trainer.step(next(of_rank))
    trainer.finish()
    if rank == 0 and row.name in OURS:
        print(f"after the first step, {startup_line(session_of(model).startup)}", flush=True)
    _wait_for(turn)
    found = _bits(row, model, trainer, of_rank) if row.bits else _timed(row, trainer, of_rank, device)
    params = sum(parameter.numel() for parameter in trained(model))
    found |= {"params": params, "plan": _in_words(trainer.about().get("plan")), **_memory(device, trainer)}
    if rank == 0:
        print(json.dumps(found), flush=True)
    if trace is not None and row.name in OURS:
        drawn(model, lambda: trainer.step(next(of_rank)), trainer.finish, [trace] if rank == 0 else [], barrier=False)
        for other in range(size):
            distributed.barrier()
            if rank == other:
                print(f"rank {rank}\n{hytrain_fx.explain(model).details()}", flush=True)
    distributed.barrier()
    os._exit(0)  # threads of a group, or of an engine, may keep the process from ending


def _wait_for(turn: Path | None) -> None:
    """Until no other row compiles or is timed.

    Ranks wait on the CPU: a barrier of NCCL takes the GPU.
    """
    if turn is None:
        return
    group = distributed.new_group(backend="gloo")
    distributed.barrier(group)
    if distributed.get_rank() == 0:
        compiled_file(turn).touch()
        while not turn.exists():
            time.sleep(_POLL_S)
    distributed.barrier(group)


def _timed(row: RankRow, trainer: Trainer[Batch], of_rank: Iterator[Batch], device: torch.device) -> dict[str, Any]:
    def finish() -> None:
        trainer.finish()
        distributed.barrier()

    unsettled = _Unsettled(trainer)
    together = Trainer(trainer.step, finish, tries=unsettled, held_up_s=trainer.held_up_s)
    found = timed(together, of_rank, row.warmup, row.window, device, meter_of(device), row.batch * row.sequence)
    return found | {"plans_in_windows": trainer.plans() - unsettled.plans, "predicted_step_s": trainer.about().get("predicted_step_s")}


def _bits(row: RankRow, model: nn.Module, trainer: Trainer[Batch], of_rank: Iterator[Batch]) -> dict[str, Any]:
    """Losses of rank 0, and a sum of all weights' bits from every rank.

    Of ours odd ranks are slow.
    """
    if row.name in OURS and distributed.get_rank() % 2:
        for stage in _SLOWED:
            session_of(model).engine.set_delay(stage, _SLOWED_BY_US)
    began_s = time.perf_counter()
    losses = torch.stack([trainer.step(next(of_rank)) for _ in range(row.bits)]).tolist()
    trainer.finish()
    step_s = (time.perf_counter() - began_s) / row.bits
    return {"step_s": round(step_s, 4), "losses": losses, "checksums": _of_all_ranks(checksum(model))}


def _of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def _memory(device: torch.device, trainer: Trainer[Batch]) -> dict[str, Any]:
    """The largest rank's peak on the device, what all have of the host, and estimates of rank 0."""
    taken = _of_all_ranks(memory(device))
    gpu_gb = [of["gpu_peak_allocated_gb"] for of in taken]
    return {"gpu_gb": None if None in gpu_gb else max(gpu_gb), "host_gb": round(sum(of["host_rss_gb"] for of in taken), 2),
            "ranks_memory": taken, "memory_in_use": trainer.about().get("memory_in_use")}


class _Unsettled:
    """Whether any rank has made a plan lately, or still tries ways of updating: the same on all.

    Asked after each step. The ranks tell each other after every tenth, so that the steps between,
    which plans go by, are not held up.

    plans   of this rank, when it was asked last
    """

    def __init__(self, trainer: Trainer[Batch]) -> None:
        self._trainer = trainer
        self._group = distributed.new_group(backend="gloo")
        self.plans = trainer.plans()
        self._asked = 0
        self._told_plans = 0
        self._any = True

    def __call__(self) -> bool:
        self._asked += 1
        self.plans = self._trainer.plans()
        if self._asked % CALM_STEPS == 0:
            found = torch.tensor([self.plans != self._told_plans or self._trainer.tries()], dtype=torch.int64)
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
            self._told_plans, self._any = self.plans, bool(found)
        return self._any


def _in_words(plan: Mapping[str, Any] | None) -> str | None:
    if plan is None:
        return None
    shares = " / ".join(f"{share:.0%} {name}" for name, share in plan["share"].items())
    return f"k={plan['k']} of {plan['units']}, {shares}"


def _model_of(row: RankRow, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and further options of ours.

    A Llama with weights in shards is whole on no device at any time: its values come from a loader.
    """
    if row.name == "sharded" and not families.is_family(row.size):
        model = llama.build(row.size, row.sequence, device, torch.bfloat16, row.checkpointing, on_meta=True)
        return model, {"device": device, "loader": llama.drawn_by_name(model, device)}
    dtype = torch.float32 if row.name.startswith("fsdp2") else torch.bfloat16
    model = build(row.size, row.sequence, device, dtype, row.checkpointing)
    if row.bits and not families.is_family(row.size):
        draw = llama.drawn_by_name(model, device)  # the values that a loader gives, as rows are compared
        model.load_state_dict({name: draw(name) for name in model.state_dict()})
    return model, {}


def _trainer(row: RankRow, more: Mapping[str, Any], model: nn.Module, device: torch.device) -> Trainer[Batch]:
    mode = "zero_offload" if row.name in ZERO_STAGES else "floor"
    case = Case(mode, row.size, row.batch, row.sequence, clip=1.0 if row.name == "clipped" else None, scaled_every=row.scaled_every)
    if row.name in OURS:
        options = {**OURS[row.name], **dict(map(option_of, row.options)), **more}
        return loops.ours(model, backward_of(case, model, device), options)
    if row.options:
        raise CannotRun(f"--option is for ours, row {row.name} has none; found {', '.join(row.options)}")
    if row.name in ZERO_STAGES:
        return peers.zero_offload(case, model, device, ZERO_STAGES[row.name])
    if row.name.startswith("fsdp2"):
        return peers.fsdp2(case, model, device, offload=row.name == "fsdp2_offload")
    if row.name == "by_hand":
        return loops.on_device(model, _averaged(model, backward_of(case, model, device)), foreach=True)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    backward = backward_of(case, ddp, device)
    return loops.floor(ddp, backward) if row.name == "floor" else loops.on_device(ddp, backward, fused=True)


def _averaged(model: nn.Module, backward: Step) -> Step:
    """And each gradient is averaged over the ranks, one after the other: the bits of ours."""
    size = distributed.get_world_size()

    def averaged(batch: Batch) -> torch.Tensor:
        loss = backward(batch)
        for parameter in trained(model):
            if parameter.grad is not None:
                parameter.grad.div_(size)
                distributed.all_reduce(parameter.grad)
        return loss

    return averaged


def arguments_of(row: RankRow) -> Sequence[str]:
    """What `python -m benchmarks ranks` takes to be one rank of this row."""
    words = ["--rank-of", row.name, "--size", row.size, "--batch", row.batch, "--sequence", row.sequence, "--window", row.window,
             "--warmup", row.warmup, "--bits", row.bits, "--scaled-every", row.scaled_every]
    options = [word for option in row.options for word in ("--option", option)]
    return [*map(str, words), *(["--checkpointing"] if row.checkpointing else []), *options]
