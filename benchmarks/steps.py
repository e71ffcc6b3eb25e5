"""Step time of one way of training one model, in a process of its own.

    python -m benchmarks steps ours 3b --batch 4 --sequence 2048 --option gpu_states=0.25

A step is wall time over a window of consecutive steps without synchronisation, ended by a full
drain; three windows, median and spread. Modes: `floor` (compiled forward and backward, no
optimizer), `all_gpu` (fp32 masters and fused AdamW on the device), `reference` (as all_gpu, with
AdamW(foreach=True), whose bits are ours), `ours`; peers, where they are installed: `zero_offload`
(DeepSpeed ZeRO-2 with CPU offload, compiled), `torchao` (CPUOffloadOptimizer, blocks compiled, fp32
parameters under autocast); with weights on the CPU too `zero_infinity` (DeepSpeed ZeRO-3) and
`fsdp2_offload` (fully_shard with CPUOffloadPolicy, blocks compiled, fp32 parameters).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import own_modes, peers
from benchmarks.case import MODES, CannotRun, Case
from benchmarks.idle import idle_share, kernel_time
from benchmarks.launching import launching
from benchmarks.machine import machine
from benchmarks.models import Batch, batches, build, trained
from benchmarks.turns import Turn
from hytrain_fx.forecast.bench.loops import Trainer
from hytrain_fx.forecast.bench.memory import memory
from hytrain_fx.forecast.bench.windows import OTHER_WARMUP_STEPS, OUR_WARMUP_STEPS, timed
from hytrain_fx.runtime.energy import meter_of

TRAINERS: Mapping[str, Callable[[Case, nn.Module, torch.device], Trainer[Batch]]] = {
    "floor": own_modes.floor, "all_gpu": own_modes.all_gpu, "reference": own_modes.reference, "ours": own_modes.ours,
    "zero_offload": peers.zero_offload, "torchao": peers.torchao, "zero_infinity": partial(peers.zero_offload, stage=3, weights_too=True),
    "fsdp2_offload": partial(peers.fsdp2, offload=True),
}
LOOKS = ("trace", "timeline", "recording", "explain")  # after the windows
OWN_OPTIONS = (*LOOKS, "barrier")


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m benchmarks steps` that make the case.

    Rows that agree in them are one.
    """
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("size", help="tiny, 125m, 1b, 3b, 7b, 10b, wN (N layers of N heads of 128), hHlN (N layers of H heads), or of the "
                        "zoo: gpt2, gpt2.small, ...")
    parser.add_argument("--batch", type=int, default=4, help="sequences (or other samples) in a step")
    parser.add_argument("--sequence", "--seq", type=int, default=2048, help="tokens in a sequence, or what is long about another sample")
    parser.add_argument("--micro-batches", type=int, default=1, help="backwards in one step, each over --batch sequences")
    parser.add_argument("--clip", type=float, default=None, help="clip_grad_norm_ to this")
    parser.add_argument("--scaled-every", type=int, default=1, metavar="N", help="with --clip: only every N-th step's gradients are scaled")
    parser.add_argument("--autocast", action="store_true", help="fp32 parameters under bf16 autocast")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--device-memory", type=float, default=None, metavar="GB", help="torch may take no more of the GPU (10^9 bytes)")
    parser.add_argument("--host-memory", type=float, default=None, metavar="GB", help="ours: states take at most 85 %% of it (10^9 bytes); "
                        "table, rows and largest also end a row whose processes hold more")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="option of hytrain_fx.compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python -m benchmarks steps`."""
    add_case_arguments(parser)
    parser.add_argument("--window", type=int, default=10, help="steps in one window")
    parser.add_argument("--warmup", type=int, default=None, help="steps before the first window (default: 30 for ours, else 3)")
    parser.add_argument("--idle", action="store_true", help="trace three steps more for the share of GPU idle time")
    parser.add_argument("--launching", action="store_true", help="what holds up the threads that launch: their times, calls and cores")
    parser.add_argument("--deterministic", action="store_true", help="torch.use_deterministic_algorithms")
    parser.add_argument("--losses", type=int, default=0, help="print this many losses and a checksum of the weights, time nothing")
    parser.add_argument("--trace", type=Path, default=None, help="ours: write a Chrome trace of three steps here, and give the overlap")
    parser.add_argument("--timeline", type=Path, action="append", default=[], metavar="FILE",
                        help="ours: record three steps more and write them here (.json: Chrome trace, .png: picture); may be repeated")
    parser.add_argument("--barrier", action="store_true",
                        help="ours: wait before step() and for all updates after it, as ZeRO-Offload (--option k=0 --option stream=0)")
    parser.add_argument("--recording", action="store_true", help="ours: time windows with and without recording, in turn")
    parser.add_argument("--turn", type=int, default=None, metavar="DESCRIPTOR",
                        help="other rows compile on this machine: be timed alone (by the lock that benchmarks/turns.py took for this row)")
    parser.add_argument("--beside-others", action="store_true", help="with --turn: be timed while others compile, and say so in the row")
    parser.add_argument("--shares-gpu", action="store_true", help="with --turn: rows of the same GPU are among those; wait in any mode")
    parser.add_argument("--explain", action="store_true", help="ours: print hytrain_fx.explain at the end")


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the command line names. Raises CannotRun."""
    return Case(arguments.mode, arguments.size, arguments.batch, arguments.sequence, arguments.clip, arguments.autocast,
                arguments.checkpointing, tuple(arguments.option), arguments.micro_batches, arguments.scaled_every,
                arguments.device_memory, arguments.host_memory)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train as told; the row, or the losses. Raises CannotRun."""
    case = case_of(arguments)
    if case.mode != "ours" and any(getattr(arguments, name) for name in OWN_OPTIONS):
        raise CannotRun(f"{', '.join(f'--{name}' for name in OWN_OPTIONS)} are for mode ours; --idle and --launching are for all")
    if wrong := [path for path in arguments.timeline if path.suffix not in (".json", ".png")]:
        raise CannotRun(f"found --timeline {wrong[0]}, expected a name that ends in .json (Chrome trace) or .png (picture)")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if arguments.deterministic:
        torch.use_deterministic_algorithms(True)
    cap_device(case.device_memory_gb, device)
    turn = Turn(arguments.turn)
    began_s = time.perf_counter()
    dtype = torch.float32 if case.autocast else torch.bfloat16
    model = build(case.size, case.sequence, device, dtype, case.checkpointing)
    built_s = time.perf_counter()
    params = sum(p.numel() for p in trained(model))  # of the whole model: ZeRO-3 leaves none in its parameters
    make = partial(own_modes.ours, barrier=True) if arguments.barrier else TRAINERS[case.mode]
    trainer = make(case, model, device)
    data = batches(case.size, case.batch, case.sequence, device, dtype)
    barrier = {"barrier": True} if arguments.barrier else {}
    row: dict[str, Any] = {**case.values(), **barrier, "params": params, "machine": machine()}
    if arguments.losses:
        row["losses"] = torch.stack([trainer.step(next(data)) for _ in range(arguments.losses)]).tolist()
        trainer.finish()
        return row | {"checksum": checksum(model)}
    trainer.step(next(data))
    trainer.finish()
    row["build_s"], row["first_step_s"] = round(built_s - began_s, 2), round(time.perf_counter() - built_s, 2)
    compiled_s = time.perf_counter()
    if arguments.beside_others:
        row["beside_others"] = True
    else:
        turn.wait_to_be_alone(case.mode, arguments.shares_gpu)
    waited_us = (time.perf_counter() - compiled_s) * 1e6
    warmup = (OUR_WARMUP_STEPS if case.mode == "ours" else OTHER_WARMUP_STEPS) if arguments.warmup is None else arguments.warmup
    row |= timed(trainer, data, warmup, arguments.window, device, meter_of(device), case.tokens)
    about = _without_waiting(trainer.about(), waited_us)
    in_use = about.get("memory_in_use", {})
    row |= memory(device, in_use.get("pinned_bytes", in_use.get("host_bytes", 0))) | about
    if arguments.idle:
        row |= kernel_time(lambda: trainer.step(next(data)), trainer.finish)
        row["idle_share"] = idle_share(row["kernel_busy_s"], row["step_s"])
    if arguments.launching:
        row["launching"] = launching(lambda: trainer.step(next(data)), trainer.finish, trainer.launching_s,
                                      model if case.mode == "ours" else None)
    if not any(getattr(arguments, name) for name in LOOKS):
        return row
    print(json.dumps(row), flush=True)  # what follows may outlast a time limit, and the row is made
    return row | _looked_into(model, trainer, data, arguments)


