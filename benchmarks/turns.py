"""Rows side by side on the GPUs of one machine: they compile together, and are timed one at a time.

Rows share the host's memory, and a row whose states are there is bound by it. So such a row waits,
compiled, until no other row compiles or is timed: it takes an exclusive lock on a file. Rows with
everything on the GPU hold the lock shared, from beginning to end. Where several rows have one GPU,
so that more of them compile at once, each of them waits. A row's process is started with the lock,
because importing torch takes seconds of cores that another row may have.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.case import CannotRun

WITHOUT_HOST = ("floor", "all_gpu", "reference")


@dataclass(frozen=True)
class Seat:
    """Where rows run: CUDA_VISIBLE_DEVICES, cores, and whether another seat shares them."""

    gpu: str
    cores: tuple[int, ...]
    shared: bool = False


@dataclass(frozen=True)
class Ask:
    """What a row wants besides its case.

    Further arguments of `steps`, and the most that it takes of GPU and host memory, in GB.
    """

    extra: tuple[str, ...] = ()
    gpu_gb: float = 0.0
    host_gb: float = 0.0


class Memory:
    """What is left of each GPU's memory and of the host's, in GB. One lock guards its methods."""

    def __init__(self, gpu_gb: float, host_gb: float, free_gb: Callable[[float], float] = lambda asked_gb: math.inf) -> None:
        """`free_gb`, by what running rows have asked for.

        Of the host's memory: less what rows may still take, and less what other programs have.
        """
        self._gpu_gb, self._host_gb, self._free_gb = gpu_gb, host_gb, free_gb
        self._taken: dict[str, list[Ask]] = {}

    def take(self, gpu: str, ask: Ask) -> bool:
        """Take what a row asks for, if it is there or no other row has anything.

        A row that is alone may ask for more than there is.
        """
        here, everywhere = self._taken.setdefault(gpu, []), [other for others in self._taken.values() for other in others]
        gpu_gb_left = max(self._gpu_gb - sum(other.gpu_gb for other in here), 0.0)
        asked_gb = sum(other.host_gb for other in everywhere)
        host_gb_left = max(self._host_gb - asked_gb, 0.0)
        fits = ask.gpu_gb <= gpu_gb_left and ask.host_gb <= host_gb_left
        # The system is asked last: rows that wait come here often, beside one that is timed.
        if not everywhere or (fits and (not ask.host_gb or ask.host_gb <= self._free_gb(asked_gb))):
            here.append(ask)
            return True
        return False

    def give(self, gpu: str, ask: Ask) -> None:
        """The row has ended."""
        self._taken[gpu].remove(ask)


@contextmanager
def entered(path: Path) -> Iterator[int]:
    """Wait until no row is timed alone, then give a descriptor of the lock, held shared.

    The row that is started meanwhile keeps it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield file.fileno()


class Turn:
    """One row's place among the others: the lock that `entered` took for it. None: it is alone.

    Closing the file, also by the process's end, gives the lock back.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._file = None if descriptor is None else os.fdopen(descriptor, "w")
        if descriptor is not None:
            os.set_inheritable(descriptor, False)  # processes that this one starts must not keep the lock

    def wait_to_be_alone(self, mode: str, shares_gpu: bool = False) -> None:
        """Return when no other row compiles or is timed.

        That is at once for a mode that leaves the host alone, on a GPU of its own.
        """
        if self._file and (shares_gpu or mode not in WITHOUT_HOST):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # two that both hold it shared would wait for each other
            fcntl.flock(self._file, fcntl.LOCK_EX)


class Rounds:
    """Rows of which each takes all GPUs: some compile together, then each of them is timed alone.

    A row that has compiled is timed before another begins to compile, so rows compile in as few
    rounds as may be. Threads of one process call it, one for each row.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiling = self._waiting = self._timed = 0
        self._stopped = False

    def begin(self) -> None:
        """Before a row's process is started: return when no row is timed, or waits for it.

        Raises CannotRun where no row is to begin any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not (self._waiting or self._timed))
            if self._stopped:
                raise CannotRun("the rows were interrupted")
            self._compiling += 1

    def stop(self) -> None:
        """No row begins any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def compiled(self) -> None:
        """The row has compiled."""
        with self._changed:
            self._compiling -= 1
            self._waiting += 1

    def is_next(self) -> bool:
        """Whether the row that asks, which has compiled, is timed from now on."""
        with self._changed:
            if self._compiling or self._timed:
                return False
            self._waiting -= 1
            self._timed = 1
            return True

    def end(self, *, compiled: bool, timed: bool) -> None:
        """The row's process has ended; how far it came."""
        with self._changed:
            self._timed -= timed
            self._waiting -= compiled and not timed
            self._compiling -= not compiled
            self._changed.notify_all()


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes started by this thread meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def seats(gpus: int, rows_per_gpu: int = 1) -> tuple[Seat, ...]:
    """`rows_per_gpu` seats for each of `gpus` visible GPUs; all GPUs have equally many cores.

    Raises CannotRun where there are fewer GPUs or cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(gpu) for gpu in range(gpus)] if visible is None else [name for name in visible.split(",") if name]
    if gpus > min(len(names), len(cores)):
        raise CannotRun(f"found {len(names)} visible GPUs and {len(cores)} cores for --gpus {gpus}, expected at least one of each for each")
    each = len(cores) // gpus
    return tuple(Seat(names[gpu], tuple(cores[gpu * each : (gpu + 1) * each]), rows_per_gpu > 1)
                 for _ in range(rows_per_gpu) for gpu in range(gpus))
