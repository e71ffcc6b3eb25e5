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
    host           ours, gpu_states=0.0
    quarter        ours, gpu_states=0.25
    solved         ours, as it comes
    clipped        ours, gpu_states=0.0, gradients clipped to 1.0
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.case import CannotRun
from benchmarks.machine import machine, machine_text
from benchmarks.markdown import table
from benchmarks.models import Batch, batches, blocks, build, loss_of
from benchmarks.runner import ROOT
from hytrain_fx.forecast.bench import loops
from hytrain_fx.forecast.bench.loops import ADAMW, Trainer
from hytrain_fx.forecast.bench.memory import memory
from hytrain_fx.forecast.bench.process import row_in, run_to_end, why_none
from hytrain_fx.forecast.bench.windows import WINDOWS

OURS: Mapping[str, Mapping[str, Any]] = {
    "host": {"gpu_states": 0.0}, "quarter": {"gpu_states": 0.25}, "solved": {}, "clipped": {"gpu_states": 0.0},
}
ROWS = ("floor", "ddp", "fsdp2", "fsdp2_offload", *OURS)
# Every rank makes as many steps, so nobody waits until no plan is made: ours are settled by then.
WARMUP_STEPS = {row: 140 if row in OURS else 6 for row in ROWS}


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
            "--window", arguments.window, "--warmup", warmup]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.gpus), "-m", "benchmarks",
               "ranks", "--rank-of", name, *map(str, same)]
    log = arguments.out.with_suffix(f".{name}.log")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with log.open("w") as file:
        status = run_to_end(command, file.fileno(), arguments.limit_s, env)
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
    sharded = arguments.rank_of.startswith("fsdp2")
    model = build(arguments.size, arguments.sequence, device, torch.float32 if sharded else torch.bfloat16)
    trainer = _TRAINERS[arguments.rank_of](model, arguments)
    of_all = batches(arguments.size, arguments.batch, arguments.sequence, device, torch.bfloat16)
    row = _timed(trainer, itertools.islice(of_all, rank, None, size), arguments, device)
    if rank == 0:
        print(json.dumps(row), flush=True)
    distributed.barrier()
    os._exit(0)  # threads of a group, or of an engine, may keep the process from ending


def _timed(trainer: Trainer[Batch], own: Any, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    def window(steps: int) -> float:
        distributed.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            trainer.step(next(own))
        trainer.finish()
        distributed.barrier()
        return (time.perf_counter() - begin_s) / steps

    window(max(arguments.warmup, 1))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    windows_s = [window(arguments.window) for _ in range(WINDOWS)]
    taken: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
    distributed.all_gather_object(taken, memory(device))
    gpu_gb = [of["gpu_peak_allocated_gb"] for of in taken]
    return {
        "step_s": round(statistics.median(windows_s), 5),
        "windows_s": [round(s, 5) for s in windows_s],
        "window_steps": arguments.window,
        "warmup_steps": arguments.warmup,
        "gpu_gb": None if None in gpu_gb else max(gpu_gb),
        "host_gb": round(sum(of["host_rss_gb"] for of in taken), 2),
        "plan": _in_words(trainer.about().get("plan")),
    }


def _in_words(plan: Mapping[str, Any] | None) -> str | None:
    if plan is None:
        return None
    shares = " / ".join(f"{share:.0%} {name}" for name, share in plan["share"].items())
    return f"k={plan['k']} of {plan['units']}, {shares}"


def _replicated(model: nn.Module) -> nn.Module:
    of = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    return nn.parallel.DistributedDataParallel(model, device_ids=of, gradient_as_bucket_view=True)


def _backward(model: nn.Module) -> Callable[[Batch], torch.Tensor]:
    def backward(batch: Batch) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss.detach()

    return backward


def _floor(model: nn.Module, arguments: argparse.Namespace) -> Trainer[Batch]:
    ddp = _replicated(model)
    return loops.floor(ddp, _backward(ddp))


def _ddp(model: nn.Module, arguments: argparse.Namespace) -> Trainer[Batch]:
    ddp = _replicated(model)
    return loops.on_device(ddp, _backward(ddp), fused=True)


def _fsdp2(model: nn.Module, arguments: argparse.Namespace) -> Trainer[Batch]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}
    if arguments.rank_of == "fsdp2_offload":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in blocks(arguments.size, model):
        block.compile()
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    backward = _backward(model)

    def step(batch: Batch) -> torch.Tensor:
        loss = backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Trainer(step, loops.synchronize)


def _ours(model: nn.Module, arguments: argparse.Namespace) -> Trainer[Batch]:
    backward = _backward(model)

    def clipped(batch: Batch) -> torch.Tensor:
        loss = backward(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    return loops.ours(model, clipped if arguments.rank_of == "clipped" else backward, OURS[arguments.rank_of])


_TRAINERS: Mapping[str, Callable[[nn.Module, argparse.Namespace], Trainer[Batch]]] = {
    "floor": _floor, "ddp": _ddp, "fsdp2": _fsdp2, "fsdp2_offload": _fsdp2, **dict.fromkeys(OURS, _ours),
}