def cap_device(gb: float | None, device: torch.device) -> None:
    """Hold torch's allocator in this process to so many 10^9 bytes of the GPU; None: to nothing.

    Raises CannotRun where there is no GPU, or one with less memory.
    """
    if gb is None:
        return
    if device.type != "cuda":
        raise CannotRun(f"found --device-memory {gb:g}, which holds torch to a share of a GPU, and no GPU here; leave it out")
    total_bytes = torch.cuda.mem_get_info(device)[1]
    if 1e9 * gb > total_bytes:
        raise CannotRun(f"found --device-memory {gb:g}, expected at most {total_bytes / 1e9:.1f}, what this GPU has")
    torch.cuda.set_per_process_memory_fraction(1e9 * gb / total_bytes, device)


def _without_waiting(about: Mapping[str, Any], waited_us: float) -> dict[str, Any]:
    """The start-up without the wait for other rows, which fell between two warm-up steps."""
    startup = about.get("startup")
    if not startup:
        return dict(about)
    counted = {name: startup[name] - waited_us for name in ("warm_up_us", "own_us", "total_us")}
    return {**about, "startup": {**startup, **counted}}


def _looked_into(
    model: nn.Module, trainer: Trainer[Batch], data: Iterator[Batch], arguments: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def step() -> torch.Tensor:
        return trainer.step(next(data))

    if arguments.trace:
        from benchmarks.overlap import traced

        found["overlap"] = traced(model, step, trainer.finish, arguments.trace)
    if arguments.recording:
        from benchmarks.timeline import recording_cost

        found["recording"] = recording_cost(model, step, trainer.finish, arguments.window)
    if arguments.timeline:
        from benchmarks.timeline import drawn

        found["timeline"] = drawn(model, step, trainer.finish, arguments.timeline, arguments.barrier)
    if arguments.explain:
        import hytrain_fx

        print(hytrain_fx.explain(model))
    return found


def checksum(model: nn.Module) -> int:
    """Sum of all weights' bits as integers: equal weights, equal number."""
    total = 0
    for parameter in model.parameters():
        words = parameter.detach().contiguous().view(torch.int16 if parameter.element_size() == 2 else torch.int32)
        total = (total * 31 + int(words.long().sum())) % (1 << 61)
    return total
