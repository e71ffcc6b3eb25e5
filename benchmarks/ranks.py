"""Several ranks train one model, each on its own batches: ours beside PyTorch's ways, as a table.

    python -m benchmarks ranks --gpus 2 --size 3b --batch 4 --out ranks.json
    python -m benchmarks ranks --gpus 2 --size tiny --batch 1 --sequence 32     # CPUs, gloo

Each row is started by torchrun: a process a GPU, cores in equal blocks. A step is wall time over a
window without synchronisation, ended by a full drain and a barrier of all ranks; three windows.
Rows in the file are not run again.

    floor          DistributedDataParallel, compiled: forward, backward, mean of the gradients
    ddp            the same with fused AdamW on fp32 masters, on every GPU
    fsdp2          fully_shard, blocks compiled, fp32 parameters, bf16 compute
    fsdp2_offload  the same with CPUOffloadPolicy
    zero2_offload  DeepSpeed ZeRO-2 with the optimizer on the CPU, compiled, bf16 parameters
    zero3_offload  the same with ZeRO-3
    host           ours, gpu_states=0.0
    quarter        ours, gpu_states=0.25
    solved         ours, as it comes
    clipped        ours, gpu_states=0.0, gradients clipped to 1.0
    host_bf16      ours, gpu_states=0.0, moments="bf16"
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import hytrain_fx
from benchmarks import peers
from benchmarks.case import CannotRun, Case
from benchmarks.machine import machine, machine_text
from benchmarks.markdown import table
from benchmarks.models import Batch, batches, build
from benchmarks.runner import environment
from benchmarks.timeline import drawn
from benchmarks.trainer import backward_of
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.bench.memory import memory
from hytrain_fx.forecast.bench.process import row_in, run_to_end, why_none
from hytrain_fx.forecast.bench.windows import CALM_STEPS, OUR_WARMUP_STEPS, timed
from hytrain_fx.runtime.energy import meter_of

OURS: Mapping[str, Mapping[str, Any]] = {
    "host": {"gpu_states": 0.0}, "quarter": {"gpu_states": 0.25}, "solved": {}, "clipped": {"gpu_states": 0.0},
    "host_bf16": {"gpu_states": 0.0, "moments": "bf16"},
}
ZERO_STAGES = {"zero2_offload": 2, "zero3_offload": 3}
ROWS = ("floor", "ddp", "fsdp2", "fsdp2_offload", *ZERO_STAGES, *OURS)
WARMUP_STEPS = {row: OUR_WARMUP_STEPS if row in OURS else 6 for row in ROWS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks ranks`."""
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="ranks; without GPUs they train on the CPU")
    parser.add_argument("--size", default="3b", help="a Llama shape or a family of the zoo")
    parser.add_argument("--batch", type=int, default=4, help="sequences on each rank")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens in one")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--window", type=int, default=10, help="steps in one of the three windows")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for one row")
    parser.add_argument("--out", type=Path, default=Path("ranks.json"), help="the rows; what each of them prints is beside it")
    parser.add_argument("--look", action="store_true",
                        help="ours: explain's text and three recorded steps of rank 0 go to the row's log, and a Chrome trace beside it")
    parser.add_argument("--rank-of", choices=ROWS, default=None, help=argparse.SUPPRESS)  # what torchrun starts


def run(arguments: argparse.Namespace) -> None:
    """Run what is missing, and print the table. Raises CannotRun."""
    if arguments.rank_of is not None:
        _run_rank(arguments)
        return
    if arguments.gpus < 2:
        raise CannotRun(f"found --gpus {arguments.gpus}, expected at least 2; for one GPU: python -m benchmarks table")
    if torch.cuda.is_available() and torch.cuda.device_count() < arguments.gpus:
        raise CannotRun(f"found {torch.cuda.device_count()} GPUs, expected {arguments.gpus}")
    rows: dict[str, dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in arguments.rows:
        key = f"{name} {arguments.size} {arguments.batch}x{arguments.sequence} on {arguments.gpus}"
        if "step_s" not in rows.get(key, {}):
            rows[key] = _row_of(name, arguments)
            arguments.out.write_text(json.dumps(rows, indent=1))
        print(f"{key}: {rows[key].get('error') or str(rows[key]['step_s']) + ' s a step'}", flush=True)
    print(ranks_markdown(rows))


def ranks_markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows as Markdown. Ratios are between rows of one boot of one machine, size and batch."""
    lines = []
    for row in rows.values():
        if "error" in row:
            lines.append([row["row"], row["workload"], row["error"], *["-"] * 5])
            continue
        floor = next((of["step_s"] for of in rows.values() if "error" not in of and of["row"] == "floor"
                      and (of["workload"], of["machine"]) == (row["workload"], row["machine"])), None)
        of_floor = f"{row['step_s'] / floor:.3f}" if floor else "-"
        spread = (max(row["windows_s"]) - min(row["windows_s"])) / row["step_s"]
        gpu_gb = "-" if row["gpu_gb"] is None else f"{row['gpu_gb']:.1f}"
        lines.append([row["row"], row["workload"], f"{row['step_s']:.4f}", f"{spread:.1%}", of_floor, gpu_gb,
                      f"{row['host_gb']:.1f}", row["plan"] or "-"])
    machines = dict.fromkeys(machine_text(row["machine"]) for row in rows.values())
    head = ("row", "model, batch a rank", "s a step", "spread", "of floor", "GPU GB, largest", "host GB, all ranks", "plan of rank 0")
    return "\n\n".join(["\n".join(f"- {of}" for of in machines), table(head, lines)])


def _row_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks of one row, and read what rank 0 prints."""
    warmup = WARMUP_STEPS[name] if arguments.warmup is None else arguments.warmup
    same = ["--gpus", arguments.gpus, "--size", arguments.size, "--batch", arguments.batch, "--sequence", arguments.sequence,
            "--window", arguments.window, "--warmup", warmup, "--out", arguments.out, *(["--look"] if arguments.look else [])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.gpus), "-m", "benchmarks",
               "ranks", "--rank-of", name, *map(str, same)]
    log = arguments.out.with_suffix(f".{name}.log")
    with log.open("w") as file:
        status = run_to_end(command, file.fileno(), arguments.limit_s, environment())
    printed = log.read_text(errors="replace")
    found = row_in(printed) if status in (0, None) else None
    workload = f"{arguments.size}, {arguments.batch} x {arguments.sequence}, {arguments.gpus} ranks"
    named = {"row": name, "workload": workload, "machine": machine()}
    return {**named, **(found if found is not None else {"error": why_none(status, printed, arguments.limit_s)})}


