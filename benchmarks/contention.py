"""What host memory and the link give together, as a Markdown table.

A CPU AdamW of some threads runs beside pinned copies both ways. torch's fused AdamW on fp32 tensors
moves 28 bytes of host memory a parameter, a copy its own bytes. Where the sum stays the same from a
number of threads on, host memory is what binds, and streamed updates cost the CPU's what they gain.
"""

from __future__ import annotations

import argparse
import threading
import time
from dataclasses import dataclass, field

import torch

from benchmarks.case import CannotRun
from benchmarks.markdown import table
from hytrain_fx.ir.limits import CHUNK_PARAMS
from hytrain_fx.runtime.launch import default_workers
from hytrain_fx.runtime.states.slabs import HostSlab, pin_slabs

ADAMW_BYTES_PER_PARAM = 28
PIECES_IN_FLIGHT = 6
POLL_S = 2e-5


@dataclass
class Load:
    """Work repeated until `stop`.

    `done` counts bytes copied or parameters updated, `seconds` says how long it ran.
    """

    stop: threading.Event
    done: float = 0.0
    seconds: float = field(default=1.0)

    @property
    def rate(self) -> float:
        """Per second."""
        return self.done / self.seconds


class Copies:
    """Pinned host memory and a device buffer for one direction."""

    def __init__(self, device: torch.device, to_host: bool, host_params: int) -> None:
        self._slab = HostSlab(4 * host_params)
        pin_slabs([self._slab], device, default_workers(device))
        self._host = self._slab.take(host_params, torch.float32).split(CHUNK_PARAMS)
        self._device = torch.empty(PIECES_IN_FLIGHT, CHUNK_PARAMS, device=device)
        self._to_host, self._stream = to_host, torch.cuda.Stream(device)

    def run(self, load: Load) -> None:
        """Copy piece by piece, a few in flight."""
        events: list[torch.cuda.Event] = []
        began_s, number = time.perf_counter(), 0
        while not load.stop.is_set():
            if len(events) == PIECES_IN_FLIGHT:
                oldest = events.pop(0)
                while not oldest.query():
                    time.sleep(POLL_S)
            host, device = self._host[number % len(self._host)], self._device[number % PIECES_IN_FLIGHT]
            with torch.cuda.stream(self._stream):
                (host if self._to_host else device).copy_(device if self._to_host else host, non_blocking=True)
                events.append(torch.cuda.Event())
                events[-1].record(self._stream)
            load.done += 4 * CHUNK_PARAMS
            number += 1
        self._stream.synchronize()
        load.seconds = time.perf_counter() - began_s


class Updates:
    """Four fp32 tensors that torch's fused AdamW works on with `threads` threads."""

    threads = 1

    def __init__(self, params: int) -> None:
        self._tensors = [torch.zeros(params) for _ in range(4)]
        self._step = torch.tensor(1.0)

    def run(self, load: Load) -> None:
        """Update all of them again and again."""
        torch.set_num_threads(self.threads)  # counts for the calling thread
        weight, grad, first, second = ([tensor] for tensor in self._tensors)
        began_s = time.perf_counter()
        while not load.stop.is_set():
            torch._fused_adamw_(weight, grad, first, second, [], [self._step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
                                amsgrad=False, maximize=False)
            load.done += self._tensors[0].numel()
        load.seconds = time.perf_counter() - began_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--threads", default="0,8,12,14,16", help="numbers of CPU threads, 0 for copies alone")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of each measurement")
    parser.add_argument("--params", type=int, default=400_000_000, help="parameters updated in one call")
    parser.add_argument("--skip-copies", action="store_true", help="updates alone, which need no GPU")


def run(arguments: argparse.Namespace) -> None:
    """Print a row for each number of threads, with copies and without.

    Raises CannotRun where copies are wanted and there is no GPU.
    """
    if not arguments.skip_copies and not torch.cuda.is_available():
        raise CannotRun("copies need a GPU, and torch finds none: pass --skip-copies for updates alone")
    copies = [] if arguments.skip_copies else [Copies(torch.device("cuda", 0), to_host, 1 << 30) for to_host in (False, True)]
    updates = Updates(arguments.params)
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        updates.threads = max(threads, 1)
        for beside in ([True, False] if copies and threads else [bool(copies)]):
            rows.append(_measured(threads, updates, copies if beside else [], arguments.seconds))
    print(table(("CPU threads", "to the GPU, GB/s", "to the host, GB/s", "AdamW, G parameters/s", "host memory, GB/s"), rows))


def _measured(threads: int, updates: Updates, copies: list[Copies], seconds: float) -> tuple[str, ...]:
    stop = threading.Event()
    work: list[Copies | Updates] = [*copies, *([updates] if threads else [])]
    loads = [Load(stop) for _ in work]
    runners = [threading.Thread(target=one.run, args=(load,)) for one, load in zip(work, loads, strict=True)]
    for runner in runners:
        runner.start()
    time.sleep(seconds)
    stop.set()
    for runner in runners:
        runner.join()
    ways = [load.rate / 1e9 for load in loads[: len(copies)]]
    updated = loads[-1].rate / 1e9 if threads else 0.0
    memory = sum(ways) + ADAMW_BYTES_PER_PARAM * updated
    return (str(threads), *(f"{way:.1f}" for way in ways or [0.0, 0.0]), f"{updated:.2f}", f"{memory:.0f}")
