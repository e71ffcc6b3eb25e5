"""How much longer launching takes beside work on other cores, as a Markdown table.

A model so small that the thread that launches it is all there is to time trains without an
optimizer, compiled by torch alone. Beside it processes, which share nothing with it but the
machine, repeat one of these:

    arithmetic       updates of parameters that stay in their core's own cache
    copies           of memory that no cache holds
    updates          by the CPU, of parameters that no cache holds
    updates, bf16    the same, with moments in 16 bits

What arithmetic costs is the cores' (they share clocks and pipelines), what the others cost beyond
it the shared cache's and the memory's.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch

from benchmarks import models
from benchmarks.kernels import CHUNK_IN_L2, update_of
from benchmarks.markdown import table

COPY_BYTES: Final = 1 << 27
_IDLE, _PAUSE_S, _SETTLE_S, _ROUNDS_IN_L2 = -1, 0.01, 0.5, 500


def _copy() -> Callable[[], object]:
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), COPY_BYTES)


KINDS: Final[dict[str, Callable[[int], Callable[[], object]]]] = {
    "arithmetic": lambda parameters: update_of(CHUNK_IN_L2, calls=_ROUNDS_IN_L2),
    "copies": lambda parameters: _copy(),
    "updates": update_of,
    "updates, bf16": partial(update_of, moments="bf16"),
}
"""By name: what makes one repeat of a process's work, of so many parameters."""


def _work(number: int, parameters: int, kind: Any, active: Any, done: Any) -> None:
    """What process `number` does until it is ended: repeats of a kind, if it is an active one."""
    torch.set_num_threads(1)
    repeats = [make(parameters) for make in KINDS.values()]
    done[number] = 0
    while True:
        if kind.value == _IDLE or number >= active.value:
            time.sleep(_PAUSE_S)
            continue
        repeats[kind.value]()
        done[number] += 1


class Loads:
    """Processes that work beside this one: `beside` says how many, and at what."""

    def __init__(self, most: int, parameters: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._kind, self._active = context.Value("i", _IDLE, lock=False), context.Value("i", 0, lock=False)
        self._done = context.Array("q", [-1] * most, lock=False)
        shared = (parameters, self._kind, self._active, self._done)
        self._processes = [context.Process(target=_work, args=(number, *shared), daemon=True) for number in range(most)]
        for process in self._processes:
            process.start()
        while min(self._done, default=0) < 0:
            if not all(process.is_alive() for process in self._processes):
                raise RuntimeError("a process that was to work beside this one has ended: look at its error above")
            time.sleep(_PAUSE_S)

    @contextmanager
    def beside(self, kind: str, count: int) -> Iterator[Callable[[], float]]:
        """Meanwhile `count` processes do this.

        Gives what tells how many repeats all of them have done a second.
        """
        self._active.value, self._kind.value = count, list(KINDS).index(kind)
        time.sleep(_SETTLE_S)
        before, began_s = sum(self._done), time.perf_counter()
        try:
            yield lambda: (sum(self._done) - before) / (time.perf_counter() - began_s)
        finally:
            self._kind.value = _IDLE
            time.sleep(_SETTLE_S)

    def end(self) -> None:
        """No process is left."""
        for process in self._processes:
            process.kill()
            process.join()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--counts", default="4,8,12", help="numbers of processes beside (default: 4,8,12)")
    parser.add_argument("--parameters", type=int, default=8 << 20, help="that one process updates in a repeat (default: 8 Mi)")
    parser.add_argument("--size", default="h1l24", help="the model (default: 24 layers of width 128)")
    parser.add_argument("--steps", type=int, default=40, help="that are timed for a row")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")


def run(arguments: argparse.Namespace) -> None:
    """Print a row for each kind of work and each count, and one without any before and after."""
    counts = [int(count) for count in arguments.counts.split(",")]
    step = _launching(arguments.size, arguments.backend)
    loads = Loads(max(counts), arguments.parameters)
    try:
        first = _timed(step, arguments.steps)
        rows = [_row("nothing", 0, first, first, 0.0)]
        for kind in KINDS:
            for count in counts:
                with loads.beside(kind, count) as rate:
                    rows.append(_row(kind, count, _timed(step, arguments.steps), first, rate()))
        rows.append(_row("nothing", 0, _timed(step, arguments.steps), first, 0.0))
    finally:
        loads.end()
    head = ("beside", "processes", "launching, ms a step", "quartiles", "of nothing beside", "repeats a second, all")
    print(table(head, rows))


def _launching(size: str, backend: str) -> Callable[[], float]:
    """A forward and a backward, which have ended on the device.

    Gives for how many seconds they were launched.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = models.build(size, 32, device, torch.bfloat16)
    model.compile(backend=backend)
    batch = next(models.batches(size, 1, 32, device, torch.bfloat16))

    def step() -> float:
        began_s = time.perf_counter()
        models.loss_of(model, batch).backward()
        took_s = time.perf_counter() - began_s
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return took_s

    return step


def _timed(step: Callable[[], float], steps: int) -> Sequence[float]:
    for _ in range(5):
        step()
    return [step() for _ in range(steps)]


def _row(kind: str, count: int, took_s: Sequence[float], alone_s: Sequence[float], rate: float) -> tuple[str, ...]:
    low, median, high = (1e3 * s for s in statistics.quantiles(took_s, n=4))
    times = median / (1e3 * statistics.median(alone_s))
    return kind, str(count), f"{median:.2f}", f"{low:.2f} to {high:.2f}", f"{times:.2f}", f"{rate:.1f}"