# ---- one rank ----


def _run_rank(arguments: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // size, 1)
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each] or cores)
    torch.set_num_threads(each)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    name = arguments.rank_of
    model = build(arguments.size, arguments.sequence, device, torch.float32 if name.startswith("fsdp2") else torch.bfloat16)
    mode = "zero_offload" if name in ZERO_STAGES else "floor"
    case = Case(mode, arguments.size, arguments.batch, arguments.sequence, clip=1.0 if name == "clipped" else None)
    trainer = _trainer(name, case, model, device)

    def finish() -> None:
        trainer.finish()
        distributed.barrier()

    together = Trainer(trainer.step, finish, tries=_Unsettled(trainer))
    of_all = batches(case.size, case.batch, case.sequence, device, torch.bfloat16)
    of_rank = itertools.islice(of_all, rank, None, size)
    row = timed(together, of_rank, arguments.warmup, arguments.window, device, meter_of(device), case.tokens)
    taken: list[Any] = [None] * size
    distributed.all_gather_object(taken, memory(device))
    gpu_gb = [of["gpu_peak_allocated_gb"] for of in taken]
    row |= {"gpu_gb": None if None in gpu_gb else max(gpu_gb), "host_gb": round(sum(of["host_rss_gb"] for of in taken), 2),
            "plan": _in_words(trainer.about().get("plan"))}
    if rank == 0:
        print(json.dumps(row), flush=True)
    if arguments.look and name in OURS:
        paths = [arguments.out.with_suffix(f".{name}.trace.json")] if rank == 0 else []
        drawn(model, lambda: trainer.step(next(of_rank)), finish, paths, barrier=False)
        if rank == 0:
            print(hytrain_fx.explain(model).details(), flush=True)
    distributed.barrier()
    os._exit(0)  # threads of a group, or of an engine, may keep the process from ending


class _Unsettled:
    """Whether any rank has made a plan lately, or still tries ways of updating: the same on all.

    Asked after each step. The ranks tell each other after every tenth, so that the steps between,
    which plans go by, are not held up.
    """

    def __init__(self, trainer: Trainer[Batch]) -> None:
        self._trainer = trainer
        self._group = distributed.new_group(backend="gloo")
        self._asked = 0
        self._plans = 0
        self._any = True

    def __call__(self) -> bool:
        self._asked += 1
        if self._asked % CALM_STEPS == 0:
            plans = self._trainer.plans()
            found = torch.tensor([plans != self._plans or self._trainer.tries()], dtype=torch.int64)
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
            self._plans, self._any = plans, bool(found)
        return self._any


def _in_words(plan: Mapping[str, Any] | None) -> str | None:
    if plan is None:
        return None
    shares = " / ".join(f"{share:.0%} {name}" for name, share in plan["share"].items())
    return f"k={plan['k']} of {plan['units']}, {shares}"


def _trainer(name: str, case: Case, model: nn.Module, device: torch.device) -> Trainer[Batch]:
    if name in OURS:
        return loops.ours(model, backward_of(case, model, device), OURS[name])
    if name in ZERO_STAGES:
        return peers.zero_offload(case, model, device, ZERO_STAGES[name])
    if name.startswith("fsdp2"):
        return peers.fsdp2(case, model, device, offload=name == "fsdp2_offload")
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    backward = backward_of(case, ddp, device)
    return loops.floor(ddp, backward) if name == "floor" else loops.on_device(ddp, backward, fused=True)
