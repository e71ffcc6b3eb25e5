"""Each row runs in a process of its own, one after the other or one on each GPU.

One that fails or takes too long is noted, and the next runs.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from benchmarks.case import Case
from benchmarks.host_watch import HostWatch
from benchmarks.machine import machine
from benchmarks.results import Results, Row
from benchmarks.turns import Ask, Memory, Seat, entered, on_cores
from hytrain_fx.forecast.bench.process import row_in, run_to_end, why_none
from hytrain_fx.progress import stage
from hytrain_fx.runtime.memory import available_host_bytes

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
STEPS = (sys.executable, "-m", "benchmarks", "steps")
_MOST_OF_MEMORY = 0.93  # that rows side by side may ask for
_POLL_S = 0.5


@dataclass(frozen=True)
class Launch:
    """How rows are run.

    logs      folder that receives what each row prints
    limit_s   seconds after which a row is ended
    extra     further arguments of `steps`
    cache     Inductor's cache, shared by all rows; None = torch's own place, which is shared too
    command   what is run, before the case's arguments
    total_s   seconds after which no row goes on; what is missing then is run by the next call, None
              = no end
    seats     GPUs that rows run on side by side (`benchmarks.turns`); none = one after the other,
              on this process's GPU and cores
    """

    logs: Path
    limit_s: float = 900.0
    extra: tuple[str, ...] = ()
    cache: Path | None = None
    command: tuple[str, ...] = STEPS
    total_s: float | None = None
    seats: tuple[Seat, ...] = ()


def measure(cases: Sequence[Case], results: Results, launch: Launch, *, again: bool = False, retry: bool = False,
            tell: Callable[[str], None] = print, asks: Mapping[str, Ask] | None = None) -> None:
    """Run the cases that have no row yet. Every row is written as soon as it is there.

    With `retry` those that failed run too, with `again` all. `asks` is by key of a case. A row
    whose memory others have lets the next one pass.
    """
    began_s = time.monotonic()
    waiting, writing = list(enumerate(cases, 1)), threading.Lock()
    memory = memory_here() if asks else Memory(0.0, 0.0)

    def taken(gpu: str) -> tuple[int, Case, Ask] | None:
        for number, case in waiting:
            ask = (asks or {}).get(case.key, Ask())
            if memory.take(gpu, ask):
                waiting.remove((number, case))
                return number, case, ask
        return None

    def run_rows(seat: Seat | None) -> None:
        """Until none is left."""
        gpu = "" if seat is None else seat.gpu
        while waiting:
            with writing:
                job = taken(gpu)
            if job is None:
                time.sleep(_POLL_S)
                continue
            try:
                with _place(seat, launch) as turn:
                    if not run_row(seat, turn, *job):
                        return
            finally:
                with writing:
                    memory.give(gpu, job[2])

    def run_row(seat: Seat | None, turn: int | None, number: int, case: Case, ask: Ask) -> bool:
        """Whether there is time for more."""
        known = results.get(case)
        name = f"{number}/{len(cases)} {case.key}"
        if known is not None and not again and not (retry and "error" in known):
            tell(f"{name}: there already")
            return True
        left_s = math.inf if launch.total_s is None else launch.total_s - (time.monotonic() - began_s)
        show(case.key, done=number - 1, total=len(cases))
        limited = replace(launch, limit_s=min(launch.limit_s, left_s), extra=(*launch.extra, *ask.extra))
        row = run_case(case, limited, seat, turn) if left_s > 0 else None
        if row is None or ("error" in row and launch.total_s is not None and time.monotonic() - began_s >= launch.total_s):
            tell(f"{name}: the {launch.total_s:g} s for all rows are over; call again for the rest")
            return False
        with writing:
            results.put(case, row)
        tell(f"{name}: {row.get('error') or str(row['step_s']) + ' s a step'} ({row['wall_s']} s in all)")
        return True

    with stage("rows") as show:
        if not launch.seats:
            return run_rows(None)
        in_threads(run_rows, launch.seats, waiting.clear)


def in_threads(work: Callable[[T], object], of: Sequence[T], stop: Callable[[], object]) -> None:
    """Each in a thread.

    After an error, or an interrupt, `stop` is called, so that no row begins, and all that run end.
    """
    with ThreadPoolExecutor(len(of)) as pool:
        try:
            list(pool.map(work, of))
        except BaseException:
            stop()
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            raise


def _place(seat: Seat | None, launch: Launch) -> contextlib.AbstractContextManager[int | None]:
    """Among rows side by side: entered when none of them is timed alone."""
    return contextlib.nullcontext() if seat is None else entered(launch.logs / "turn")


def memory_here() -> Memory:
    """What rows side by side may ask for."""
    here = machine()
    return Memory(_MOST_OF_MEMORY * (here["gpu_memory_gb"] or 0.0), _MOST_OF_MEMORY * here["host_memory_gb"], _host_gb_free)


def _host_gb_free(asked_gb: float) -> float:
    """Memory available now, less what running rows have asked for and not taken yet."""
    taken_gb = 0.0
    for row in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            taken_gb += row.memory_info().rss / 1e9
    return available_host_bytes() / 1e9 - max(asked_gb - taken_gb, 0.0)


def run_case(case: Case, launch: Launch, seat: Seat | None = None, turn: int | None = None) -> Row:
    """The row of a case, or its fields with `error`, which says why there is none.

    On a seat it has a `turn` (`benchmarks.turns.entered`). Where the case caps host memory, the row
    has the most that its processes held (`host_peak_gb`), and is ended above the cap.
    """
    launch.logs.mkdir(parents=True, exist_ok=True)
    log = launch.logs / f"{file_name(case.key)}.log"
    began = time.perf_counter()
    watch = None if case.host_memory_gb is None else HostWatch(1e9 * case.host_memory_gb)
    with log.open("w") as file:
        status = _run([*launch.command, *case.arguments, *launch.extra], file.fileno(), launch, seat, turn, watch)
    printed = log.read_text(errors="replace")
    wall_s = round(time.perf_counter() - began, 1)
    row = row_in(printed) if status in (0, None) else None  # a row that was printed counts, even if its process did not end
    more: Row = {"wall_s": wall_s}
    over = None
    if watch is not None:
        over = watch.why_over(1e9 * ((row or {}).get("pinned_gb") or 0.0))
        more["host_peak_gb"] = round(watch.peak_bytes / 1e9, 3)
    if row is not None and over is None:
        return row | more
    return {**case.values(), "machine": machine(), "error": over or why_none(status, printed, launch.limit_s), **more}


def file_name(key: str) -> str:
    """A key as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "_", key)


def environment() -> dict[str, str]:
    """This process's, in which a child imports this checkout."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def _run(
    command: Sequence[str], output: int, launch: Launch, seat: Seat | None, turn: int | None, watch: HostWatch | None
) -> int | None:
    """The exit status; None where the time was up."""
    env = environment()
    if launch.cache is not None:
        env["TORCHINDUCTOR_CACHE_DIR"] = str(launch.cache.resolve())
    may_go_on = None if watch is None else watch.may_go_on
    if seat is None:
        return run_to_end(command, output, launch.limit_s, env, may_go_on=may_go_on)
    command = [*command, "--turn", str(turn), *(["--shares-gpu"] if seat.shared else [])]
    with on_cores(seat.cores):
        env["CUDA_VISIBLE_DEVICES"] = seat.gpu
        return run_to_end(command, output, launch.limit_s, env, () if turn is None else (turn,), may_go_on)
